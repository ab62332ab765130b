// Where answers come from: the server of the plugin (README.md beside this folder lists its routes).

const POLL_MS = 500;

/** A failed request, with the server's own sentence. */
export class SourceError extends Error {}

/** Asks the plugin's server. Every request can be cancelled with a signal. */
export class HttpSource {
  constructor(base) {
    this.base = base;
    this.live = true;
    this.tags = new Map();
  }

  /** The address of a route with its parameters. */
  url(route, parameters = {}) {
    const address = new URL(route, this.base);
    for (const [key, value] of Object.entries(parameters)) {
      for (const one of [value].flat()) if (one != null) address.searchParams.append(key, one);
    }
    return address;
  }

  /** The answer as an object. */
  async get(route, parameters = {}, signal = undefined) {
    const response = await this.request(this.url(route, parameters), { signal });
    return response.json();
  }

  /** The answer, or `null` if nothing has changed since the last time it was asked for. */
  async getChanged(route, parameters = {}, signal = undefined) {
    const address = this.url(route, parameters);
    const answer = await this.get(route, parameters, signal);
    const same = answer.version != null && this.tags.get(address.href) === answer.version;
    this.tags.set(address.href, answer.version);
    return same ? null : answer;
  }

  async bytes(route, parameters, signal) {
    return (await this.request(this.url(route, parameters), { signal })).arrayBuffer();
  }

  async request(address, options) {
    let response;
    try {
      response = await fetch(address, options);
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new SourceError('TensorBoard does not answer; is it still running?');
    }
    if (!response.ok) throw new SourceError(await reason(response));
    return response;
  }

  /** Asks until the answer is no longer `indexing` or `building`, telling `progress` each time. */
  async ready(route, parameters, { signal, progress } = {}) {
    for (;;) {
      const answer = await this.get(route, parameters, signal);
      if (answer.state !== 'indexing' && answer.state !== 'building') return answer;
      progress?.(answer);
      await pause(POLL_MS, signal);
    }
  }
}

async function reason(response) {
  try {
    return (await response.json()).error ?? `the server answered ${response.status}`;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** Resolves after a while, or rejects at once when the signal aborts. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(new DOMException('cancelled', 'AbortError'));
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener(
      'abort',
      () => {
        clearTimeout(timer);
        reject(new DOMException('cancelled', 'AbortError'));
      },
      { once: true },
    );
    return undefined;
  });
}

/** Lets only the latest of many calls run: each cancels the one before. */
export class Latest {
  constructor() {
    this.controller = null;
  }

  /** Runs `work(signal)`; `undefined` if a later call has taken its place. */
  async run(work, delayMs = 0) {
    this.cancel();
    const controller = new AbortController();
    this.controller = controller;
    try {
      if (delayMs) await pause(delayMs, controller.signal);
      const answer = await work(controller.signal);
      return controller.signal.aborted ? undefined : answer;
    } catch (error) {
      if (error.name === 'AbortError') return undefined;
      throw error;
    }
  }

  cancel() {
    this.controller?.abort();
  }
}
