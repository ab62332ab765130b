// What all canvases of a timeline draw with.

import { contextOf } from '../../shared/dom.js';
import { LABEL_PX } from '../layout.js';

/** @param {number} size @param {number} [weight] */
export const FONT = (size, weight = 400) =>
  `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;

/** @type {{ [kind: string]: string }} */
const CSS_NAMES = {
  cpu_wait: 'cpu-wait',
  all_reduce: 'comm-1',
  data: 'comm-1',
  all_gather: 'comm-2',
  tensor: 'comm-2',
  reduce_scatter: 'comm-3',
  context: 'comm-3',
  all_to_all: 'comm-4',
  expert: 'comm-4',
  send_recv: 'comm-5',
  pipeline: 'comm-5',
  other_comm: 'comm-0',
};

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
 * @param {Context} context
 * @param {Timeline} view
 * @param {ToPx} x
 * @param {number} top
 * @param {number} height
 * @param {Palette} colours
 */
export function drawRange(context, view, x, top, height, colours) {
  if (!view.range) return;
  const [from, to] = [x(view.range.from), x(view.range.to)];
  context.globalAlpha = 0.12;
  context.fillStyle = colours.text;
  context.fillRect(from, top, to - from, height);
  context.globalAlpha = 1;
  context.strokeStyle = colours.text;
  for (const at of [from, to]) line(context, Math.round(at) + 0.5, top, Math.round(at) + 0.5, top + height);
}

/** @param {Context} context @param {string} text @param {number} room */
export function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}\u2026`).width > room) end -= 1;
  return `${text.slice(0, end)}\u2026`;
}

/** @param {Context} context @param {number} x1 @param {number} y1 @param {number} x2 @param {number} y2 */
export function line(context, x1, y1, x2, y2) {
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
export function clip(context, x, y, width, height, draw) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  draw();
  context.restore();
}
