// Ways out of the timeline: the merged trace as a download, or handed to the Perfetto UI.

import { el } from '../shared/dom.js';
import { openInPerfetto } from './perfetto.js';
import { messageOf } from '../source.js';

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
