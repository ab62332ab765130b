// Cost curves: what samples take on each device, where it was measured, and the samples that were chosen.

import { onWidth, svg } from './dom.js';
import { number, three } from './format.js';
import { line, look, names, Plot, roomFor } from './plot.js';
import { fromZero } from './scale.js';

const HEIGHT = 210;
/** More names would cover the lines; the table beside has them. */
const MOST_NAMES = 8;
/** Devices whose lines end within this share of the plot have one name. */
const TOGETHER = 0.05;

/** The curves of a balanced split, as wide as their place. */
export function costChart(found, split, label) {
  const root = svg('svg', { class: 'line-chart cost-chart', role: 'img', 'aria-label': label });
  onWidth(root, (width) => root.replaceChildren(...parts(found, split, width)));
  return root;
}

function parts(found, split, width) {
  const curves = found.devices.map((device, index) => curveOf(device, split[index], index));
  const { scale, step } = fromZero(Math.max(...curves.map((one) => one.last)), 6);
  const mostMs = Math.max(found.optimum_ms, ...curves.flatMap((one) => one.line.map(([, ms]) => ms)));
  const groups = grouped(curves, TOGETHER * scale.high, TOGETHER * mostMs);
  const shown = groups.length <= MOST_NAMES ? groups : [];
  const best = `T* ${three(found.optimum_ms)} ms`;
  const plot = new Plot({
    width,
    height: HEIGHT,
    right: roomFor([best, ...shown.map(nameOf)]),
    most: mostMs,
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
      ...shown.flatMap((group) => labels(group, at)),
    ]),
  ].filter(Boolean);
}

// Equal devices have lines that lie on each other: one name for them all.
function grouped(curves, samples, ms) {
  const groups = [];
  for (const one of curves) {
    const [x, y] = one.line.at(-1);
    const near = ([first]) => Math.abs(first.line.at(-1)[0] - x) < samples && Math.abs(first.line.at(-1)[1] - y) < ms;
    const group = groups.find(near);
    if (group) group.push(one);
    else groups.push([one]);
  }
  return groups;
}

function nameOf([first, ...others]) {
  return first.device + (others.length ? ` and ${number(others.length)} more` : '');
}

function labels(group, at) {
  const [first] = group;
  const [x, y] = at(first.line.at(-1));
  const name = { text: nameOf(group), x: x + 7, y: y + 1, class: first.index ? '' : 'strong' };
  const chosen = group.filter((one) => one.chosen).map((one) => one.chosen);
  if (!chosen.length) return [name];
  const sizes = chosen.map(([samples]) => samples);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const text = number(least) + (most > least ? ` to ${number(most)}` : '');
  const place = at(chosen.find(([samples]) => samples === most));
  return [name, { text, x: place[0] + 7, y: place[1] + 15, class: 'strong' }];
}

/** A device's line from no samples, or from its first point, to the last measured or chosen; `chosen` lies on it. */
function curveOf(device, samples, index) {
  const last = Math.max(samples, ...device.points.map(([size]) => size));
  const isStraight = device.straight || device.points.length < 2;
  const sizes = device.points.map(([size]) => size);
  const places = isStraight ? [0, last] : [Math.min(sizes[0], samples || sizes[0]), ...sizes, last];
  return {
    index,
    device: device.device,
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
