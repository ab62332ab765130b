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
      `From the traces: there are no live figures. Step: ${answer.has_steps ? 'the mean of all traced steps of a rank' : 'the whole trace, since no step is marked'}; compute: its share.`,
    ),
    problemNotes(answer.problems, answer.warnings),
    table(answer.ranks, variant.planned.traces),
  );
  return undefined;
}

/** @param {RankBreakdown[]} ranks */
function sentence(ranks) {
  const devices = [...new Set(ranks.map((rank) => rank.device))];
  const more = devices.length > 3 ? ` and ${number(devices.length - 3)} more` : '';
  return `${plural(ranks.length, 'rank')} traced on ${listed(devices.slice(0, 3))}${more}.`;
}

/** @param {RankBreakdown[]} ranks @param {TraceFile[]} traces */
function table(ranks, traces) {
  /** @param {string} name @param {boolean} [isRight] */
  const head = (name, isRight) => el('th', { scope: 'col', class: isRight ? 'right' : null }, name);
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
        head('step, ms', true),
        head('compute, %', true),
        head('trace, MB', true),
        el('th', { scope: 'col', class: 'pad' }, 'file'),
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
    right(trace ? three(trace.bytes / 1e6) : ''),
    el('td', { class: 'pad' }, trace?.file ?? ''),
  );
}
