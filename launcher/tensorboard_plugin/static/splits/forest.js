// The forest plot: one row per variant, its difference from the baseline with the interval.

import { svg } from '../shared/dom.js';
import { number, percent, tickDecimals } from '../shared/format.js';
import { last, Scale } from '../shared/scale.js';

/** How far from the baseline the axis reaches, in percent, or twice as far again; what lies farther becomes an arrow. */
const REACHES = [12, 25, 50, 100];
/** The nearest reach is taken that shows at least this share of the variants with their intervals. */
const ENOUGH = 0.5;
/** All are shown where that takes at most so many times the reach. */
const MOST_WIDER = 5;
/** Ticks that all have their figure on a narrow page. */
const MOST_NARROW = 5;
/** Differences within this, in percent, count as the same. */
export const SAME = 1;

/**
 * The axis: all differences within its reach, ±12 % where that is enough, with their intervals, rounded to a tick.
 * @param {(DrawnDifference | null)[]} differences
 * @returns {Axis}
 */
export function forestAxis(differences) {
  const known = differences.filter(isKnown);
  const reach = reachOf(known.filter((difference) => difference.verdict !== 'baseline' && difference.verdict !== 'noise'));
  const near = known.filter((difference) => Math.abs(difference.percent) <= reach);
  const ends = [-2 * SAME, 2 * SAME, ...near.flatMap((difference) => [difference.percent, ...(difference.ci ?? [])])];
  const low = Math.max(-reach, Math.min(...ends));
  const high = Math.min(reach, Math.max(...ends));
  const hasFar = known.some((difference) => difference.percent > reach);
  const step = tickStep(high - low);
  const to = hasFar && high < 2 * step ? 2 * step : high;
  return { scale: new Scale(Math.floor(low / step) * step, Math.ceil(to / step) * step), step };
}

/** @param {DrawnDifference | null} difference @returns {difference is KnownDifference} */
function isKnown(difference) {
  return difference?.percent != null;
}

/** @param {KnownDifference[]} differences */
function reachOf(differences) {
  /** @param {number} share @returns {number} the least that shows so many of them */
  const showing = (share) => {
    /** @param {number} reach */
    const isEnough = (reach) => differences.filter((difference) => farthest(difference) <= reach).length >= share * differences.length;
    let reach = REACHES.find(isEnough) ?? last(REACHES);
    while (!isEnough(reach)) reach *= 2;
    return reach;
  };
  const [near, all] = [showing(ENOUGH), showing(1)];
  return all <= MOST_WIDER * near ? all : near;
}

/** @param {KnownDifference} difference @returns {number} how far it or its interval goes, in percent */
function farthest(difference) {
  return Math.max(...[difference.percent, ...(difference.ci ?? [])].map(Math.abs));
}

/** @param {number} range */
function tickStep(range) {
  const near = [1, 2, 4, 10, 20, 50, 100].find((step) => range <= (step < 4 ? 4 : 6) * step);
  return near ?? 200 * 2 ** Math.max(0, Math.ceil(Math.log2(range / 1200)));
}

/**
 * Marks by verdict: filled where it is one, hollow where it is open, a diamond for the baseline.
 * @param {DrawnDifference['verdict']} verdict
 */
export function tone(verdict) {
  return verdict === 'faster' || verdict === 'slower'
    ? verdict
    : verdict === 'baseline'
      ? 'baseline'
      : 'neutral';
}

/**
 * One row of the plot, as wide and as high as its cell.
 * @param {DrawnDifference | null} difference
 * @param {Axis} axis
 */
export function forestRow(difference, axis) {
  return svg(
    'svg',
    { 'aria-hidden': 'true' },
    background(axis),
    isKnown(difference) ? mark(difference, axis.scale, '50%') : null,
  );
}

