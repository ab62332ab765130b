// Opens the merged trace in the Perfetto UI, in the way that its makers document: a window of theirs, PING
// until it answers PONG, then the trace by postMessage. Nothing of theirs is asked for before the click.

const ORIGIN = 'https://ui.perfetto.dev';
const PING_MS = 100;
const PATIENCE_MS = 30000;

/**
 * Opens the window at once (later, browsers would block it) and hands `buffer` over when both are ready.
 * @param {string} title
 * @param {string} fileName
 * @param {() => Promise<ArrayBuffer>} fetchBuffer
 */
export async function openInPerfetto(title, fileName, fetchBuffer) {
  const other = window.open(ORIGIN);
  if (!other) throw new Error('The browser blocked the new window; allow it for this page.');
  const [buffer] = await Promise.all([fetchBuffer(), answered(other)]);
  other.postMessage({ perfetto: { buffer, title, fileName } }, ORIGIN);
}

/** @param {Window} other @returns {Promise<void>} */
function answered(other) {
  return new Promise((resolve, reject) => {
    const end = () => {
      clearInterval(pinging);
      clearTimeout(waiting);
      removeEventListener('message', onmessage);
    };
    /** @param {string} message */
    const fail = (message) => {
      end();
      reject(new Error(message));
    };
    /** @param {MessageEvent} event */
    const onmessage = (event) => {
      if (event.source !== other || event.origin !== ORIGIN || event.data !== 'PONG') return;
      end();
      resolve();
    };
    addEventListener('message', onmessage);
    const pinging = setInterval(
      () =>
        other.closed
          ? fail('The Perfetto window was closed.')
          : other.postMessage('PING', ORIGIN),
      PING_MS,
    );
    const waiting = setTimeout(
      () => fail('Perfetto does not answer; download the trace and open it there.'),
      PATIENCE_MS,
    );
  });
}
