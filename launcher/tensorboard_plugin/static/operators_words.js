// What the table of operators says above itself.

import { number, plural, three } from './format.js';
import { shortName } from './tl_draw.js';

/**
 * What takes most, or most of the difference.
 * @param {Compared & { label: string, noun: string }} table
 */
export function sentence({ answer, label, against, noun }) {
  const rows = answer.rows.filter((row) => row.name != null);
  if (!rows.some((row) => row.named)) return `${label}: the trace names no ${noun}s.`;
  if (against && answer.against_step_ms != null) return differenceSentence(answer, rows, label, against);
  const top = rows.reduce((a, b) => (b.self_ms > a.self_ms ? b : a));
  if (!(top.self_ms > 0)) return `${label}: no ${noun} takes any time in the trace.`;
  return `${label}: ${subject(top)} ${three(top.self_ms)} of ${three(answer.step_ms)} ms, ${number(top.share_percent)} % of the ${answer.steps ? 'step' : 'trace'}${waiting(top)}.`;
}

/**
 * `collectives take`, `addmm takes`; a name of the trace may be markup, which is shown as it is.
 * @param {OperatorRow} row
 */
function subject(row) {
  const isMany = !row.named && /^(collectives|copies)/.test(row.name ?? '');
  return `${nameOf(row)} ${isMany ? 'take' : 'takes'}`;
}

/** @param {OperatorRow} row */
function nameOf({ name, named }) {
  return named && name != null ? shortName(name) : name;
}

/** @param {OperatorRow} row */
function waiting(row) {
  return row.wait_ms >= 0.05 * row.self_ms ? `, ${three(row.wait_ms)} ms of it waiting` : '';
}

/**
 * @param {OperatorsAnswer} answer
 * @param {OperatorRow[]} rows
 * @param {string} label
 * @param {Variant} against
 */
function differenceSentence(answer, rows, label, against) {
  const longer = answer.step_ms - (answer.against_step_ms ?? 0);
  const sign = longer >= 0 ? 1 : -1;
  const main = rows.reduce((a, b) =>
    sign * (b.difference_ms ?? 0) > sign * (a.difference_ms ?? 0) ? b : a,
  );
  const own = main.difference_ms ?? 0;
  const share = sign * own > 0 ? `; ${nameOf(main)} alone ${three(Math.abs(own))} ms` : '';
  return `${label} takes ${three(Math.abs(longer))} ms ${sign > 0 ? 'more' : 'less'} than ${against.label} in traced steps${share}.`;
}

/**
 * How the figures were come by.
 * @param {Compared} table
 */
export function subSentence({ answer, variant, against }) {
  const rank = answer.ranks.length > 1 ? `Self time counts on ${slowest(answer)}` : 'Self time';
  const [of, whole] = answer.steps
    ? [`mean of ${plural(answer.steps, 'traced step')}`, 'step']
    : ['over the whole trace, which has no steps', 'trace'];
  return `${rank}, ${of}; collectives count only their exposed part. Columns add up to the ${whole}.${asTimed(answer, variant, against)}`;
}

/** @param {OperatorsAnswer} answer */
function slowest(answer) {
  return answer.is_straggler
    ? `rank ${answer.slowest_rank}, for which the others wait most`
    : `the slowest rank, rank ${answer.slowest_rank}`;
}

/**
 * The ranking's step times next to those of the trace.
 * @param {OperatorsAnswer} answer
 * @param {Variant} variant
 * @param {Variant | null} against
 */
function asTimed(answer, variant, against) {
  if (variant.stepMs == null) return '';
  const hasOther = against?.stepMs != null && answer.against_step_ms != null;
  const other = hasOther ? ` against ${three(against.stepMs)} ms` : '';
  return ` As timed, a step takes ${three(variant.stepMs)} ms${other}.`;
}
