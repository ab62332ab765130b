// Every step of a variant as a dot on a line, with the ranked step time as a tick, else the median.

import { el, found, onWidth, prepare, replace } from '../shared/dom.js';
import { number, three, tickDecimals } from '../shared/format.js';
import { around, jitter, Scale } from '../shared/scale.js';
import { palette } from '../shared/theme.js';
import { hideTip, showTip } from '../shared/tip.js';

/** Beyond this share of a variant's steps the scale doesn't follow: they are at the edge. */
const FOLLOWED = 0.985;
/** But for those that are no farther beyond it than this share of its length. */
const CLOSE = 0.25;
/** The axis covers at least this share of the longest step: a hair's breadth doesn't look like a spread. */
const LEAST_RANGE = 0.02;
const NEAR_PX = 7;

/**
 * One axis over the steps of all variants; a few outliers don't stretch it.
 * @param {Pick<Steps, 'step_ms'>[]} all
 */
export function stripScale(all) {
  const ends = all.flatMap(({ step_ms: steps }) => {
    const sorted = [...steps].sort((a, b) => a - b);
    return sorted.length ? [sorted[0], sorted[Math.floor((sorted.length - 1) * FOLLOWED)]] : [];
  });
  const first = padded(ends);
  const most = longest(all);
  const isClose = most <= first.scale.high + CLOSE * (first.scale.high - first.scale.low);
  return isClose && most > first.scale.high ? padded([...ends, most]) : first;
}

/** @param {number[]} ends */
function padded(ends) {
  const { scale, step } = around(ends, 5, LEAST_RANGE * Math.max(...ends, 1e-3));
  return { scale: new Scale(scale.low, scale.high + 0.1 * (scale.high - scale.low)), step };
}

/** @param {Pick<Steps, 'step_ms'>[]} all */
function longest(all) {
  return all.reduce((most, { step_ms: steps }) => steps.reduce((a, b) => Math.max(a, b), most), 0);
}

/** @param {Scale} scale @param {number} step */
function stripAxis(scale, step) {
  return scale
    .ticks(step)
    .map((tick) => el('span', { style: { left: scale.at(tick) } }, number(tick, tickDecimals(step))));
}

/**
 * Draws the dots of one variant into `strip`.
 * @param {HTMLElement} strip
 * @param {{ label: string, stepMs: number | null }} block
 * @param {DrawnSteps} steps
 * @param {Scale} scale
 * @param {number} step
 * @param {() => void} open
 */
function drawStrip(strip, block, steps, scale, step, open) {
  const lines = scale
    .ticks(step)
    .map((tick) => el('span', { class: 'gridline', style: { left: scale.at(tick) } }));
  const [what, middle] =
    block.stepMs == null ? ['median', medianOf(steps.step_ms)] : ['estimate', block.stepMs];
  const canvas = el('canvas', {
    role: 'img',
    'aria-label': `${block.label}: ${steps.step_ms.length} steps, ${what} ${three(middle)} ms, slowest ${three(Math.max(...steps.step_ms))} ms`,
    onclick: open,
  });
  // On a narrow page strips are between the bars, so each has an axis of its own.
  const own = el('div', { class: 'axis own-axis', 'aria-hidden': 'true' }, stripAxis(scale, step));
  strip.replaceChildren(...lines, canvas, own);
  /** @type {Dot[]} */
  let places = [];
  onWidth(canvas, () => {
    places = paint(canvas, steps, scale, middle);
  });
  canvas.addEventListener('pointermove', (event) => {
    const box = canvas.getBoundingClientRect();
    const index = nearest(places, event.clientX - box.left, event.clientY - box.top);
    if (index < 0) return hideTip();
    const round = steps.round[index] ? `, round ${number(steps.round[index])}` : '';
    return showTip(
      `step ${number(steps.number[index])}${round}: ${three(steps.step_ms[index])} ms`,
      event.clientX,
      event.clientY,
    );
  });
  canvas.addEventListener('pointerleave', hideTip);
}

