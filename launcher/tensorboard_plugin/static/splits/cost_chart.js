// Cost curves: what samples take on each device, where it was measured, and the samples that were chosen.

import { picture, svg } from '../shared/dom.js';
import { number, three } from '../shared/format.js';
import { dot, line, names, Plot, roomFor } from './plot.js';
import { fromZero, last } from '../shared/scale.js';

const HEIGHT = 210;
/** More names would cover the lines; the table next to it has them. */
const MOST_NAMES = 8;
/** Devices whose lines end within this share of the plot have one name. */
const TOGETHER = 0.05;

/**
 * The curves of a balanced split, as wide as their place.
 * @param {Balanced} found
 * @param {number[]} split
 * @param {string} label
 */
export function costChart(found, split, label) {
  return picture({ class: 'line-chart cost-chart', role: 'img', 'aria-label': label }, (width) => parts(found, split, width));
}

/** @param {Balanced} found @param {number[]} split @param {number} width */
function parts(found, split, width) {
  const curves = found.devices.map((device, index) => curveOf(device, split[index], index));
  const { scale, step } = fromZero(Math.max(...curves.map((curve) => curve.most)), 6);
  const mostMs = Math.max(found.optimum_ms, ...curves.flatMap((curve) => curve.line.map(([, ms]) => ms)));
  const groups = grouped(curves, TOGETHER * scale.high, TOGETHER * mostMs);
  const shown = groups.length <= MOST_NAMES ? groups : [];
  const best = `T* ${three(found.optimum_ms)} ms`;
  const plot = new Plot({
    width,
    height: HEIGHT,
    right: roomFor([best, ...shown.map(nameOf)]),
    axis: fromZero(mostMs, 4),
    share: (samples) => scale.share(samples),
  });
  /** @type {[value: number, text: string][]} */
  const marks = scale.ticks(Math.max(1, step)).map((tick) => [tick, number(tick)]);
  /** @param {MeasuredPoint} point @returns {Point} */
  const at = ([samples, ms]) => [plot.x(samples), plot.y(ms)];
  return [
    ...plot.frame(marks, 'ms', 'samples on a device'),
    svg('line', { class: 'best-line', x1: plot.left, x2: plot.end, y1: plot.y(found.optimum_ms), y2: plot.y(found.optimum_ms) }),
    ...curves.map((curve, index) => line(curve.line.map(at), index)),
    ...curves.flatMap((curve, index) => curve.points.map((point) => dot(at(point), index, 2.4))),
    ...curves.flatMap((curve) => (curve.chosen ? [ring(at(curve.chosen))] : [])),
    ...names([
      { text: best, x: plot.end + 6, y: plot.y(found.optimum_ms) + 4, class: 'best-name' },
      ...shown.flatMap((group) => labels(group, at)),
    ]),
  ];
}

/**
 * Equal devices have lines that lie on each other: one name for them all.
 * @param {DeviceCurve[]} curves
 * @param {number} samples
 * @param {number} ms
 */
function grouped(curves, samples, ms) {
  /** @type {DeviceCurve[][]} */
  const groups = [];
  for (const curve of curves) {
    const [x, y] = last(curve.line);
    /** @param {DeviceCurve[]} group */
    const near = ([first]) => Math.abs(last(first.line)[0] - x) < samples && Math.abs(last(first.line)[1] - y) < ms;
    const group = groups.find(near);
    if (group) group.push(curve);
    else groups.push([curve]);
  }
  return groups;
}

/** @param {DeviceCurve[]} group */
function nameOf([first, ...others]) {
  return first.device + (others.length ? ` and ${number(others.length)} more` : '');
}

/** @param {DeviceCurve[]} group @param {(point: MeasuredPoint) => Point} at @returns {PlacedName[]} */
function labels(group, at) {
  const [first] = group;
  const [x, y] = at(last(first.line));
  const name = { text: nameOf(group), x: x + 7, y: y + 1, class: first.index ? '' : 'strong' };
  const chosen = group.map((curve) => curve.chosen).filter((point) => point != null);
  if (!chosen.length) return [name];
  const most = chosen.reduce((a, b) => (b[0] > a[0] ? b : a));
  const least = Math.min(...chosen.map(([samples]) => samples));
  const text = number(least) + (most[0] > least ? ` to ${number(most[0])}` : '');
  const place = at(most);
  return [name, { text, x: place[0] + 7, y: place[1] + 15, class: 'strong' }];
}

/**
 * A device's line from no samples, or from its first point, to the last measured or chosen; `chosen` lies on it.
 * @param {DeviceCost} device
 * @param {number} samples
 * @param {number} index
 * @returns {DeviceCurve}
 */
function curveOf(device, samples, index) {
  const most = Math.max(samples, ...device.points.map(([size]) => size));
  const isStraight = device.straight || device.points.length < 2;
  const sizes = device.points.map(([size]) => size);
  const places = isStraight ? [0, most] : [Math.min(sizes[0], samples || sizes[0]), ...sizes, most];
  return {
    index,
    device: device.device,
    most,
    points: device.points,
    line: [...new Set(places)].map((size) => [size, heightAt(device, size, isStraight)]),
    chosen: samples > 0 ? [samples, heightAt(device, samples, isStraight)] : null,
  };
}

/**
 * Where the drawn line is, as `cost_ms` of launcher/balance.py has it: between points and before the first
 * on the line through the nearest two, beyond the last by beta.
 * @param {DeviceCost} device
 * @param {number} size
 * @param {boolean} isStraight
 */
function heightAt({ alpha_ms: alpha, beta_ms: beta, points }, size, isStraight) {
  if (isStraight) return Math.max(0, alpha + beta * size);
  const [end, endMs] = last(points);
  if (size >= end) return endMs + beta * (size - end);
  const right = Math.max(1, points.findIndex(([samples]) => samples >= size));
  const [[x1, y1], [x2, y2]] = [points[right - 1], points[right]];
  return Math.max(0, y2 - ((y2 - y1) / (x2 - x1)) * (x2 - size));
}

/** @param {Point} place */
function ring([cx, cy]) {
  return svg('circle', { class: 'chosen', cx, cy, r: 5.5 });
}
