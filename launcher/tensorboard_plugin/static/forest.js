// The forest plot: one row per variant, its difference from the baseline with the interval.

import { svg } from './dom.js';
import { number, percent, tickDecimals } from './format.js';
import { Scale } from './scale.js';

/** What lies farther from the baseline, in percent, becomes an arrow at the edge. */
const FARTHEST = 12;
/** Differences within this, in percent, count as the same. */
export const SAME = 1;

/** The axis: all differences within ±12 % with their intervals, rounded to a tick. */
export function forestAxis(differences) {
  const near = differences.filter((one) => one?.percent != null && Math.abs(one.percent) <= FARTHEST);
  const ends = [-2 * SAME, 2 * SAME, ...near.flatMap((one) => [one.percent, ...(one.ci ?? [])])];
  const low = Math.max(-FARTHEST, Math.min(...ends));
  const high = Math.min(FARTHEST, Math.max(...ends));
  const hasFar = differences.some((one) => one?.percent > FARTHEST);
  const step = high - low > 8 ? 4 : high - low > 4 ? 2 : 1;
  const to = hasFar && high < 2 * step ? 2 * step : high;
  return { scale: new Scale(Math.floor(low / step) * step, Math.ceil(to / step) * step), step };
}

/** Marks by verdict: filled where it is one, hollow where it is open, a diamond for the baseline. */
export function tone(verdict) {
  return verdict === 'faster' || verdict === 'slower'
    ? verdict
    : verdict === 'baseline'
      ? 'baseline'
      : 'neutral';
}

/** One row of the plot, as wide as its cell. */
export function forestRow(difference, axis, height) {
  const middle = height / 2;
  return svg(
    'svg',
    { height, 'aria-hidden': 'true', style: { height: `${height}px` } },
    background(axis, height),
    difference?.percent == null ? null : mark(difference, axis.scale, middle),
  );
}

function background({ scale, step }, height) {
  const band = svg('rect', {
    class: 'band',
    x: scale.at(-SAME),
    width: `${(200 * SAME) / (scale.high - scale.low)}%`,
    y: 0,
    height,
  });
  const lines = scale.ticks(step).map((tick) =>
    svg('line', {
      class: Math.abs(tick) < 1e-9 ? 'zero' : 'grid-line',
      x1: scale.at(tick),
      x2: scale.at(tick),
      y1: 0,
      y2: height,
    }),
  );
  return [band, ...lines];
}

function mark(difference, scale, y) {
  const { percent: value, ci, verdict } = difference;
  const look = `tone-${tone(verdict)}`;
  if (value > scale.high || value < scale.low) return arrow(value, scale, y, look);
  const bar =
    ci &&
    svg('line', {
      class: `interval ${look}`,
      x1: scale.at(Math.max(scale.low, ci[0])),
      x2: scale.at(Math.min(scale.high, ci[1])),
      y1: y,
      y2: y,
    });
  const cut = ci ? [cutEnd(ci[0] < scale.low, scale.low, -1), cutEnd(ci[1] > scale.high, scale.high, 1)] : [];
  return [bar, ...cut.map((end) => end?.(scale, y, look)), dot(verdict, scale.at(value), y, look)];
}

// An interval that goes on beyond the axis ends in a small tip.
function cutEnd(isCut, at, sign) {
  if (!isCut) return null;
  return (scale, y, look) =>
    svg(
      'svg',
      { x: scale.at(at), y, overflow: 'visible' },
      svg('path', { class: `head ${look}`, d: `M0 -3.5 L${5 * sign} 0 L0 3.5 Z` }),
    );
}

function dot(verdict, x, y, look) {
  if (verdict === 'baseline') {
    return svg(
      'svg',
      { x, y, overflow: 'visible' },
      svg('path', { class: look, d: 'M0 -6 L6 0 L0 6 L-6 0 Z', 'stroke-width': 1.6 }),
    );
  }
  return svg('circle', { class: look, cx: x, cy: y, r: 3.4, 'stroke-width': 1.4 });
}

function arrow(value, scale, y, look) {
  const sign = value > scale.high ? 1 : -1;
  const at = sign > 0 ? '100%' : '0%';
  return svg(
    'svg',
    { x: at, y, overflow: 'visible' },
    svg('line', { class: `interval ${look}`, x1: 0, x2: 13 * sign, y1: 0, y2: 0 }),
    svg('path', {
      class: `head ${look}`,
      d: `M${12 * sign} -4.5 L${19 * sign} 0 L${12 * sign} 4.5 Z`,
      'stroke-width': 0,
    }),
    svg(
      'text',
      { class: `arrow-label ${look}`, x: 23 * sign, y: 4, 'text-anchor': sign > 0 ? 'start' : 'end' },
      number(value, 0, true),
    ),
  );
}

/** The axis below the rows. */
export function forestScale({ scale, step }) {
  const decimals = tickDecimals(step);
  return svg(
    'svg',
    { height: 36, 'aria-hidden': 'true' },
    svg('line', { class: 'axis', x1: 0, x2: '100%', y1: 0.5, y2: 0.5 }),
    scale
      .ticks(step)
      .map((tick) => [
        svg('line', { class: 'axis', x1: scale.at(tick), x2: scale.at(tick), y1: 0, y2: 4 }),
        svg('text', { x: scale.at(tick), y: 16, 'text-anchor': 'middle' }, number(tick, decimals, true)),
      ]),
    svg('text', { x: -4, y: 31 }, '\u2190 faster'),
    svg(
      'svg',
      { x: '100%', overflow: 'visible' },
      svg('text', { x: 4, y: 31, 'text-anchor': 'end' }, 'slower \u2192'),
    ),
  );
}

/** `98.4 %`. */
export function levelText(level) {
  return `${number(100 * level, 1).replace(/\.0$/, '')} %`;
}

/** The difference in words, for hover and screen readers. */
export function spokenDifference(difference, level) {
  if (difference?.percent == null) return 'no difference measured';
  if (difference.verdict === 'baseline') return 'the baseline';
  const interval = difference.ci
    ? `, ${level ? `${levelText(level)} ` : ''}interval ${percent(difference.ci[0])} to ${percent(difference.ci[1])} %`
    : ', too few rounds for an interval';
  return `${percent(difference.percent)} %${interval}: ${difference.verdict}`;
}
