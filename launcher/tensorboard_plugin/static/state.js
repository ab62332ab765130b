// What is looked at: run, tab, filters, sort, variant, selection, window. It is kept in the address, so that
// a reload or a link shows the same again.

const KEY = 'gpurun';

/** Holds the state and calls listeners on changes. Values are strings; absent means default. */
export class State {
  /** @param {Address} [address] */
  constructor(address = new Address()) {
    this.address = address;
    /** @type {{ [key: string]: string }} */
    this.values = address.read();
    /** @type {Set<(changes: Changes) => void>} */
    this.listeners = new Set();
  }

  /** @param {StateKey} key @returns {string | null} */
  get(key) {
    return this.values[key] ?? null;
  }

  /**
   * The values of a list, or `null` where nothing was chosen.
   * @param {StateKey} key
   * @returns {string[] | null}
   */
  list(key) {
    return this.values[key] == null ? null : this.values[key].split('~').filter(Boolean);
  }

  /**
   * Changes what is looked at; `null` removes. Listeners redraw.
   * @param {Changes} changes
   */
  go(changes) {
    this.note(changes);
    for (const listener of this.listeners) listener(changes);
  }

  /**
   * Writes down what a view has already drawn by itself: no listener is called.
   * @param {Changes} changes
   */
  note(changes) {
    for (const [key, value] of Object.entries(changes)) {
      if (value == null || value === '') delete this.values[key];
      else this.values[key] = value;
    }
    this.address.write(this.values);
  }

  /** @param {(changes: Changes) => void} listener */
  onChange(listener) {
    this.listeners.add(listener);
  }
}

/** Reads and writes the address. TensorBoard keeps `#plugin&key=value…` in the page around our frame. */
export class Address {
  constructor() {
    this.window = sameOriginParent() ?? window;
    this.inFrame = this.window !== window;
    this.timer = 0;
  }

  read() {
    const hash = this.window.location.hash.slice(1);
    return Object.fromEntries(new URLSearchParams(this.inFrame ? this.ownPart(hash) : hash));
  }

  /** @param {string} hash */
  ownPart(hash) {
    const part = hash.split('&').find((item) => item.startsWith(`${KEY}=`));
    return part ? decodeURIComponent(part.slice(KEY.length + 1)) : '';
  }

  /**
   * At most a few times a second: browsers count how often a page rewrites its address.
   * @param {{ [key: string]: string }} values
   */
  write(values) {
    const text = new URLSearchParams(values).toString();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.replace(text), 150);
  }

  /** @param {string} text */
  replace(text) {
    const { location, history } = this.window;
    const others = location.hash
      .slice(1)
      .split('&')
      .filter((item) => item && !item.startsWith(`${KEY}=`));
    // Another tab of TensorBoard may be in front by now: its name stays where it is.
    const hash = this.inFrame ? [...others, `${KEY}=${encodeURIComponent(text)}`].join('&') : text;
    history.replaceState(history.state, '', `${location.href.split('#')[0]}#${hash}`);
  }
}

function sameOriginParent() {
  try {
    return window.parent !== window && window.parent.location.href ? window.parent : null;
  } catch {
    return null;
  }
}
