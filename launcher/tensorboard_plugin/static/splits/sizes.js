// Micro-benchmarks: the time of an operation over its size, both logarithmic, and each curve's figures.

import { el, picture, svg } from '../shared/dom.js';
import { labelEvery, last, LogScale } from '../shared/scale.js';
import { dot, endName, inGroups, line, names, Plot, roomFor } from './plot.js';

const TITLE = 'Time over size';
const HEIGHT = 250;

/**
 * Charts and tables of all curves of these variants; `null` where there are none.
 * @param {Variant[]} variants
 */
export function sizeCurves(variants) {
  const curves = variants.flatMap(curvesOf);
  if (!curves.length) return null;
  const units = [...new Set(curves.map((curve) => curve.unit))];
  const groups = units.flatMap((unit) => inGroups(curves.filter((curve) => curve.unit === unit)));
  return el(
    'section',
    { class: 'batches', 'aria-label': TITLE },
    el('h2', {}, TITLE),
    groups.map((group) => el('figure', {}, chart(group))),
    el('div', { class: 'sizes' }, curves.map(table)),
  );
}

/** @param {Variant} variant @returns {ShownCurve[]} */
function curvesOf({ result, planned }) {
  const found = result?.probe?.curves ?? [];
  return planned.curve_tables.map((texts, index) => ({ ...found[index], ...texts }));
}

/** @param {ShownCurve[]} curves */
function chart(curves) {
  const label = curves.map(spoken).join(' ');
  return picture({ class: 'line-chart batch-chart', role: 'img', 'aria-label': label }, (width) => parts(curves, width));
}

/** @param {ShownCurve[]} curves @param {number} width */
function parts(curves, width) {
  const points = curves.flatMap((curve) => curve.points);
  const sizes = new LogScale(points.map((point) => point.size));
  const plot = new Plot({
    width,
    height: HEIGHT,
    right: Math.min(roomFor(curves.map((curve) => curve.name)), width / 3),
    axis: new LogScale(points.flatMap(endsOf)).asAxis(),
    share: (size) => sizes.share(size),
  });
  /** @param {CurvePoint} point @returns {Point} */
  const at = (point) => [plot.x(point.size), plot.y(point.time_us)];
  return [
    ...plot.frame(marks(curves, plot), 'µs, logarithmic', 'size, logarithmic'),
    ...points.map((point) => whisker(point, plot)),
    ...curves.map((curve, index) => line(curve.points.map(at), index)),
    ...curves.flatMap((curve, index) => curve.points.map((point) => dot(at(point), index))),
    ...names(curves.map((curve, index) => endName(curve.name, at(last(curve.points)), index))),
  ];
}

/**
 * The time and the ends of its interval, of which there are none after a single round.
 * @param {CurvePoint} point
 */
function endsOf(point) {
  return [point.time_us, ...(point.ci_us ?? [])];
}

/** @param {ShownCurve[]} curves @param {Plot} plot @returns {[value: number, text: string | null][]} */
function marks(curves, plot) {
  const texts = new Map(curves.flatMap((curve) => curve.points.map((point, index) => [point.size, curve.rows[index][0]])));
  const sizes = [...texts.keys()].sort((a, b) => a - b);
  const widths = sizes.map((size) => roomFor([texts.get(size) ?? '']));
  const every = labelEvery(sizes.map((size) => plot.x(size)), widths);
  return sizes.map((size, index) => [size, index % every ? null : (texts.get(size) ?? null)]);
}

/** @param {CurvePoint} point @param {Plot} plot */
function whisker(point, plot) {
  const ends = endsOf(point).map((us) => plot.y(us));
  const x = plot.x(point.size);
  return svg('line', { class: 'whisker', x1: x, x2: x, y1: Math.min(...ends), y2: Math.max(...ends) });
}

/** @param {ShownCurve} curve */
function spoken(curve) {
  const [first, end] = [curve.rows[0], last(curve.rows)];
  return `${curve.name}: ${first[1]} for ${first[0]}, ${end[1]} for ${end[0]}.`;
}

/** @param {ShownCurve} curve */
function table(curve) {
  return el(
    'table',
    { 'aria-label': curve.name },
    el('caption', {}, curve.name),
    el('thead', {}, el('tr', {}, curve.header.map((text, index) => el('th', { scope: 'col' }, index ? text : 'size')))),
    el('tbody', {}, curve.rows.map((row) => el('tr', {}, row.map((text) => el('td', {}, text))))),
  );
}
