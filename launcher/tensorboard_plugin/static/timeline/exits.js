// Ways out of the timeline: the merged trace as a download, or handed to the Perfetto UI.

import { el } from '../shared/dom.js';
import { messageOf } from '../source.js';

const ORIGIN = 'https://ui.perfetto.dev';
const PING_MS = 100;
const PATIENCE_MS = 30000;

/**
 * The two buttons, and what they say while the ranks are being merged.
 * @param {OpenApp} app
 * @param {Variant} variant
 */
export function exits(app, variant) {
  const parameters = { run: app.run.name, variant: variant.id };
  const said = el('span', { class: 'matches', role: 'status' });
  const prepared = async () => {
    const answer = await app.source.ready(
      'trace/merged',
      { ...parameters, prepare: 1 },
      {
        progress: () => {
          said.textContent = 'merging the ranks\u2026';
        },
      },
    );
    if (answer.state === 'ready') return answer;
    const [problem] = answer.problems;
    throw new Error(problem ? `${problem.file} ${problem.message}` : 'This variant has no traces any more.');
  };
  /** @param {() => Promise<void>} work */
  const attempt = async (work) => {
    try {
      await work();
      said.textContent = '';
    } catch (error) {
      said.textContent = messageOf(error);
    }
  };
  const download = () =>
    attempt(async () => {
      const { file } = await prepared();
      el('a', { href: app.source.url('trace/merged', parameters).href, download: file }).click();
    });
  const perfetto = () =>
    attempt(() =>
      openInPerfetto(variant.label, `${variant.id}.pt.trace.json.gz`, async () => {
        await prepared();
        return app.source.bytes('trace/merged', parameters);
      }),
    );
  return el(
    'div',
    { class: 'group' },
    el(
      'button',
      {
        class: 'button',
        type: 'button',
        'data-action': 'perfetto',
        title: 'opens ui.perfetto.dev in a new window and hands it the trace',
        onclick: perfetto,
      },
      'Perfetto \u2197',
    ),
    el(
      'button',
      {
        class: 'button',
        type: 'button',
        'data-action': 'download',
        title: 'all ranks in one trace',
        onclick: download,
      },
      'Download',
    ),
    said,
  );
}

/**
 * Opens the merged trace in the Perfetto UI, in the way that its makers document: a window of theirs, PING
 * until it answers PONG, then the trace by postMessage. Nothing of theirs is asked for before the click.
 * Opens the window at once (later, browsers would block it) and hands `buffer` over when both are ready.
 * @param {string} title
 * @param {string} fileName
 * @param {() => Promise<ArrayBuffer>} fetchBuffer
 */
async function openInPerfetto(title, fileName, fetchBuffer) {
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
