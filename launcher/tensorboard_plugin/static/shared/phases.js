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
 * What the bars of these variants are: those of traced steps, and others.
 * @param {Variant[]} variants
 * @param {BarSentences} said
 */
export function whatBarsAre(variants, said) {
  const isTraced = variants.map((variant) => Boolean(variant.slowest?.span_ms));
  const sentences = [isTraced.includes(true) ? said.traced : null, isTraced.includes(false) ? said.timed : null];
  return sentences.filter(Boolean).join(' ');
}

/**
 * The legend of the phases, or of other classes with names of their own.
 * @param {string[]} [names]
 * @param {(name: string) => string} [nameOf]
 * @param {string} [className]
 */
export function legend(names = shownPhases([]), nameOf = partName, className = '') {
  return el(
    'ul',
    { class: `legend ${className}`, 'aria-label': 'colours' },
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
