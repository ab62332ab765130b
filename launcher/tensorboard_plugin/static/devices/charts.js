// Small line charts: sparklines that share a scale, and steps over time.

import { picture, svg } from '../shared/dom.js';
import { number, three, tickDecimals } from '../shared/format.js';
import { around, last, roundStep, ticks } from '../shared/scale.js';

const SPARK_WIDTH = 170;
const SPARK_HEIGHT = 40;

/**
 * Values from the oldest to the newest on a scale from 0 to `full`; `limit` is a dashed line.
 * @param {number[]} values
 * @param {number} full
 * @param {number | null | undefined} limit
 * @param {string} label
 * @param {boolean} isLimiting
 */
export function sparkline(values, full, limit, label, isLimiting) {
  /** @param {number} value */
  const y = (value) => 2 + (SPARK_HEIGHT - 2) * (1 - Math.min(1, Math.max(0, value / (full || 1))));
  /** @param {number} index */
  const x = (index) => (values.length < 2 ? SPARK_WIDTH : (SPARK_WIDTH * index) / (values.length - 1));
  const path = values
    .map((value, index) => `${index ? 'L' : 'M'}${x(index).toFixed(1)} ${y(value).toFixed(1)}`)
    .join(' ');
  return svg(
    'svg',
    {
      class: 'spark',
      viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT + 2}`,
      preserveAspectRatio: 'none',
      role: 'img',
      'aria-label': label,
    },
    limit == null
      ? null
      : svg('line', { class: 'limit', x1: 0, x2: SPARK_WIDTH, y1: y(limit), y2: y(limit) }),
    svg('line', { class: 'floor', x1: 0, x2: SPARK_WIDTH, y1: SPARK_HEIGHT + 1, y2: SPARK_HEIGHT + 1 }),
    values.length
      ? svg('path', {
          class: `value-line ${isLimiting ? 'slower' : ''}`,
          d: values.length > 1 ? path : `M0 ${y(values[0])} H${SPARK_WIDTH}`,
        })
      : null,
  );
}

const LEFT = 34;
const RIGHT = 64;
const BOTTOM = 26;

/**
 * Lines of ranks by step; each of `series` is `{name, x: [], y: []}`. The first is solid, others dashed.
 * @param {Series[]} series
 * @param {string} label
 * @param {number} [height]
 */
export function lineChart(series, label, height = 232) {
  return picture({ class: 'line-chart', role: 'img', 'aria-label': label }, (width) => chartParts(series, width, height));
}

/** @param {Series[]} series @param {number} width @param {number} height */
function chartParts(series, width, height) {
  const { scale, step } = around(
    series.flatMap((line) => line.y),
    4,
    1e-6,
  );
  const [first, end] = [
    Math.min(...series.map((line) => line.x[0])),
    Math.max(...series.map((line) => last(line.x))),
  ];
  const plot = width - LEFT - RIGHT;
  /** @param {number} value */
  const x = (value) => LEFT + (end > first ? (value - first) / (end - first) : 0.5) * plot;
  /** @param {number} value */
  const y = (value) => 6 + (height - BOTTOM - 6) * (1 - scale.share(value));
  const rows = scale
    .ticks(step)
    .flatMap((tick) => [
      svg('line', { class: 'grid-line', x1: LEFT, x2: LEFT + plot, y1: y(tick), y2: y(tick) }),
      svg('text', { x: LEFT - 8, y: y(tick) + 4, 'text-anchor': 'end' }, number(tick, tickDecimals(step))),
    ]);
  const every = Math.max(1, roundStep((end - first) / 7));
  const columns = ticks(first, end, every).flatMap((tick) => [
    svg('line', { class: 'axis', x1: x(tick), x2: x(tick), y1: height - BOTTOM, y2: height - BOTTOM + 4 }),
    svg('text', { x: x(tick), y: height - BOTTOM + 17, 'text-anchor': 'middle' }, number(tick)),
  ]);
  const floor = svg('line', {
    class: 'axis',
    x1: LEFT,
    x2: LEFT + plot,
    y1: height - BOTTOM + 0.5,
    y2: height - BOTTOM + 0.5,
  });
  return [
    ...rows,
    floor,
    ...columns,
    ...series.flatMap((line, index) => lineOf(line, index, x, y)),
    ...names(series, x, y),
  ];
}

/**
 * @param {Series} line
 * @param {number} index
 * @param {(value: number) => number} x
 * @param {(value: number) => number} y
 */
function lineOf(line, index, x, y) {
  const look = index ? 'dashed' : 'solid';
  const path = line.y
    .map((value, at) => `${at ? 'L' : 'M'}${x(line.x[at]).toFixed(1)} ${y(value).toFixed(1)}`)
    .join(' ');
  return [
    svg('path', { class: look, d: path }),
    svg('circle', { class: look, cx: x(last(line.x)), cy: y(last(line.y)), r: 3 }),
  ];
}

/**
 * Names are at the ends of their lines, moved apart where they would cover each other.
 * @param {Series[]} series
 * @param {(value: number) => number} x
 * @param {(value: number) => number} y
 */
function names(series, x, y) {
  const wanted = series
    .map((line, index) => ({ index, name: line.name, x: x(last(line.x)) + 8, y: y(last(line.y)) + 4 }))
    .sort((a, b) => a.y - b.y);
  for (let at = 1; at < wanted.length; at += 1) wanted[at].y = Math.max(wanted[at].y, wanted[at - 1].y + 15);
  return wanted.map((name) => svg('text', { x: name.x, y: name.y, class: name.index ? '' : 'strong' }, name.name));
}

/**
 * The last value and the range, for screen readers.
 * @param {string} name
 * @param {number[]} values
 * @param {string} unit
 */
export function spokenSeries(name, values, unit) {
  return values.length
    ? `${name}: now ${three(values.at(-1))} ${unit}, from ${three(Math.min(...values))} to ${three(Math.max(...values))}`
    : `${name}: nothing yet`;
}
