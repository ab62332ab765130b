// Throughput over the global batch, with the knee from where on a larger batch hardly pays.

import { el, hiddenTable, picture, svg } from '../shared/dom.js';
import { lowerFirst, number, rate } from '../shared/format.js';
import { dot, endName, inGroups, line, names, Plot, roomFor } from './plot.js';
import { fromZero, labelEvery, last } from '../shared/scale.js';

const TITLE = 'Throughput over the global batch';

const HEIGHT = 250;

/**
 * Charts of these curves; `null` where there are none.
 * @param {BatchCurve[]} curves
 * @param {KneeSentences} said
 */
export function batchCharts(curves, said) {
  if (!curves?.length) return null;
  return el(
    'section',
    { class: 'batches', 'aria-label': TITLE },
    el('h2', {}, TITLE),
    inGroups(curves).map((group) => el('figure', {}, chart(group), el('figcaption', { class: 'muted' }, caption(group, said)))),
    curves.map((curve) =>
      hiddenTable(
        `${curve.label}: throughput over the global batch`,
        ['global batch', 'samples/s', 'knee'],
        curve.points.map((point) => [
          number(point.global_batch),
          rate(point.samples_per_s),
          point.global_batch === curve.knee ? 'knee' : '',
        ]),
      ),
    ),
  );
}

/** @param {BatchCurve[]} curves @param {KneeSentences} said */
function caption(curves, said) {
  const open = curves.filter((curve) => curve.knee == null).map((curve) => curve.label);
  const known = open.length < curves.length ? said.some : '';
  if (!open.length) return known;
  return curves.length === 1 ? said.none : [known, `${open.join('; ')}: ${lowerFirst(said.none)}`].filter(Boolean).join(' ');
}

/** @param {BatchCurve[]} curves */
function chart(curves) {
  const label = curves.map(spoken).join(' ');
  return picture({ class: 'line-chart batch-chart', role: 'img', 'aria-label': label }, (width) => parts(curves, width));
}

/** @param {BatchCurve[]} curves @param {number} width */
function parts(curves, width) {
  const points = curves.flatMap((curve) => curve.points);
  const batches = [...new Set(points.map((point) => point.global_batch))].sort((a, b) => a - b);
  const [low, high] = [Math.log(batches[0]), Math.log(last(batches))];
  const room = roomFor(curves.map((curve) => curve.label));
  const plot = new Plot({
    width,
    height: HEIGHT,
    right: Math.min(room, width / 3),
    axis: fromZero(Math.max(...points.map((point) => point.samples_per_s)), 4),
    share: (batch) => (high > low ? (Math.log(batch) - low) / (high - low) : 0.5),
  });
  /** @param {BatchPoint} point @returns {Point} */
  const at = (point) => [plot.x(point.global_batch), plot.y(point.samples_per_s)];
  return [
    ...plot.frame(marks(batches, plot), 'samples/s', 'global batch, logarithmic'),
    ...curves.map((curve, index) => line(curve.points.map(at), index)),
    ...curves.flatMap((curve, index) => curve.points.map((point) => dot(at(point), index))),
    ...curves.flatMap((curve) => knee(curve, plot, at)),
    ...names([
      ...curves.map((curve, index) => endName(curve.label, at(last(curve.points)), index)),
      ...curves.map((curve) => kneeName(curve, at)).filter((name) => name != null),
    ]),
  ];
}

/** @param {number[]} batches @param {Plot} plot @returns {[value: number, text: string | null][]} */
function marks(batches, plot) {
  const texts = batches.map((batch) => number(batch));
  const every = labelEvery(batches.map((batch) => plot.x(batch)), texts.map((text) => roomFor([text])));
  return batches.map((batch, index) => [batch, index % every ? null : texts[index]]);
}

/** @param {BatchCurve} curve @param {Plot} plot @param {(point: BatchPoint) => Point} at */
function knee(curve, plot, at) {
  const point = kneeOf(curve);
  if (!point) return [];
  const [x, y] = at(point);
  return [
    svg('line', { class: 'best-line', x1: x, x2: x, y1: y, y2: plot.floor }),
    svg('circle', { class: 'chosen', cx: x, cy: y, r: 6 }),
  ];
}

/** @param {BatchCurve} curve @param {(point: BatchPoint) => Point} at @returns {PlacedName | null} */
function kneeName(curve, at) {
  const point = kneeOf(curve);
  if (!point) return null;
  const [x, y] = at(point);
  return { text: `knee: ${number(point.global_batch)}`, x: x + 7, y: y + 20, class: 'strong knee' };
}

/** @param {BatchCurve} curve */
function kneeOf(curve) {
  return curve.points.find((point) => point.global_batch === curve.knee) ?? null;
}

/** @param {BatchCurve} curve */
function spoken(curve) {
  const [first, end] = [curve.points[0], last(curve.points)];
  const place = curve.knee == null ? 'no knee' : `knee at ${number(curve.knee)}`;
  return (
    `${curve.label}: ${rate(first.samples_per_s)} samples/s at a global batch of ` +
    `${number(first.global_batch)}, ${rate(end.samples_per_s)} at ${number(end.global_batch)}; ${place}.`
  );
}
