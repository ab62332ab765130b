// Cost curves: what samples take on each device, where it was measured, and the samples that were chosen.

import { onWidth, svg } from './dom.js';
import { number, three } from './format.js';
import { line, look, names, Plot, roomFor } from './plot.js';
import { fromZero } from './scale.js';

const HEIGHT = 210;
/** Names of more devices would cover the lines; the table beside has them. */
const MOST_NAMES = 8;

/** The curves of a balanced split, as wide as their place. */
export function costChart(found, split, label) {
  const root = svg('svg', { class: 'line-chart cost-chart', role: 'img', 'aria-label': label });
  onWidth(root, (width) => root.replaceChildren(...parts(found, split, width)));
  return root;
}

function parts(found, split, width) {
  const curves = found.devices.map((device, index) => curveOf(device, split[index]));
  const { scale, step } = fromZero(Math.max(...curves.map((one) => one.last)), 6);
  const best = `T* ${three(found.optimum_ms)} ms`;
  const hasNames = curves.length <= MOST_NAMES;
  const texts = [best, ...(hasNames ? found.devices.map((device) => device.device) : [])];
  const plot = new Plot({
    width,
    height: HEIGHT,
    right: roomFor(texts),
    most: Math.max(found.optimum_ms, ...curves.flatMap((one) => one.line.map(([, ms]) => ms))),
    share: (samples) => scale.share(samples),
  });
  const marks = scale.ticks(Math.max(1, step)).map((tick) => [tick, number(tick)]);
  const at = ([samples, ms]) => [plot.x(samples), plot.y(ms)];
  return [
    ...plot.frame(marks, 'ms', 'samples on a device'),
    svg('line', { class: 'best-line', x1: plot.left, x2: plot.end, y1: plot.y(found.optimum_ms), y2: plot.y(found.optimum_ms) }),
    ...curves.map((one, index) => line(one.line.map(at), index)),
    ...curves.flatMap((one, index) => one.points.map((point) => dot(at(point), index))),
    ...curves.map((one) => one.chosen && ring(at(one.chosen))),
    ...names([
      { text: best, x: plot.end + 6, y: plot.y(found.optimum_ms) + 4, class: 'best-name' },
      ...(hasNames ? curves.flatMap((one, index) => labels(one, index, at, found.devices[index].device)) : []),
    ]),
  ].filter(Boolean);
}

function labels(curve, index, at, device) {
  const [x, y] = at(curve.line.at(-1));
  const chosen = curve.chosen && at(curve.chosen);
  return [
    { text: device, x: x + 7, y: y + 1, class: index ? '' : 'strong' },
    chosen && { text: number(curve.chosen[0]), x: chosen[0] + 7, y: chosen[1] + 15, class: 'strong' },
  ].filter(Boolean);
}

/** A device's line from no samples to the last that was measured or chosen; `chosen` lies on it. */
function curveOf(device, samples) {
  const last = Math.max(samples, ...device.points.map(([size]) => size));
  const isStraight = device.straight || device.points.length < 2;
  const places = isStraight ? [0, last] : [0, ...device.points.map(([size]) => size), last];
  return {
    last,
    points: device.points,
    line: [...new Set(places)].map((size) => [size, heightAt(device, size, isStraight)]),
    chosen: samples > 0 ? [samples, heightAt(device, samples, isStraight)] : null,
  };
}

// Where the drawn line is, as `cost_ms` of launcher/balance/curve.py has it: between points and before the first
// on the line through the nearest two, beyond the last by beta.
function heightAt({ alpha_ms: alpha, beta_ms: beta, points }, size, isStraight) {
  if (isStraight) return Math.max(0, alpha + beta * size);
  const [end, endMs] = points.at(-1);
  if (size >= end) return endMs + beta * (size - end);
  const right = Math.max(1, points.findIndex(([one]) => one >= size));
  const [[x1, y1], [x2, y2]] = [points[right - 1], points[right]];
  return Math.max(0, y2 - ((y2 - y1) / (x2 - x1)) * (x2 - size));
}

function dot([cx, cy], index) {
  return svg('circle', { class: look(index), cx, cy, r: 2.4 });
}

function ring([cx, cy]) {
  return svg('circle', { class: 'chosen', cx, cy, r: 5.5 });
}