/** @param {Axis} axis */
function background({ scale, step }) {
  const band = svg('rect', {
    class: 'band',
    x: scale.at(-SAME),
    width: `${(200 * SAME) / (scale.high - scale.low)}%`,
    y: 0,
    height: '100%',
  });
  const lines = scale.ticks(step).map((tick) =>
    svg('line', {
      class: Math.abs(tick) < 1e-9 ? 'zero' : 'grid-line',
      x1: scale.at(tick),
      x2: scale.at(tick),
      y1: 0,
      y2: '100%',
    }),
  );
  return [band, ...lines];
}

/** @param {KnownDifference} difference @param {Scale} scale @param {string} y */
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

/**
 * An interval that goes on beyond the axis ends in a small tip.
 * @param {boolean} isCut
 * @param {number} at
 * @param {number} sign
 * @returns {((scale: Scale, y: string, look: string) => SVGElement) | null}
 */
function cutEnd(isCut, at, sign) {
  if (!isCut) return null;
  return (scale, y, look) =>
    svg(
      'svg',
      { x: scale.at(at), y, overflow: 'visible' },
      svg('path', { class: `head ${look}`, d: `M0 -3.5 L${5 * sign} 0 L0 3.5 Z` }),
    );
}

/** @param {DrawnDifference['verdict']} verdict @param {string} x @param {string} y @param {string} look */
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

/**
 * Inside of the plot, with its tip at the edge: next to the plot there are names and figures.
 * @param {number} value
 * @param {Scale} scale
 * @param {string} y
 * @param {string} look
 */
function arrow(value, scale, y, look) {
  const sign = value > scale.high ? 1 : -1;
  const at = sign > 0 ? '100%' : '0%';
  return svg(
    'svg',
    { x: at, y, overflow: 'visible' },
    svg('line', { class: `interval ${look}`, x1: -19 * sign, x2: -6 * sign, y1: 0, y2: 0 }),
    svg('path', {
      class: `head ${look}`,
      d: `M${-7 * sign} -4.5 L0 0 L${-7 * sign} 4.5 Z`,
      'stroke-width': 0,
    }),
    svg(
      'text',
      { class: `arrow-label ${look}`, x: -23 * sign, y: 4, 'text-anchor': sign > 0 ? 'end' : 'start' },
      number(value, 0, true),
    ),
  );
}

/**
 * The axis below the rows.
 * @param {Axis} axis
 */
export function forestScale({ scale, step }) {
  const decimals = tickDecimals(step);
  const ticks = scale.ticks(step);
  /**
   * On a narrow page there is no room for more.
   * @param {number} tick
   */
  const isSpare = (tick) => ticks.length > MOST_NARROW && Math.round(tick / step) % 2 !== 0;
  return svg(
    'svg',
    { height: 36, 'aria-hidden': 'true' },
    svg('line', { class: 'axis', x1: 0, x2: '100%', y1: 0.5, y2: 0.5 }),
    ticks.map((tick) => [
      svg('line', { class: 'axis', x1: scale.at(tick), x2: scale.at(tick), y1: 0, y2: 4 }),
      svg(
        'text',
        { class: isSpare(tick) ? 'wide-only' : null, x: scale.at(tick), y: 16, 'text-anchor': 'middle' },
        number(tick, decimals, true),
      ),
    ]),
    svg('text', { x: -4, y: 31 }, '\u2190 faster'),
    svg(
      'svg',
      { x: '100%', overflow: 'visible' },
      svg('text', { x: 4, y: 31, 'text-anchor': 'end' }, 'slower \u2192'),
    ),
  );
}

/**
 * The difference in words, for hover and screen readers.
 * @param {DrawnDifference | null} difference
 */
export function spokenDifference(difference) {
  if (!isKnown(difference)) return 'no difference measured';
  if (difference.verdict === 'baseline') return 'the baseline';
  const interval = difference.ci
    ? `, interval ${percent(difference.ci[0])} to ${percent(difference.ci[1])} %`
    : '';
  const why = difference.why ? `, ${difference.why}` : '';
  return `${percent(difference.percent)} %${interval}${why}: ${difference.verdict}`;
}
