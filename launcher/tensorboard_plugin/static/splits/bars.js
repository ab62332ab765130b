// Bars of the ranking: the slowest rank's step, as long as it was timed, in the proportions of the traced one.

import { el, hidden } from '../shared/dom.js';
import { number } from '../shared/format.js';
import { spoken, timedParts, tracedParts } from '../shared/phases.js';

/**
 * The parts of a row's bar; `null` where neither a trace nor phases show any.
 * @param {Row} row
 */
export function barOf(row) {
  return scaledParts(row.slowest, row.stepMs) ?? timedParts(row, row.slowest);
}

/**
 * A traced step in proportion to the timed one, as in the terminal.
 * @param {RankFigures | null} rank
 * @param {number | null} stepMs
 * @returns {PhaseTime[] | null}
 */
function scaledParts(rank, stepMs) {
  const parts = tracedParts(rank);
  if (!parts || !rank?.span_ms || stepMs == null) return parts;
  const scale = stepMs / rank.span_ms;
  return parts.map((part) => ({ ...part, ms: part.ms * scale }));
}

/**
 * The bar on a scale from 0 to `fullMs`.
 * @param {Row} row
 * @param {PhaseTime[]} parts
 * @param {number} fullMs
 */
export function drawnBar(row, parts, fullMs) {
  return [
    el(
      'div',
      { class: 'bar', 'aria-hidden': 'true' },
      parts
        .filter((part) => part.ms > 0)
        .map((part) => el('span', { class: part.name, style: { width: `${(100 * part.ms) / fullMs}%` } })),
    ),
    hidden(spokenBar(row, 1)),
  ];
}

/**
 * In ms of the traced step, as all other views have them.
 * @param {Row} row
 * @param {number} decimals
 */
export function spokenBar(row, decimals) {
  const rank = row.slowest;
  const traced = tracedParts(rank);
  const parts = traced ?? timedParts(row, rank);
  if (!rank || !parts) return '';
  const step = traced
    ? `, a traced step of ${number(rank.span_ms ?? 0, decimals)} ms (the bar is as long as a timed one)`
    : '';
  return `rank ${rank.rank}${step}: ${spoken(parts, decimals)}`;
}
