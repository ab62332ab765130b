// The stretch of time that is shown: pure arithmetic on {from, to} in ns.

import { last } from '../shared/scale.js';

/** A window never gets narrower than this. */
export const LEAST_NS = 100;

/**
 * Keeps a window inside [0, end] and no narrower than allowed.
 * @param {Stretch} window
 * @param {number} endNs
 * @returns {Stretch}
 */
export function clamped(window, endNs) {
  const span = Math.min(Math.max(window.to - window.from, LEAST_NS), endNs);
  const from = Math.min(Math.max(0, window.from), endNs - span);
  return { from: Math.round(from), to: Math.round(from + span) };
}

/**
 * Zooms by `factor` (below 1: closer), the point at share `at` of the window staying where it is.
 * @param {Stretch} window
 * @param {number} factor
 * @param {number} at
 * @param {number} endNs
 */
export function zoomed(window, factor, at, endNs) {
  const span = window.to - window.from;
  const wanted = Math.min(Math.max(span * factor, LEAST_NS), endNs);
  const from = window.from + at * (span - wanted);
  return clamped({ from, to: from + wanted }, endNs);
}

/**
 * Moves by a share of the window's width.
 * @param {Stretch} window
 * @param {number} share
 * @param {number} endNs
 */
export function panned(window, share, endNs) {
  const shift = (window.to - window.from) * share;
  return clamped({ from: window.from + shift, to: window.to + shift }, endNs);
}

/**
 * A window around a stretch, with some room on both sides.
 * @param {number} from
 * @param {number} to
 * @param {number} endNs
 * @param {number} [room]
 */
export function aroundStretch(from, to, endNs, room = 0.6) {
  const span = Math.max(to - from, LEAST_NS);
  return clamped({ from: from - room * span, to: to + room * span }, endNs);
}

/**
 * Whether the window lies inside the stretch that was asked for, at a resolution that is fine enough.
 * @param {(Stretch & { lanes: Set<number> }) | null} asked
 * @param {Stretch} window
 * @param {number[]} lanes
 */
export function covers(asked, window, lanes) {
  if (!asked || asked.from > window.from || asked.to < window.to) return false;
  const finer = (asked.to - asked.from) / (window.to - window.from);
  return finer <= 4.2 && lanes.every((lane) => asked.lanes.has(lane));
}

/**
 * What to ask for: the window and half of it on either side, so that a pan shows something at once.
 * @param {Stretch} window
 * @param {number} widthPx
 * @param {number} endNs
 */
export function askedFor(window, widthPx, endNs) {
  const half = (window.to - window.from) / 2;
  const from = Math.max(0, Math.floor(window.from - half));
  const to = Math.min(endNs, Math.ceil(window.to + half));
  const share = (to - from) / (window.to - window.from);
  return { from, to, widthPx: Math.min(8192, Math.max(16, Math.round(widthPx * share))) };
}

/**
 * What is shown first: all steps if they are few, else two in the middle.
 * @param {TracedStep[]} steps
 * @param {number} endNs
 * @returns {Stretch}
 */
export function firstWindow(steps, endNs) {
  if (!steps.length) return { from: 0, to: endNs };
  const middle = Math.max(0, (steps.length >> 1) - 1);
  const chosen = steps.length <= 3 ? steps : steps.slice(middle, middle + 2);
  return aroundStretch(chosen[0].start_ns, last(chosen).end_ns, endNs, 0.02);
}