/** @param {HTMLCanvasElement} canvas @param {DrawnSteps} steps @param {Scale} scale @param {number} middle */
function paint(canvas, steps, scale, middle) {
  const { context, width, height } = prepare(canvas);
  const colours = palette();
  const places = steps.step_ms.map((ms, index) => ({
    x: Math.min(1, Math.max(0, scale.share(ms))) * width,
    y: height / 2 + jitter(steps.number[index]) * (height - 8),
    isBeyond: ms > scale.high,
  }));
  context.fillStyle = colours.text;
  context.globalAlpha = 0.5;
  for (const { x, y, isBeyond } of places) {
    context.beginPath();
    if (isBeyond) triangle(context, x, y);
    else context.arc(x, y, 1.5, 0, 2 * Math.PI);
    context.fill();
  }
  context.globalAlpha = 1;
  context.fillStyle = colours.compute;
  context.fillRect(scale.share(middle) * width - 1, 0, 2, height);
  return places;
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y */
function triangle(context, x, y) {
  context.moveTo(x - 5, y - 3);
  context.lineTo(x, y);
  context.lineTo(x - 5, y + 3);
}

/** @param {Dot[]} places @param {number} x @param {number} y */
function nearest(places, x, y) {
  let best = -1;
  let least = NEAR_PX ** 2;
  places.forEach((place, index) => {
    const distance = (place.x - x) ** 2 + (place.y - y) ** 2;
    if (distance < least) [best, least] = [index, distance];
  });
  return best;
}

/**
 * The middle value; of an even number of values the mean of the two in the middle.
 * @param {number[]} values
 */
export function medianOf(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = (sorted.length - 1) / 2;
  return sorted.length ? (sorted[Math.floor(middle)] + sorted[Math.ceil(middle)]) / 2 : 0;
}

/**
 * Draws the steps of all blocks on one axis.
 * @param {HTMLElement} grid
 * @param {OpenApp} app
 * @param {Bars[]} blocks
 * @param {{ [id: string]: DrawnSteps }} steps
 */
export function fillStrips(grid, app, blocks, steps) {
  const { scale, step } = stripScale(blocks.map((block) => steps[block.id]).filter(Boolean));
  const counts = new Set(blocks.map((block) => steps[block.id]?.step_ms.length).filter(Boolean));
  const head = grid.querySelector('.strip-head');
  if (!head) return;
  if (!counts.size) {
    // Nothing was timed step by step: then there is no scale either.
    head.textContent = '';
    for (const each of grid.querySelectorAll('.strip-scale')) each.remove();
    return;
  }
  head.textContent = counts.size === 1 ? `every step, ms (${number([...counts][0])} each)` : 'every step, ms';
  /** @param {Bars} block */
  const open = (block) =>
    block.canOpen && app.state.go({ tab: 'timeline', variant: block.id, from: null, to: null });
  for (const block of blocks) {
    const strip = found(grid, `[data-strip="${CSS.escape(block.id)}"]`);
    if (strip && steps[block.id]) drawStrip(strip, block, steps[block.id], scale, step, () => open(block));
  }
  const axisPlace = grid.querySelector('.strip-axis');
  if (axisPlace) replace(axisPlace, stripAxis(scale, step));
}

/**
 * The steps of all ranks as one: each lasts as long as on its slowest rank.
 * @param {RankBreakdown[]} ranks
 * @returns {DrawnSteps}
 */
export function tracedSteps(ranks) {
  /** @type {Map<number, number>} */
  const spans = new Map();
  for (const { step, span_ms: ms } of ranks.flatMap((rank) => rank.steps))
    spans.set(step, Math.max(ms, spans.get(step) ?? 0));
  const sorted = [...spans].sort(([a], [b]) => a - b);
  return {
    number: sorted.map(([step]) => step),
    round: sorted.map(() => 0),
    step_ms: sorted.map(([, ms]) => ms),
  };
}
