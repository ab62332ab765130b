// What the mouse or a finger does on the lanes: says what lies there, selects it, opens rows, zooms to it.

import { duration, plural } from '../shared/format.js';
import { bandClass, partAt } from './compact.js';
import { blockAt, LABEL_PX } from './layout.js';
import { mergedPanel } from './panel.js';
import { aroundStretch, clamped } from './window.js';
import { hideTip, showTip } from '../shared/tip.js';

const SLACK_PX = 2;

/**
 * What lies under the pointer: a lane, and a block of it if there is one.
 * @param {Timeline} view
 * @param {MouseEvent} event
 * @returns {Under | null}
 */
function under(view, event) {
  const box = view.lanesCanvas.getBoundingClientRect();
  const y = event.clientY - box.top + view.scrollTop;
  const x = event.clientX - box.left;
  const lane = view.placed.lanes.find((each) => y >= each.y && y < each.y + each.height);
  if (!lane) return null;
  if (x < LABEL_PX) return { lane, isLabel: true };
  const nsPerPx = (view.window.to - view.window.from) / view.plotPx;
  const ns = nsAt(view, event);
  const data = view.data?.lanes.get(lane.lane);
  const index = blockAt(data, Math.floor((y - lane.y) / lane.rowPx), ns, SLACK_PX * nsPerPx);
  return { isLabel: false, lane, data, index };
}

/** @param {Timeline} view @param {MouseEvent} event */
function nsAt({ lanesCanvas, window, plotPx }, event) {
  const px = event.clientX - lanesCanvas.getBoundingClientRect().left - LABEL_PX;
  return window.from + (px * (window.to - window.from)) / plotPx;
}

/** @param {Under | null} found @returns {BlockUnder | null} */
function blockOf(found) {
  if (!found || found.isLabel || !found.data || found.index < 0) return null;
  return { lane: found.lane, data: found.data, index: found.index };
}

/**
 * Shows what the block or the name below the pointer is.
 * @param {Timeline} view
 * @param {MouseEvent} event
 */
export function hover(view, event) {
  const found = under(view, event);
  const block = blockOf(found);
  view.lanesCanvas.style.cursor =
    block || (found?.isLabel && (found.lane.hasMore || found.lane.band)) ? 'pointer' : found?.isLabel ? 'default' : 'grab';
  if (found?.isLabel) showTip(labelText(view, found.lane), event.clientX, event.clientY);
  else if (block) showTip(blockText(view, block), event.clientX, event.clientY);
  else hideTip();
}

/** @param {Timeline} view @param {PlacedLane} lane */
function labelText(view, lane) {
  if (!lane.band) return lane.label;
  const device = view.meta.ranks.find((each) => each.rank === lane.rank)?.device;
  return [lane.label, device, lane.band.whole].filter(Boolean).join(' \u00b7 ');
}

/** @param {Timeline} view @param {BlockUnder} found */
function blockText(view, { lane, data, index }) {
  const long = data.end_ns[index] - data.start_ns[index];
  const name = view.classes[data.class[index]];
  const kind = view.compact ? bandClass(view.compact, name) : name.replace('_', ' ');
  if (lane.band && data.count[index] === 1) return `${kind}, ${duration(long)} \u00b7 ${lane.label}`;
  if (data.name[index] < 0)
    return `${plural(data.count[index], 'block')} of ${kind}, ${duration(data.busy_ns[index])} in ${duration(long)}`;
  return `${view.data?.names[data.name[index]]}\n${kind}, ${duration(long)} \u00b7 rank ${lane.rank} \u00b7 ${lane.label}`;
}

/**
 * Selects the block below the pointer; a click on nothing clears the selection, one on a lane's name opens its rows.
 * @param {Timeline} view
 * @param {MouseEvent} event
 */
export function click(view, event) {
  view.lanesCanvas.focus({ preventScroll: true });
  const found = under(view, event);
  if (found?.isLabel) {
    if (found.lane.hasMore) view.toggle(found.lane);
    else if (found.lane.band) openRank(view, found.lane.rank);
    return;
  }
  const block = blockOf(found);
  const inside = block?.lane.band && partAt(view.data, block.lane.rank, nsAt(view, event));
  if (inside) {
    view.selection.select({ id: inside.part[3] }, false);
    return;
  }
  if (block && block.data.id[block.index] >= 0) {
    view.selection.select({ id: block.data.id[block.index] }, false);
    return;
  }
  view.selection.clear();
  if (!block) return;
  const { data, index } = block;
  mergedPanel(view.panel, view.classes[data.class[index]], data.count[index], data.busy_ns[index]);
}

/**
 * All lanes of a rank, with those of the one that the others wait for.
 * @param {Timeline} view
 * @param {number} rank
 */
function openRank({ app, variant }, rank) {
  const ranks = new Set([rank, variant.planned.slowest_rank ?? rank]);
  app.state.go({ tab: 'timeline', rank: [...ranks].join('~'), rows: 'lanes' });
}

/**
 * Zooms to the block below the pointer.
 * @param {Timeline} view
 * @param {MouseEvent} event
 */
export function zoomTo(view, event) {
  const block = blockOf(under(view, event));
  if (!block) return;
  const { data, index } = block;
  view.show(aroundStretch(data.start_ns[index], data.end_ns[index], view.endNs, 0.3));
}

/**
 * Moves the lanes with a finger or the mouse.
 * @param {Timeline} view
 * @param {number} dx
 * @param {number} dy
 */
export function dragged(view, dx, dy) {
  view.body.scrollTop -= dy;
  view.pan(-dx / view.plotPx);
}

/**
 * Moves or resizes the window in the overview by the part that was gripped.
 * @param {Timeline} view
 * @param {Grip} grip
 * @param {number} ns
 */
export function gripped(view, { part, offset }, ns) {
  const { from, to } = view.window;
  const windows = {
    all: { from: ns - offset, to: ns - offset + (to - from) },
    from: { from: Math.min(ns, to - 1), to },
    to: { from, to: Math.max(ns, from + 1) },
  };
  view.show(clamped(windows[part], view.endNs));
}
