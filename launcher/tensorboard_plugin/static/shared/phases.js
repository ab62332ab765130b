// The parts of a step, the same everywhere: order, name, colour.

import { el } from './dom.js';
import { number } from './format.js';

/** @type {PhaseName[]} */
export const PHASES = ['compute', 'transfer', 'wait', 'copy', 'input', 'other_steps', 'idle'];

/**
 * The parts of a timed step, where there is no trace.
 * @type {TimedPhase[]}
 */
const TIMED_PHASES = ['input', 'h2d', 'forward', 'backward', 'optimizer', 'between_phases'];

/**
 * What a device does at a moment, whatever step that is for.
 * @type {Exclude<PhaseName, 'other_steps'>[]}
 */
export const DEVICE_PHASES = ['compute', 'transfer', 'wait', 'copy', 'input', 'idle'];

/**
 * The parts of one rank's traced step as `{name, ms}`; they add up to its span. `null` without a trace.
 * @param {TracedFigures | null | undefined} rank
 * @returns {PhaseTime[] | null}
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
 * Without a trace: the phases, as the server has scaled them to the step.
 * @param {{ timedParts: { [rank: string]: { [part: string]: number } } }} variant
 * @param {RankFigures | null} rank
 * @returns {PhaseTime[] | null}
 */
export function timedParts(variant, rank) {
  const parts = rank && variant.timedParts[rank.rank];
  return parts ? TIMED_PHASES.map((name) => ({ name, ms: parts[name] ?? 0 })) : null;
}

/** @param {string} name */
export function partName(name) {
  return name.replace('_', ' ');
}

/**
 * The phases to explain: those of traced steps, and what else bars have. Work of other steps is rare.
 * @param {{ parts: PhaseTime[] }[]} bars
 * @returns {string[]}
 */
export function shownPhases(bars) {
  const drawn = new Set(bars.flatMap(({ parts }) => parts.filter((part) => part.ms > 0).map((part) => part.name)));
  const timed = TIMED_PHASES.filter((name) => drawn.has(name));
  const isTraced = !bars.length || bars.some(({ parts }) => parts.some((part) => part.name === 'compute'));
  if (!isTraced) return timed;
  const traced = PHASES.filter((name) => drawn.has(name) || name !== 'other_steps');
  return [...traced, ...timed.filter((name) => name !== 'input')];
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
 * @param {PhaseTime[]} parts
 * @param {number} decimals
 */
export function spoken(parts, decimals) {
  return parts
    .filter((part) => part.ms > 0)
    .map((part) => `${partName(part.name)} ${number(part.ms, decimals)} ms`)
    .join(', ');
}
