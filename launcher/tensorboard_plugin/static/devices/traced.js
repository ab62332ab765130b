// Devices of a directory of traces that gpurun did not record: the device of each, and how much of its step it computes.

import { headline } from '../shared/controls.js';
import { el, replace } from '../shared/dom.js';
import { listed, number, plural, three } from '../shared/format.js';
import { indexingState, noTracesState, problemNotes, untracedState } from '../shared/states.js';

const MOST_ROWS = 512;

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showTracedDevices(host, app) {
  const { title } = app.run.answer;
  const [variant] = app.run.variants;
  if (!variant?.hasTraces) return untracedState(host, null);
  const answer = await app.breakdown(variant.id, (part) => indexingState(host, title, part));
  if (answer === undefined) return undefined;
  if (answer.state !== 'ready') return noTracesState(host, title, answer, app.retry());
  replace(
    host,
    headline(
      sentence(answer.ranks),
      `From the traces: there are no live figures. ${answer.has_steps ? 'Step: the mean of all traced steps of a rank' : 'No step markers: times are of the whole trace'}; compute: its share.`,
    ),
    problemNotes(answer.problems, answer.warnings),
    table(answer, variant.planned.traces),
  );
  return undefined;
}

/** @param {RankBreakdown[]} ranks */
function sentence(ranks) {
  const devices = [...new Set(ranks.map((rank) => rank.device))];
  const more = devices.length > 3 ? ` and ${number(devices.length - 3)} more` : '';
  return `${plural(ranks.length, 'rank')} traced on ${listed(devices.slice(0, 3))}${more}.`;
}

/** @param {BreakdownAnswer} answer @param {TraceFile[]} traces */
function table({ ranks, has_steps: hasSteps }, traces) {
  /** @param {string} name @param {string} [className] */
  const head = (name, className) => el('th', { scope: 'col', class: className }, name);
  return el(
    'table',
    { class: 'grid medium traced', 'aria-label': 'what ran where' },
    el(
      'thead',
      {},
      el(
        'tr',
        {},
        head('rank'),
        head('device'),
        head(hasSteps ? 'step, ms' : 'whole trace, ms', 'right'),
        head('compute, %', 'right'),
        head('trace, MB', 'right roomy'),
        head('file', 'pad'),
      ),
    ),
    el(
      'tbody',
      {},
      ranks.slice(0, MOST_ROWS).map((rank, index) => row(rank, traceOf(rank, index, traces))),
    ),
  );
}

/** @param {RankBreakdown} rank @param {number} index @param {TraceFile[]} traces */
function traceOf(rank, index, traces) {
  return traces.find((trace) => trace.rank === rank.rank) ?? traces[index];
}

/** @param {RankBreakdown} rank @param {TraceFile | undefined} trace */
function row(rank, trace) {
  const { typical } = rank;
  /** @param {string} text */
  const right = (text) => el('td', { class: 'right' }, text);
  return el(
    'tr',
    {},
    el('td', {}, number(rank.rank)),
    el('td', {}, rank.device ?? ''),
    right(typical?.span_ms ? three(typical.span_ms) : ''),
    right(typical?.span_ms ? number((100 * typical.compute_ms) / typical.span_ms) : ''),
    el('td', { class: 'right roomy' }, trace ? three(trace.bytes / 1e6) : ''),
    el('td', { class: 'pad' }, trace?.file ?? ''),
  );
}
