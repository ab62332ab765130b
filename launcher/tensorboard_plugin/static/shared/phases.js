// The parts of a step, the same everywhere: order, name, colour.

import { el } from './dom.js';
import { number } from './format.js';

/** @type {PhaseName[]} */
export const PHASES = ['compute', 'transfer', 'wait', 'copy', 'input', 'other_steps', 'idle'];

/**
 * What a device does at a moment, whatever step that is for.
 * @type {Exclude<PhaseName, 'other_steps'>[]}
 */
export const DEVICE_PHASES = ['compute', 'transfer', 'wait', 'copy', 'input', 'idle'];

/**
 * The parts of one rank's traced step as `{name, ms}`; they add up to its span. `null` without a trace.
 * @param {TracedFigures | null | undefined} rank
 * @returns {Part[] | null}
 */
export function tracedParts(rank) {
  if (!rank?.span_ms) return null;
  const input = rank.input_ms ?? 0;
  const ms = [
    rank.compute_ms,
    rank.exposed_transfer_ms,
    rank.exposed_wait_ms,
    rank.exposed_memcpy_ms,
    input,
    rank.other_steps_ms ?? 0,
    (rank.idle_ms ?? 0) - input,
  ];
  return PHASES.map((name, index) => ({ name, ms: Math.max(0, ms[index] ?? 0) }));
}

/**
 * The same in proportion to the timed step: the terminal's bars and those of the ranking are as long as it.
 * @param {RankFigures | null | undefined} rank
 * @param {number | null} stepMs
 * @returns {Part[] | null}
 */
export function scaledParts(rank, stepMs) {
  const parts = tracedParts(rank);
  if (!parts || !rank?.span_ms || stepMs == null) return parts;
  const scale = stepMs / rank.span_ms;
  return parts.map((part) => ({ ...part, ms: part.ms * scale }));
}

/**
 * Without a trace: what the server makes of phases and ablation.
 * @param {{ timedParts: { [rank: string]: { [part: string]: number } } }} variant
 * @param {RankFigures | null} rank
 * @returns {Part[] | null}
 */
export function timedParts(variant, rank) {
  const parts = rank && variant.timedParts[rank.rank];
  return parts ? PHASES.map((name) => ({ name, ms: parts[name] ?? 0 })) : null;
}

/** @param {string} name */
export function partName(name) {
  return name.replace('_', ' ');
}

/**
 * The phases to explain: work of other steps is rare, and named only where there is some.
 * @param {{ parts: Part[] }[]} bars
 */
export function shownPhases(bars) {
  /** @param {Part} part */
  const isOther = (part) => part.name === 'other_steps' && part.ms > 0;
  const hasOther = bars.some(({ parts }) => parts.some(isOther));
  return PHASES.filter((name) => hasOther || name !== 'other_steps');
}

/**
 * The legend of the phases, or of other classes with names of their own.
 * @param {string[]} [names]
 * @param {(name: string) => string} [nameOf]
 */
export function legend(names = shownPhases([]), nameOf = partName) {
  return el(
    'ul',
    { class: 'legend', 'aria-label': 'colours' },
    names.map((name) => el('li', {}, el('span', { class: `swatch ${name}` }), nameOf(name))),
  );
}

/**
 * `compute 40.8 ms, transfer 5.5 ms`, for screen readers.
 * @param {Part[]} parts
 * @param {number} decimals
 */
export function spoken(parts, decimals) {
  return parts
    .filter((part) => part.ms > 0)
    .map((part) => `${partName(part.name)} ${number(part.ms, decimals)} ms`)
    .join(', ');
}
