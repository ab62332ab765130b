// Mouse, touch and keys on the timeline, as calls of a few verbs.

import { isTyping } from '../shared/dom.js';
import { LABEL_PX } from './layout.js';

const CLICK_PX = 4;
const ZOOM_PER_PX = 0.0022;
const HANDLE_PX = 7;

/**
 * Listens on the lanes: wheel and pinch zoom, drags pan, shift and a drag choose a stretch.
 * @param {HTMLCanvasElement} canvas
 * @param {Verbs} verbs
 */
export function listenToLanes(canvas, verbs) {
  /** @type {Map<number, PointerEvent>} */
  const pointers = new Map();
  let moved = 0;
  /** @type {number | null} */
  let start = null;
  /** @param {MouseEvent} event */
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    return (event.clientX - box.left - LABEL_PX) / (box.width - LABEL_PX);
  };
  canvas.addEventListener('wheel', (event) => onWheel(event, share(event), verbs), { passive: false });
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button) return;
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event);
    moved = 0;
    start = event.shiftKey && share(event) >= 0 ? share(event) : null;
  });
  canvas.addEventListener('pointermove', (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return verbs.hover(event);
    moved += Math.abs(event.clientX - before.clientX) + Math.abs(event.clientY - before.clientY);
    if (pointers.size === 2) pinch(pointers, event, share, verbs);
    else if (start != null) verbs.choose(start, share(event), false);
    else if (moved > CLICK_PX) verbs.drag(event.clientX - before.clientX, event.clientY - before.clientY);
    pointers.set(event.pointerId, event);
    return undefined;
  });
  /** @param {PointerEvent} event */
  const end = (event) => {
    const wasOne = pointers.size === 1;
    if (!pointers.delete(event.pointerId) || event.type === 'pointercancel' || !wasOne) return;
    if (start != null && moved > CLICK_PX) verbs.choose(start, share(event), true);
    else if (moved <= CLICK_PX) verbs.click(event);
  };
  canvas.addEventListener('pointerup', end);
  canvas.addEventListener('pointercancel', end);
  canvas.addEventListener('pointerleave', () => verbs.leave());
  canvas.addEventListener('dblclick', (event) => verbs.open(event));
}

/** @param {WheelEvent} event @param {number} at @param {Verbs} verbs */
function onWheel(event, at, verbs) {
  if (at < 0) return; // over the names the page and the lanes scroll
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1;
  const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
  if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) verbs.pan((sideways * unit) / 1000);
  else verbs.zoom(Math.exp(event.deltaY * unit * ZOOM_PER_PX * (event.ctrlKey ? 4 : 1)), at);
}

/**
 * Two fingers: the distance between them zooms, their middle pans.
 * @param {Map<number, PointerEvent>} pointers
 * @param {PointerEvent} event
 * @param {(event: MouseEvent) => number} share
 * @param {Verbs} verbs
 */
function pinch(pointers, event, share, verbs) {
  const before = [...pointers.values()].map(share);
  const now = [...pointers].map(([id, old]) => share(id === event.pointerId ? event : old));
  /** @param {number[]} ends */
  const spread = (ends) => Math.max(Math.abs(ends[0] - ends[1]), 0.01);
  /** @param {number[]} ends */
  const middle = (ends) => (ends[0] + ends[1]) / 2;
  verbs.zoom(spread(before) / spread(now), middle(now));
  verbs.pan(middle(before) - middle(now));
}

/**
 * Listens on the ruler: a drag chooses a stretch of time, whose sums are shown.
 * @param {HTMLCanvasElement} canvas
 * @param {Verbs} verbs
 */
export function listenToRuler(canvas, verbs) {
  /** @type {number | null} */
  let start = null;
  /** @param {MouseEvent} event */
  const share = (event) => {
    const box = canvas.getBoundingClientRect();
    return (event.clientX - box.left - LABEL_PX) / (box.width - LABEL_PX);
  };
  canvas.style.cursor = 'col-resize';
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button || share(event) < 0) return;
    canvas.setPointerCapture(event.pointerId);
    start = share(event);
  });
  canvas.addEventListener(
    'pointermove',
    (event) => start != null && verbs.choose(start, share(event), false),
  );
  canvas.addEventListener('pointerup', (event) => {
    if (start != null) verbs.choose(start, share(event), true);
    start = null;
  });
}

/**
 * Listens on the overview: the window is dragged, its handles resize it, a click elsewhere brings it there.
 * @param {HTMLCanvasElement} canvas
 * @param {Timeline} view
 * @param {Verbs} verbs
 */
export function listenToOverview(canvas, view, verbs) {
  /** @type {Grip | null} */
  let grip = null;
  /** @param {MouseEvent} event */
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return ((event.clientX - box.left - LABEL_PX) / (box.width - LABEL_PX)) * view.endNs;
  };
  const nsPerPx = () => view.endNs / (canvas.clientWidth - LABEL_PX);
  canvas.addEventListener('pointerdown', (event) => {
    const ns = at(event);
    if (event.button || ns < 0) return;
    canvas.setPointerCapture(event.pointerId);
    const { from, to } = view.window;
    const near = HANDLE_PX * nsPerPx();
    const part = Math.abs(ns - from) < near ? 'from' : Math.abs(ns - to) < near ? 'to' : 'all';
    const isInside = ns > from && ns < to;
    grip = { part, offset: part === 'all' ? (isInside ? ns - from : (to - from) / 2) : 0 };
    verbs.grip(grip, ns);
  });
  canvas.addEventListener('pointermove', (event) => grip && verbs.grip(grip, at(event)));
  const end = () => {
    grip = null;
  };
  canvas.addEventListener('pointerup', end);
  canvas.addEventListener('pointercancel', end);
  canvas.addEventListener(
    'wheel',
    (event) => {
      event.preventDefault();
      verbs.zoom(Math.exp(event.deltaY * ZOOM_PER_PX), 0.5);
    },
    { passive: false },
  );
  canvas.addEventListener('keydown', (event) => {
    const sign = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!sign) return;
    event.preventDefault();
    if (event.shiftKey) verbs.zoom(sign > 0 ? 1.25 : 0.8, 0.5);
    else verbs.pan(0.2 * sign);
  });
}

/**
 * Keys for the whole tab; gives a function that stops listening.
 * @param {Verbs} verbs
 */
export function listenToKeys(verbs) {
  /** @type {{ [key: string]: () => void }} */
  const commands = {
    w: () => verbs.zoom(0.7, 0.5),
    s: () => verbs.zoom(1 / 0.7, 0.5),
    a: () => verbs.pan(-0.2),
    d: () => verbs.pan(0.2),
    f: verbs.fit,
    n: () => verbs.neighbour('next'),
    p: () => verbs.neighbour('previous'),
    escape: verbs.clear,
  };
  /** @param {KeyboardEvent} event */
  const onkey = (event) => {
    const command = isTyping(event) ? null : commands[event.key.toLowerCase()];
    if (!command) return;
    event.preventDefault();
    command();
  };
  document.addEventListener('keydown', onkey);
  return () => document.removeEventListener('keydown', onkey);
}
