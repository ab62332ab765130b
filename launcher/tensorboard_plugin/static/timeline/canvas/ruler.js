// Draws the overview, and the steps with the ruler. Nothing here asks or listens.

import { prepare } from '../../shared/dom.js';
import { duration, number, tickDecimals } from '../../shared/format.js';
import { labelEvery, roundStep, ticks } from '../../shared/scale.js';
import { LABEL_PX } from '../layout.js';
import { clip, drawRange, fills, fitted, FONT, line, xOf } from './pen.js';

/**
 * Step names and durations above, the ruler in ms below.
 * @param {HTMLCanvasElement} canvas
 * @param {Timeline} view
 * @param {Palette} colours
 */
export function drawRuler(canvas, view, colours) {
  const { context, width, height } = prepare(canvas, 40);
  const x = xOf(view.window, width);
  context.strokeStyle = colours.line;
  line(context, 0, 20.5, width, 20.5);
  line(context, 0, height - 0.5, width, height - 0.5);
  clip(context, LABEL_PX, 0, width - LABEL_PX, height, () => {
    drawRange(context, view, x, 0, height, colours);
    for (const step of view.steps) drawStepName(context, step, x, width, colours);
    drawTicks(context, view.window, x, width, height, colours);
  });
  context.fillStyle = colours.muted;
  context.font = FONT(11);
  context.fillText('ms', 0, 30);
}

/**
 * @param {Context} context
 * @param {MergedStep} step
 * @param {ToPx} x
 * @param {number} width
 * @param {Palette} colours
 */
function drawStepName(context, step, x, width, colours) {
  const from = Math.max(x(step.start_ns), LABEL_PX);
  const room = Math.min(x(step.shown_end_ns), width) - from - 8;
  if (room < 12) return;
  context.strokeStyle = colours.axis;
  line(context, Math.round(x(step.start_ns)) + 0.5, 0, Math.round(x(step.start_ns)) + 0.5, 40);
  context.font = FONT(12, 600);
  const name = [`step ${number(step.step)}`, number(step.step)].find(
    (text) => context.measureText(text).width < room,
  );
  if (!name) return;
  context.fillStyle = colours.text;
  context.fillText(name, from + 8, 10);
  const used = context.measureText(name).width + 8;
  context.font = FONT(12);
  const took = duration(step.longest_ns);
  if (used + context.measureText(took).width > room) return;
  context.fillStyle = colours.muted;
  context.fillText(took, from + 8 + used, 10);
}

/**
 * @param {Context} context
 * @param {Stretch} window
 * @param {ToPx} x
 * @param {number} width
 * @param {number} height
 * @param {Palette} colours
 */
function drawTicks(context, window, x, width, height, colours) {
  const stepNs = roundStep(((window.to - window.from) / (width - LABEL_PX)) * 95);
  context.font = FONT(11);
  const decimals = tickDecimals(stepNs / 1e6);
  for (const tick of ticks(window.from, window.to, stepNs)) {
    const at = Math.round(x(tick)) + 0.5;
    context.strokeStyle = colours.axis;
    line(context, at, 21, at, height);
    context.fillStyle = colours.muted;
    const text = number(tick / 1e6, Math.min(6, decimals));
    if (at + 4 + context.measureText(text).width <= width) context.fillText(text, at + 4, 31);
  }
}

/**
 * The whole trace, one thin row per rank, dimmed outside the window.
 * @param {HTMLCanvasElement} canvas
 * @param {Timeline} view
 * @param {Palette} colours
 */
export function drawOverview(canvas, view, colours) {
  const rows = view.overviewLanes;
  const rowPx = overviewRowPx(rows.length);
  const { context, width } = prepare(canvas, rows.length * rowPx + 18);
  const x = xOf({ from: 0, to: view.endNs }, width);
  const fill = fills(context, colours);
  const bottom = rows.length * rowPx;
  rows.forEach((lane, index) => {
    const data = view.overview?.lanes.get(lane.lane);
    if (!data) return;
    for (let block = 0; block < data.start_ns.length; block += 1) {
      const kind = view.classes[data.class[block]];
      if (kind === 'idle') continue;
      const from = x(data.start_ns[block]);
      context.fillStyle = fill(kind);
      context.fillRect(
        from,
        index * rowPx + 1,
        Math.max(0.5, x(data.end_ns[block]) - from),
        Math.max(1, rowPx - 2),
      );
    }
  });
  const [from, to] = [x(view.window.from), x(view.window.to)];
  context.globalAlpha = 0.62;
  context.fillStyle = colours.bg;
  context.fillRect(LABEL_PX, 0, from - LABEL_PX, bottom);
  context.fillRect(to, 0, width - to, bottom);
  context.globalAlpha = 1;
  drawOverviewNames(context, view, rows, rowPx, x, width, colours);
  drawHandles(context, from, to, bottom, colours);
}

/** @param {number} count */
export function overviewRowPx(count) {
  return count <= 4 ? 13 : Math.max(2, Math.floor(52 / count));
}

/**
 * @param {Context} context
 * @param {Timeline} view
 * @param {Lane[]} rows
 * @param {number} rowPx
 * @param {ToPx} x
 * @param {number} width
 * @param {Palette} colours
 */
function drawOverviewNames(context, view, rows, rowPx, x, width, colours) {
  context.font = FONT(11);
  context.fillStyle = colours.muted;
  if (rowPx >= 11)
    rows.forEach((lane, index) =>
      context.fillText(fitted(context, lane.label, LABEL_PX - 10), 0, (index + 0.5) * rowPx),
    );
  else context.fillText(`${number(rows.length)} ranks`, 0, (rows.length * rowPx) / 2);
  const y = rows.length * rowPx + 10;
  if (view.steps.length) context.fillText('step', 0, y);
  const places = view.steps.map((step) => Math.round(x(step.start_ns)) + 0.5);
  const names = view.steps.map((step) => number(step.step));
  const widths = names.map((text) => 12 + context.measureText(text).width);
  const every = labelEvery(places, widths);
  places.forEach((at, index) => {
    context.strokeStyle = colours.axis;
    line(context, at, rows.length * rowPx, at, y + 6);
    if (index % every === 0 && at + widths[index] < width + 8) context.fillText(names[index], at + 4, y);
  });
}

/**
 * @param {Context} context
 * @param {number} from
 * @param {number} to
 * @param {number} bottom
 * @param {Palette} colours
 */
function drawHandles(context, from, to, bottom, colours) {
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  context.strokeRect(from, 0.75, Math.max(2, to - from), bottom - 0.5);
  context.lineWidth = 1;
  context.fillStyle = colours.text;
  for (const at of [from, to]) context.fillRect(at - 2.5, bottom / 2 - 6, 5, 12);
}
