// The frame of a plot: its rows with their figures, the floor, names that keep apart.

import { svg, widest } from '../shared/dom.js';
import { number, tickDecimals } from '../shared/format.js';

const TOP = 26;
const BOTTOM = 34;
const TEXT_PX = 11;
const LINE_PX = 13;
/** Around a name: its rim, and a bold face. */
const NAME_ROOM = 8;
/** Curves in one plot; further ones get a plot of their own. */
const TOGETHER = 4;

/** Places within a plot of this size; `share(value)` is where a value lies along the floor, from 0 to 1. */
export class Plot {
  /**
   * @param {{ width: number, height: number, right: number, axis: Axis, share: (value: number) => number }} size
   */
  constructor({ width, height, right, axis: { scale, step }, share }) {
    this.scale = scale;
    this.step = step;
    this.share = share;
    this.texts = scale.ticks(step).map((tick) => number(tick, tickDecimals(Math.min(step, tick || step))));
    this.left = Math.ceil(widest(this.texts, TEXT_PX)) + 10;
    this.end = width - right;
    this.rowsEnd = this.end;
    this.floor = height - BOTTOM;
  }

  /** @param {number} value */
  x(value) {
    return this.left + this.share(value) * (this.end - this.left);
  }

  /** @param {number} value */
  y(value) {
    return this.floor - this.scale.share(value) * (this.floor - TOP);
  }

  /**
   * Rows, floor and units; `marks` are `[value, text]` along the floor.
   * @param {[value: number, text: string | null][]} marks
   * @param {string} unit
   * @param {string} floorUnit
   */
  frame(marks, unit, floorUnit) {
    const { left, end, floor, rowsEnd } = this;
    return [
      ...this.scale.ticks(this.step).flatMap((tick, index) => [
        svg('line', { class: 'grid-line', x1: left, x2: rowsEnd, y1: this.y(tick), y2: this.y(tick) }),
        svg('text', { x: left - 8, y: this.y(tick) + 4, 'text-anchor': 'end' }, this.texts[index]),
      ]),
      svg('line', { class: 'axis', x1: left, x2: rowsEnd, y1: floor + 0.5, y2: floor + 0.5 }),
      ...marks.flatMap(([value, text]) => [
        svg('line', { class: 'axis', x1: this.x(value), x2: this.x(value), y1: floor, y2: floor + 4 }),
        ...(text ? [svg('text', { x: this.x(value), y: floor + 16, 'text-anchor': 'middle' }, text)] : []),
      ]),
      svg('text', { x: 0, y: 10 }, unit),
      svg('text', { x: end, y: floor + 31, 'text-anchor': 'end' }, floorUnit),
    ];
  }
}

/**
 * A line through `points`, each `[x, y]` in px; those after the first are dashed, each in its own way.
 * @param {Point[]} points
 * @param {number} index
 */
export function line(points, index) {
  const path = points.map(([x, y], at) => `${at ? 'L' : 'M'}${x.toFixed(1)} ${y.toFixed(1)}`).join(' ');
  return svg('path', { class: look(index), d: path });
}

/**
 * A point of the line of this index.
 * @param {Point} place
 * @param {number} index
 * @param {number} [radius]
 */
export function dot([cx, cy], index, radius = 3) {
  return svg('circle', { class: look(index), cx, cy, r: radius });
}

/**
 * How a line and its points are drawn: the first solid, the others in one of three kinds of dashes.
 * @param {number} index
 */
function look(index) {
  return index ? `dashed dashes-${index % 3}` : 'solid';
}

/**
 * A name next to the end of the line of this index.
 * @param {string} text
 * @param {Point} end
 * @param {number} index
 * @returns {PlacedName}
 */
export function endName(text, [x, y], index) {
  return { text, x: x + 8, y: y + 4, class: index ? '' : 'strong' };
}

/**
 * Curves that are drawn together, a plot for each group.
 * @template T
 * @param {T[]} curves
 */
export function inGroups(curves) {
  return Array.from({ length: Math.ceil(curves.length / TOGETHER) }, (_, index) =>
    curves.slice(index * TOGETHER, (index + 1) * TOGETHER),
  );
}

/**
 * Names next to their places `{text, x, y, class}`; one that would cover another moves down.
 * @param {PlacedName[]} wanted
 */
export function names(wanted) {
  /** @type {(PlacedName & { width: number })[]} */
  const placed = [];
  for (const each of [...wanted].sort((a, b) => a.y - b.y)) {
    const width = widest([each.text], TEXT_PX) + NAME_ROOM;
    /** @param {PlacedName & { width: number }} other */
    const covers = (other) =>
      each.x < other.x + other.width && other.x < each.x + width && Math.abs(each.y - other.y) < LINE_PX;
    let covered = placed.find(covers);
    while (covered) {
      each.y = covered.y + LINE_PX;
      covered = placed.find(covers);
    }
    placed.push({ ...each, width });
  }
  return placed.map(({ text, x, y, class: name }) => svg('text', { class: `name ${name ?? ''}`, x, y }, text));
}

/**
 * The room that names next to the plot need, also in a bold face.
 * @param {string[]} texts
 */
export function roomFor(texts) {
  return Math.ceil(1.12 * widest(texts, TEXT_PX)) + 12;
}
