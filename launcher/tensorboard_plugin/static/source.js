// Where answers come from: the server of the plugin (README.md in the directory above lists its routes).

const POLL_MS = 500;
/** How often it is asked how far a run is. */
export const FOLLOW_MS = 2000;

/** A failed request, with the server's own sentence. */
export class SourceError extends Error {}

/**
 * Whether something was cancelled: then there is nothing to say.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof DOMException && error.name === 'AbortError';
}

/**
 * What an error says.
 * @param {unknown} error
 */
export function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

/** Asks the plugin's server. Every request can be cancelled with a signal. */
export class HttpSource {
  /** @param {URL} base */
  constructor(base) {
    this.base = base;
    this.live = true;
  }

  /**
   * The address of a route with its parameters.
   * @param {keyof Routes} route
   * @param {Asked} [parameters]
   */
  url(route, parameters = {}) {
    const address = new URL(route, this.base);
    for (const [key, value] of Object.entries(parameters)) {
      for (const item of [value].flat()) if (item != null) address.searchParams.append(key, String(item));
    }
    return address;
  }

  /**
   * The answer as an object.
   * @template {keyof Routes} R
   * @param {R} route
   * @param {Asked} [parameters]
   * @param {AbortSignal} [signal]
   * @returns {Promise<Routes[R]>}
   */
  async get(route, parameters = {}, signal = undefined) {
    const response = await this.request(this.url(route, parameters), { signal });
    return response.json();
  }

  /** @param {keyof Routes} route @param {Asked} [parameters] @param {AbortSignal} [signal] */
  async bytes(route, parameters, signal) {
    return (await this.request(this.url(route, parameters), { signal })).arrayBuffer();
  }

  /** @param {URL} address @param {RequestInit} options */
  async request(address, options) {
    let response;
    try {
      response = await fetch(address, options);
    } catch (error) {
      if (isAbort(error)) throw error;
      throw new SourceError('TensorBoard does not answer; is it still running?');
    }
    if (!response.ok) throw new SourceError(await reason(response));
    return response;
  }

  /**
   * Asks until the answer is no longer `indexing` or `building`, calling `progress` each time.
   * @template {TracedRoute} R
   * @param {R} route
   * @param {Asked} parameters
   * @param {{ signal?: AbortSignal, progress?: (answer: UnderWay) => void }} [options]
   * @returns {Promise<Final<R>>}
   */
  async ready(route, parameters, { signal, progress } = {}) {
    let asked = parameters;
    for (;;) {
      /** @type {Routes[TracedRoute]} */
      const answer = await this.get(route, asked, signal);
      if (!isUnderWay(answer)) return /** @type {Final<R>} */ (answer);
      progress?.(answer);
      await pause(POLL_MS, signal);
      asked = { ...parameters, again: undefined }; // each `again` reads the traces again, without end
    }
  }
}

/**
 * Whether to ask again for what needs the index of the traces.
 * @param {Routes[TracedRoute]} answer
 * @returns {answer is UnderWay}
 */
function isUnderWay(answer) {
  return answer.state === 'indexing' || answer.state === 'building';
}

/** @param {Response} response @returns {Promise<string>} */
async function reason(response) {
  try {
    return (await response.json()).error ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/**
 * Resolves after a while, or rejects at once when the signal aborts.
 * @param {number} ms
 * @param {AbortSignal} [signal]
 * @returns {Promise<void>}
 */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) {
      reject(new DOMException('cancelled', 'AbortError'));
      return;
    }
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener(
      'abort',
      () => {
        clearTimeout(timer);
        reject(new DOMException('cancelled', 'AbortError'));
      },
      { once: true },
    );
  });
}

/**
 * Calls `look` from time to time, while someone sees `host`, until the signal aborts; a failure is passed over.
 * @param {() => Promise<void>} look
 * @param {Element} host
 * @param {AbortSignal} signal
 */
export async function follow(look, host, signal) {
  for (;;) {
    try {
      await pause(FOLLOW_MS, signal);
      if (!document.hidden && host.getClientRects().length) await look();
    } catch (error) {
      if (isAbort(error)) return;
    }
  }
}

/** Lets only the latest of many calls run: each cancels the one before. */
export class Latest {
  constructor() {
    /** @type {AbortController | null} */
    this.controller = null;
  }

  /**
   * Runs `work(signal)`; `undefined` if a later call has taken its place.
   * @template T
   * @param {(signal: AbortSignal) => Promise<T>} work
   * @param {number} [delayMs]
   * @returns {Promise<T | undefined>}
   */
  async run(work, delayMs = 0) {
    this.cancel();
    const controller = new AbortController();
    this.controller = controller;
    try {
      if (delayMs) await pause(delayMs, controller.signal);
      const answer = await work(controller.signal);
      return controller.signal.aborted ? undefined : answer;
    } catch (error) {
      if (isAbort(error)) return undefined;
      throw error;
    }
  }

  cancel() {
    this.controller?.abort();
  }
}
