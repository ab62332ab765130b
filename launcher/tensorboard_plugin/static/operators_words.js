// What the table of operators says above itself.

import { number, plural, three } from './format.js';
import { shortName } from './tl_draw.js';

/** What takes most, or most of the difference. */
export function sentence({ answer, label, against, noun }) {
  const rows = answer.rows.filter((row) => row.name != null);
  if (!rows.some((row) => row.named)) return `${label}: the trace names no ${noun}s.`;
  if (against && answer.against_step_ms != null) return differenceSentence(answer, rows, label, against);
  const top = rows.reduce((a, b) => (b.self_ms > a.self_ms ? b : a));
  if (!(top.self_ms > 0)) return `${label}: no ${noun} takes any time in the traced steps.`;
  return `${label}: ${subject(top)} ${three(top.self_ms)} of ${three(answer.step_ms)} ms, ${number(top.share_percent)} % of the step${waiting(top)}.`;
}

// `collectives take`, `addmm takes`; a name of the trace may be markup, which is shown as it is.
function subject(row) {
  const isMany = !row.named && /^(collectives|copies)/.test(row.name);
  return `${row.named ? shortName(row.name) : row.name} ${isMany ? 'take' : 'takes'}`;
}

function waiting(row) {
  return row.wait_ms >= 0.05 * row.self_ms ? `, ${three(row.wait_ms)} ms of it waiting` : '';
}

function differenceSentence(answer, rows, label, against) {
  const longer = answer.step_ms - answer.against_step_ms;
  const sign = longer >= 0 ? 1 : -1;
  const main = rows.reduce((a, b) =>
    sign * (b.difference_ms ?? 0) > sign * (a.difference_ms ?? 0) ? b : a,
  );
  const name = main.named ? shortName(main.name) : main.name;
  const share =
    sign * main.difference_ms > 0 ? `; ${name} alone ${three(Math.abs(main.difference_ms))} ms` : '';
  return `${label} takes ${three(Math.abs(longer))} ms ${sign > 0 ? 'more' : 'less'} than ${against.label} in traced steps${share}.`;
}

/** How the figures were come by. */
export function subSentence({ answer, variant, against }) {
  const rank = answer.ranks.length > 1 ? `Self time counts on ${slowest(answer)}` : 'Self time';
  return `${rank}, mean of ${plural(answer.steps, 'traced step')}; collectives count only their exposed part. Columns add up to the step.${asTimed(answer, variant, against)}`;
}

function slowest(answer) {
  return answer.is_straggler
    ? `rank ${answer.slowest_rank}, for which the others wait most`
    : `the slowest rank, rank ${answer.slowest_rank}`;
}

// The ranking's step times beside those of the trace.
function asTimed(answer, variant, against) {
  if (variant.stepMs == null) return '';
  const hasOther = against?.stepMs != null && answer.against_step_ms != null;
  const other = hasOther ? ` against ${three(against.stepMs)} ms` : '';
  return ` As timed, a step takes ${three(variant.stepMs)} ms${other}.`;
}
