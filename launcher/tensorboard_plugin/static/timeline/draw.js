// Draws the timeline on canvases: overview, steps with ruler, lanes. Nothing here asks or listens.

import { contextOf } from '../shared/dom.js';
import { duration, number, three, tickDecimals } from '../shared/format.js';
import { labelEvery, roundStep, ticks } from '../shared/scale.js';
import { LABEL_PX, rowBox } from './layout.js';

/** @param {number} size @param {number} [weight] */
export const FONT = (size, weight = 400) =>
  `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
/** @type {{ [kind: string]: string }} */
const CSS_NAMES = { cpu_wait: 'cpu-wait' };
const MIN_LABEL_PX = 18;

/**
 * A canvas of the size it has on the page, ready to be drawn in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} [height]
 */
export function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  if (height != null) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  const size = [Math.round(width * ratio), Math.round(tall * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = contextOf(canvas);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.textBaseline = 'middle';
  return { context, width, height: tall };
}

/**
 * What a class is filled with: a colour, or the hatch of waiting.
 * @param {Context} context
 * @param {Palette} colours
 * @returns {Fill}
 */
export function fills(context, colours) {
  const tile = document.createElement('canvas');
  const ratio = devicePixelRatio || 1;
  tile.width = tile.height = Math.round(7 * ratio);
  const pen = contextOf(tile);
  pen.scale(tile.width / 7, tile.height / 7);
  pen.fillStyle = colours.wait;
  pen.fillRect(0, 0, 7, 7);
  pen.strokeStyle = colours.hatch;
  pen.lineWidth = 1.4;
  for (const shift of [-7, 0, 7]) {
    pen.beginPath();
    pen.moveTo(shift - 1, 8);
    pen.lineTo(shift + 8, -1);
    pen.stroke();
  }
  const hatch = context.createPattern(tile, 'repeat');
  hatch?.setTransform(new DOMMatrix().scale(7 / tile.width));
  return (name) =>
    name === 'wait' ? (hatch ?? colours.wait) : (colours[CSS_NAMES[name] ?? name] ?? colours.idle);
}

/**
 * ns → px in the plot.
 * @param {Stretch} window
 * @param {number} width
 * @returns {ToPx}
 */
export function xOf(window, width) {
  const scale = (width - LABEL_PX) / (window.to - window.from);
  return (ns) => LABEL_PX + (ns - window.from) * scale;
}

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
  const took = duration(step.end_ns - step.start_ns);
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
 * All lanes between the top and the bottom of what is scrolled to.
 * @param {HTMLCanvasElement} canvas
 * @param {Timeline} view
 * @param {Palette} colours
 */
export function drawLanes(canvas, view, colours) {
  const { context, width, height } = prepare(canvas, view.viewHeight);
  const fill = fills(context, colours);
  const x = xOf(view.window, width);
  context.save();
  context.translate(0, -view.scrollTop);
  clip(context, LABEL_PX, view.scrollTop, width - LABEL_PX, height, () => {
    drawBands(context, view, x, colours);
    drawRange(context, view, x, view.scrollTop, height, colours);
    for (const lane of view.placed.lanes) {
      if (lane.y + lane.height < view.scrollTop || lane.y > view.scrollTop + height) continue;
      drawLane(context, lane, view, x, fill, colours, width);
    }
    drawLinks(context, view, x, colours);
    drawSelected(context, view, x, colours);
  });
  drawLabels(context, view, width, colours);
  context.restore();
}

/** @param {Context} context @param {Timeline} view @param {ToPx} x @param {Palette} colours */
function drawBands(context, view, x, colours) {
  view.steps.forEach((step, index) => {
    const from = x(step.start_ns);
    if (index % 2) {
      context.fillStyle = colours.hover;
      context.fillRect(from, 0, x(step.shown_end_ns) - from, view.placed.height);
    }
    context.strokeStyle = colours.axis;
    line(context, Math.round(from) + 0.5, 0, Math.round(from) + 0.5, view.placed.height);
  });
}

/**
 * @param {Context} context
 * @param {Timeline} view
 * @param {ToPx} x
 * @param {number} top
 * @param {number} height
 * @param {Palette} colours
 */
function drawRange(context, view, x, top, height, colours) {
  if (!view.range) return;
  const [from, to] = [x(view.range.from), x(view.range.to)];
  context.globalAlpha = 0.12;
  context.fillStyle = colours.text;
  context.fillRect(from, top, to - from, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.text;
  for (const at of [from, to]) line(context, Math.round(at) + 0.5, top, Math.round(at) + 0.5, top + height);
}

/**
 * @param {Context} context
 * @param {PlacedLane} lane
 * @param {Timeline} view
 * @param {ToPx} x
 * @param {Fill} fill
 * @param {Palette} colours
 * @param {number} width
 */
function drawLane(context, lane, view, x, fill, colours, width) {
  const data = view.data?.lanes.get(lane.lane);
  if (!view.data || !data) return;
  const { names, partOf } = view.data;
  for (const [row, [first, end]] of data.rows) {
    if (row >= lane.shownRows) continue;
    const box = rowBox(lane, row);
    for (let index = first; index < end; index += 1) {
      const from = Math.max(x(data.start_ns[index]), LABEL_PX - 1);
      const to = Math.min(x(data.end_ns[index]), width + 1);
      if (to < LABEL_PX || from > width) continue;
      const block = {
        from,
        to,
        box,
        kind: view.classes[data.class[index]],
        isMerged: data.name[index] < 0,
        name: names[data.name[index]] ?? '',
        data,
        index,
      };
      drawBlock(context, block, view, fill);
      if (to - from >= MIN_LABEL_PX && !block.isMerged)
        drawLabel(context, block, partOf.get(data.id[index]), colours);
    }
  }
}

/** @param {Context} context @param {Block} block @param {Timeline} view @param {Fill} fill */
function drawBlock(context, block, view, fill) {
  const { from, to, box, data, index } = block;
  const wide = to - from;
  const isDimmed = view.matches && !(!block.isMerged && view.matches(block.name));
  context.globalAlpha = isDimmed
    ? 0.22
    : block.isMerged
      ? 0.35 +
        0.65 * Math.min(1, data.busy_ns[index] / Math.max(1, data.end_ns[index] - data.start_ns[index]))
      : 1;
  context.fillStyle = fill(block.kind);
  // A hair of background between neighbours, once there is room for one.
  context.fillRect(from, box.y, Math.max(0.5, wide > 2.4 ? wide - 0.7 : wide), box.height);
  context.globalAlpha = 1;
}

/** @param {Context} context @param {Block} block @param {Link | undefined} link @param {Palette} colours */
function drawLabel(context, block, link, colours) {
  const { from, to, box, kind, data, index } = block;
  const text =
    link && kind === 'transfer'
      ? link.label
      : kind === 'wait'
        ? `wait ${three((data.end_ns[index] - data.start_ns[index]) / 1e6)}`
        : shortName(block.name);
  context.font = FONT(11);
  const { width } = context.measureText(text);
  if (width + 9 > to - from) return;
  if (kind === 'wait') {
    context.fillStyle = colours.wait;
    context.fillRect(from + 2, box.y + box.height / 2 - 8, width + 7, 16);
  }
  context.fillStyle =
    kind.startsWith('cpu') || kind === 'idle'
      ? colours.text
      : kind === 'compute'
        ? colours['on-compute']
        : colours['on-phase'];
  context.fillText(text, from + 5, box.y + box.height / 2 + 0.5);
}

/**
 * A name without template arguments and parameters: `at::native::add`, `ncclDevKernel_AllReduce`.
 * @param {string} name
 */
export function shortName(name) {
  const bare =
    name
      .replace(/^void /, '')
      .replaceAll('(anonymous namespace)::', '')
      .split(/[<(]/)[0]
      .trim() || name;
  const parts = bare.split('::');
  return parts.length > 2 ? parts.slice(-2).join('::') : bare;
}

/**
 * A collective is one thing on all ranks: thin dotted lines join its start and its end, solid where selected.
 * @param {Context} context
 * @param {Timeline} view
 * @param {ToPx} x
 * @param {Palette} colours
 */
function drawLinks(context, view, x, colours) {
  for (const link of view.data?.links ?? []) {
    const isSelected = link.collective === view.selected?.collective?.collective;
    const boxes = link.parts
      .flatMap((part) => {
        const lane = view.placed.byLane.get(part[1]);
        return lane ? [{ part, ...rowBox(lane, part[2]) }] : [];
      })
      .sort((a, b) => a.y - b.y);
    if (!isSelected && x(link.parts[0][6]) - x(link.parts[0][5]) < 6) continue;
    context.strokeStyle = isSelected ? colours.text : colours.muted;
    context.lineWidth = isSelected ? 1.5 : 1;
    context.setLineDash(isSelected ? [] : [2, 3]);
    for (let index = 1; index < boxes.length; index += 1) {
      const [upper, lower] = [boxes[index - 1], boxes[index]];
      line(context, x(upper.part[5]), upper.y + upper.height, x(lower.part[5]), lower.y);
      line(context, x(upper.part[6]) - 0.7, upper.y + upper.height, x(lower.part[6]) - 0.7, lower.y);
    }
    context.setLineDash([]);
    context.lineWidth = 1;
    if (isSelected)
      for (const box of boxes)
        outline(context, box, x(box.part[4]), x(box.part[6]), colours, box.part[3] !== view.selected.id);
  }
}

/**
 * @param {Context} context
 * @param {Box} box
 * @param {number} from
 * @param {number} to
 * @param {Palette} colours
 * @param {boolean} isDashed
 */
function outline(context, box, from, to, colours, isDashed) {
  context.strokeStyle = colours.text;
  context.lineWidth = isDashed ? 1 : 2;
  context.setLineDash(isDashed ? [3, 2] : []);
  context.strokeRect(from - 1.5, box.y - 1.5, Math.max(2, to - from) + 2, box.height + 3);
  context.setLineDash([]);
  context.lineWidth = 1;
}

/** @param {Context} context @param {Timeline} view @param {ToPx} x @param {Palette} colours */
function drawSelected(context, view, x, colours) {
  const { selected } = view;
  const lane = selected && view.placed.byLane.get(selected.lane);
  if (
    !lane ||
    selected.row >= lane.shownRows ||
    view.data?.links.some((link) => link.collective === selected.collective?.collective)
  )
    return;
  outline(context, rowBox(lane, selected.row), x(selected.start_ns), x(selected.end_ns), colours, false);
}

/** @param {Context} context @param {Timeline} view @param {number} width @param {Palette} colours */
function drawLabels(context, view, width, colours) {
  view.placed.titles.forEach((title, index) => {
    if (index) {
      context.strokeStyle = colours.axis;
      line(context, 0, title.y + 0.5, width, title.y + 0.5);
    }
    context.font = FONT(12, 600);
    context.fillStyle = colours.text;
    const text = view.titleOf(title);
    context.fillStyle = colours.bg;
    context.fillRect(0, title.y + 4, context.measureText(text).width + 8, 19);
    context.fillStyle = colours.text;
    context.fillText(text, 0, title.y + 14);
  });
  context.font = FONT(11);
  for (const lane of view.placed.lanes) {
    context.fillStyle = colours.bg;
    context.fillRect(0, lane.y, LABEL_PX - 1, lane.height);
    context.fillStyle = colours.muted;
    const more = lane.hasMore ? (lane.isExpanded ? ' \u25b4' : ` \u25be ${lane.rows}`) : '';
    context.fillText(
      fitted(context, lane.label, LABEL_PX - 14 - context.measureText(more).width) + more,
      0,
      lane.y + Math.min(lane.height / 2, 17) + 0.5,
    );
  }
}

/** @param {Context} context @param {string} text @param {number} room */
function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}\u2026`).width > room) end -= 1;
  return `${text.slice(0, end)}\u2026`;
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
  context.fillText('step', 0, y);
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

/** @param {Context} context @param {number} x1 @param {number} y1 @param {number} x2 @param {number} y2 */
function line(context, x1, y1, x2, y2) {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/**
 * @param {Context} context
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {number} height
 * @param {() => void} draw
 */
function clip(context, x, y, width, height, draw) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  draw();
  context.restore();
}
