// What the mouse or a finger does on the lanes: says what lies there, selects it, opens rows, zooms to it.

import { duration, plural } from './format.js';
import { blockAt, LABEL_PX } from './tl_layout.js';
import { mergedPanel } from './tl_panel.js';
import { aroundStretch, clamped } from './tl_window.js';
import { hideTip, showTip } from './tip.js';

const SLACK_PX = 2;

/** What lies under the pointer: a lane, and a block of it if there is one. */
function under(view, event) {
  const box = view.lanesCanvas.getBoundingClientRect();
  const y = event.clientY - box.top + view.scrollTop;
  const x = event.clientX - box.left;
  const lane = view.placed.lanes.find((one) => y >= one.y && y < one.y + one.height);
  if (!lane) return null;
  if (x < LABEL_PX) return { lane, isLabel: true };
  const nsPerPx = (view.window.to - view.window.from) / view.plotPx;
  const ns = view.window.from + (x - LABEL_PX) * nsPerPx;
  const data = view.data?.lanes.get(lane.lane);
  const index = blockAt(data, Math.floor((y - lane.y) / lane.rowPx), ns, SLACK_PX * nsPerPx);
  return { lane, data, index };
}

/** Tells of the block or the name below the pointer. */
export function hover(view, event) {
  const found = under(view, event);
  const onBlock = found?.index >= 0;
  view.lanesCanvas.style.cursor =
    onBlock || (found?.isLabel && found.lane.hasMore) ? 'pointer' : found?.isLabel ? 'default' : 'grab';
  if (found?.isLabel) return showTip(found.lane.label, event.clientX, event.clientY);
  return onBlock ? showTip(told(view, found), event.clientX, event.clientY) : hideTip();
}

function told(view, { lane, data, index }) {
  const long = data.end_ns[index] - data.start_ns[index];
  const kind = view.classes[data.class[index]].replace('_', ' ');
  if (data.name[index] < 0)
    return `${plural(data.count[index], 'block')} of ${kind}, ${duration(data.busy_ns[index])} in ${duration(long)}`;
  return `${view.data.names[data.name[index]]}\n${kind}, ${duration(long)} \u00b7 rank ${lane.rank} \u00b7 ${lane.label}`;
}

/** Selects the block below the pointer; a click on nothing lets go, one on a lane's name opens its rows. */
export function click(view, event) {
  view.lanesCanvas.focus({ preventScroll: true });
  const found = under(view, event);
  if (found?.isLabel) return found.lane.hasMore && view.toggle(found.lane);
  if (!(found?.index >= 0)) return view.selection.clear();
  const { data, index } = found;
  if (data.id[index] >= 0) return view.selection.select({ id: data.id[index] }, false);
  view.selection.clear();
  return mergedPanel(view.panel, view.classes[data.class[index]], data.count[index], data.busy_ns[index]);
}

/** Zooms to the block below the pointer. */
export function zoomTo(view, event) {
  const found = under(view, event);
  if (!(found?.index >= 0)) return;
  const { data, index } = found;
  view.show(aroundStretch(data.start_ns[index], data.end_ns[index], view.endNs, 0.3));
}

/** Moves the lanes with a finger or the mouse. */
export function dragged(view, dx, dy) {
  view.body.scrollTop -= dy;
  view.pan(-dx / view.plotPx);
}

/** Moves or resizes the window in the overview by the part that was gripped. */
export function gripped(view, { part, offset }, ns) {
  const { from, to } = view.window;
  const windows = {
    all: { from: ns - offset, to: ns - offset + (to - from) },
    from: { from: Math.min(ns, to - 1), to },
    to: { from, to: Math.max(ns, from + 1) },
  };
  view.show(clamped(windows[part], view.endNs));
}
