// Draws the lanes, their names and the links between them. Nothing here asks or listens.

import { prepare } from '../../shared/dom.js';
import { three } from '../../shared/format.js';
import { idleIn } from '../compact.js';
import { LABEL_PX, rowBox, shownBox } from '../layout.js';
import { clip, drawRange, fills, fitted, FONT, line, xOf } from './pen.js';

const MIN_LABEL_PX = 18;

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
      drawIdle(context, lane, view, x, colours);
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
 * @param {PlacedLane} lane
 * @param {Timeline} view
 * @param {ToPx} x
 * @param {Palette} colours
 */
function drawIdle(context, lane, view, x, colours) {
  const idle = idleIn(lane, view.loaded);
  if (!idle) return;
  const { y, height } = rowBox(lane, 0);
  context.fillStyle = colours.idle;
  context.fillRect(x(idle.from), y, x(idle.to) - x(idle.from), height);
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
  const { names, labels, partOf } = view.data;
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
        label: labels[data.name[index]] ?? '',
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
  const isDimmed = view.matches && !view.compact && !(!block.isMerged && view.matches(block.name));
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
        : block.label;
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
        const box = shownBox(view.placed, part[1], part[2], part[0]);
        return box ? [{ part, ...box }] : [];
      })
      .sort((a, b) => a.y - b.y);
    if (!isSelected && (view.compact || x(link.parts[0][6]) - x(link.parts[0][5]) < 6)) continue;
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
  const box = selected && shownBox(view.placed, selected.lane, selected.row, selected.rank);
  if (
    !box ||
    view.data?.links.some((link) => link.collective === selected.collective?.collective)
  )
    return;
  outline(context, box, x(selected.start_ns), x(selected.end_ns), colours, false);
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
    if (lane.band?.beginsGroup) {
      context.strokeStyle = colours.axis;
      line(context, 0, lane.y - 0.5, width, lane.y - 0.5);
    }
    context.fillStyle = colours.muted;
    const name = [lane.label, lane.band?.note].filter(Boolean).join(' \u00b7 ');
    const more = lane.hasMore ? (lane.isExpanded ? ' \u25b4' : ` \u25be ${lane.rows}`) : '';
    context.fillText(
      fitted(context, name, LABEL_PX - 14 - context.measureText(more).width) + more,
      0,
      lane.y + Math.min(lane.height / 2, 17) + 0.5,
    );
  }
}
