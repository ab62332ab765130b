// Time over memory: a point for each combination that has a time.

import { el, picture, svg, widest } from '../shared/dom.js';
import { memoryUnit, number, tickDecimals } from '../shared/format.js';
import { around } from '../shared/scale.js';
import { hideTip, showTip } from '../shared/tip.js';
import { Plot } from '../splits/plot.js';
import { STATUS_WORDS } from '../splits/words.js';

/** Names of combinations that are highlighted. */
export const WORDS = {
  own: 'the job\u2019s own setting',
  finalist: 'compared at the end',
  front: 'none is both as fast and as small',
};
const HEIGHT = 340;
const RIGHT = 16;
/** For those whose memory isn't known. */
const STRIP_PX = 92;
const TEXT_PX = 11;
/** How far letters reach below their line. */
const BELOW_LINE = 3;
/** A bold face is so much wider. */
const BOLDER = 1.12;
const RADIUS = 4.5;
/** A chart with room for short names only. */
const NARROW_PX = 500;
/** Around the points, as a share of their range. */
const ROOM = 0.04;

/**
 * The chart, as wide as its place. Arrow keys go from point to point, in the order of their times.
 * @param {SearchResult} search
 * @param {Combination[]} tried
 * @param {Mark} mark
 */
export function pointsChart(search, tried, mark) {
  const timed = tried.filter((combination) => combination.ms != null);
  const label = `Time over memory of ${number(timed.length)} combinations; the table below has their figures.`;
  return picture({ class: 'line-chart points-chart', role: 'group', 'aria-label': label }, (width) =>
    new Chart(search, timed, width).parts(mark),
  );
}

/**
 * An axis on which no point is at the very end, unless that is 0.
 * @param {number[]} values
 */
function roomy(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = ROOM * (high - low);
  return around(values.length ? [Math.max(0, low - room), high + room] : []);
}

class Chart extends Plot {
  /** @param {SearchResult} search @param {Combination[]} timed @param {number} width */
  constructor(search, timed, width) {
    const placed = timed.filter((combination) => combination.tried.peak_gib != null);
    const gib = placed.map((combination) => combination.tried.peak_gib ?? 0);
    const [unit, perGib] = memoryUnit(Math.max(search.memory_gib ?? 0, ...gib));
    const memory = roomy(gib.map((peak) => peak * perGib));
    const hasStrip = placed.length < timed.length;
    super({
      width,
      height: HEIGHT,
      right: RIGHT + (hasStrip && placed.length ? STRIP_PX : 0),
      axis: roomy(timed.map((combination) => combination.ms ?? 0)),
      share: (amount) => memory.scale.share(amount),
    });
    this.rowsEnd = width - RIGHT;
    this.width = width;
    this.search = search;
    this.timed = timed;
    this.placed = placed;
    this.memory = memory;
    this.unit = unit;
    this.perGib = perGib;
    this.hasStrip = hasStrip;
  }

  /** Where those are whose memory isn't known. */
  get stripX() {
    return this.placed.length ? this.end + STRIP_PX / 2 : (this.left + this.end) / 2;
  }

  /** @param {Combination} combination @returns {Point} */
  at({ tried, ms }) {
    return [tried.peak_gib == null ? this.stripX : this.x(tried.peak_gib * this.perGib), this.y(ms ?? 0)];
  }

  /** @param {Mark} mark */
  parts(mark) {
    return [...this.axes(), ...this.limit(), ...this.front(), ...this.timed.map((each, index) => this.point(each, index, mark)), ...this.named()];
  }

  axes() {
    const { scale, step } = this.memory;
    const decimals = tickDecimals(step);
    const perSample = this.timed.some((combination) => combination.tried.ms_per_sample != null);
    /** @type {[value: number, text: string][]} */
    const marks = this.placed.length ? scale.ticks(step).map((tick) => [tick, number(tick, decimals)]) : [];
    const memoryUnits = this.placed.length ? `peak memory of the fullest device, ${this.unit}` : '';
    return [
      ...this.frame(marks, perSample ? 'ms per sample' : 'ms per step', memoryUnits),
      ...(this.hasStrip
        ? [svg('text', { x: this.stripX, y: this.floor + 16, 'text-anchor': 'middle' }, 'memory unknown')]
        : []),
    ];
  }

  /** The memory that the job allows, where that is within the chart. */
  limit() {
    const most = (this.search.memory_gib ?? -1) * this.perGib;
    const { scale } = this.memory;
    if (!this.placed.length || most < scale.low || most > scale.high) return [];
    return [svg('line', { class: 'limit-line', x1: this.x(most), x2: this.x(most), y1: this.y(this.scale.high), y2: this.floor })];
  }

  /** Steps along those that none beats: at each memory the fastest that there is. */
  front() {
    const points = this.search.front.flatMap((id) => this.timed.filter((combination) => combination.id === id)).reverse();
    if (points.length < 2) return [];
    const path = points.map((combination, index) => {
      const [x, y] = this.at(combination).map((px) => px.toFixed(1));
      return index ? `H${x} V${y}` : `M${x} ${y}`;
    });
    return [svg('path', { class: 'front', d: path.join(' ') })];
  }

  /** @param {Combination} combination @param {number} index @param {Mark} mark */
  point(combination, index, mark) {
    const [x, y] = this.at(combination);
    /** @param {number} clientX @param {number} clientY */
    const show = (clientX, clientY) => {
      mark(combination.id);
      showTip(combination.spoken, clientX, clientY);
    };
    const leave = () => {
      mark(null);
      hideTip();
    };
    return svg(
      'g',
      {
        class: classes(combination),
        role: 'img',
        'aria-label': combination.spoken,
        tabindex: index ? -1 : 0,
        'data-tried': combination.id,
        onpointermove: (event) => show(event.clientX, event.clientY),
        onpointerleave: leave,
        onfocus: ({ currentTarget }) => {
          const box = currentTarget.getBoundingClientRect();
          if (currentTarget.matches(':focus-visible')) show(box.right, box.bottom - 12);
        },
        onblur: leave,
        onkeydown: pointKeys,
      },
      svg('circle', { class: 'reach', cx: x, cy: y, r: 9 }),
      shape(combination, x, y),
    );
  }

  /** Names of the two that matter most, where they cover no point if there is such a place. */
  named() {
    const own = this.width < NARROW_PX ? 'own' : 'own setting'; // the legend says of which
    const taken = this.timed.map((combination) => pointBox(...this.at(combination)));
    return this.timed
      .filter((combination) => combination.isOwn || combination.isBest)
      .map((combination) => {
        const text = [combination.isBest ? 'best' : '', combination.isOwn ? own : ''].filter(Boolean).join(', ');
        const width = (combination.isBest ? BOLDER : 1) * widest([text], TEXT_PX);
        const box = this.freeBox(nameBoxes(width, ...this.at(combination)), taken);
        taken.push(box);
        return svg('text', { class: `name ${combination.isBest ? 'strong' : ''}`, x: box.left, y: box.bottom - BELOW_LINE }, text);
      });
  }

  /**
   * The first that is inside of the chart and covers nothing, else the one that covers least.
   * @param {Edges[]} boxes
   * @param {Edges[]} taken
   */
  freeBox(boxes, taken) {
    const inside = boxes.filter((box) => box.left >= this.left && box.right <= this.width && box.bottom <= this.floor);
    /** @param {Edges} box */
    const covered = (box) => taken.filter((other) => overlap(box, other)).length;
    return (inside.length ? inside : boxes).reduce((best, box) => (covered(box) < covered(best) ? box : best));
  }
}

/**
 * The room of a point.
 * @param {number} x
 * @param {number} y
 * @returns {Edges}
 */
function pointBox(x, y) {
  const r = RADIUS + 2;
  return { left: x - r, right: x + r, top: y - r, bottom: y + r };
}

/**
 * Places of a name next to a point, the usual one first.
 * @param {number} width
 * @param {number} x
 * @param {number} y
 * @returns {Edges[]}
 */
function nameBoxes(width, x, y) {
  const [right, left, middle] = [x + 9, x - 9 - width, x - width / 2];
  /** @type {Point[]} */
  const starts = [
    [right, y - 7], [left, y - 7], [right, y + 4], [left, y + 4], [right, y + 15], [left, y + 15],
    [middle, y - 12], [middle, y + 19], [right, y - 20], [left, y - 20], [middle, y - 26],
  ];
  return starts.map(([start, line]) => ({ left: start, right: start + width, top: line - TEXT_PX, bottom: line + BELOW_LINE }));
}

/** @param {Edges} a @param {Edges} b */
function overlap(a, b) {
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}

/** @param {Combination} combination */
function classes({ isUsable, isFinalist, isBest, isOnFront, isOwn }) {
  return ['point', isUsable ? '' : 'too-large', isFinalist || isBest ? 'finalist' : '', isOnFront ? 'on-front' : '', isOwn ? 'own' : '']
    .filter(Boolean)
    .join(' ');
}

/**
 * A diamond for the job's own setting, a cross for what takes too much memory, else a dot.
 * @param {Combination} combination
 * @param {number} x
 * @param {number} y
 */
function shape(combination, x, y) {
  const r = RADIUS;
  if (!combination.isUsable) return svg('path', { class: 'shape', d: `M${x - r} ${y - r} L${x + r} ${y + r} M${x - r} ${y + r} L${x + r} ${y - r}` });
  if (combination.isOwn) return svg('path', { class: 'shape', d: `M${x} ${y - 1.4 * r} L${x + 1.4 * r} ${y} L${x} ${y + 1.4 * r} L${x - 1.4 * r} ${y} Z` });
  return svg('circle', { class: 'shape', cx: x, cy: y, r });
}

/**
 * Arrow keys go to the next slower or faster combination.
 * @param {KeyboardEvent & { currentTarget: SVGElement }} event
 */
function pointKeys(event) {
  const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!move) return;
  event.preventDefault();
  const all = [...(event.currentTarget.parentElement?.querySelectorAll('.point') ?? [])];
  const next = all[all.indexOf(event.currentTarget) + move];
  if (next instanceof SVGElement) next.focus();
}

/**
 * What the marks mean, of those that are there.
 * @param {SearchResult} search
 * @param {Combination[]} tried
 */
export function pointsLegend(search, tried) {
  const timed = tried.filter((combination) => combination.ms != null);
  /** @type {[isThere: boolean, name: string, text: string][]} */
  const entries = [
    [true, 'point', 'tried'],
    [search.finalists.length > 0, 'point finalist', WORDS.finalist],
    [timed.some((combination) => combination.isOwn), 'point own', WORDS.own],
    [search.front.length > 1, 'point on-front', WORDS.front],
    [timed.some((combination) => !combination.isUsable), 'point too-large', STATUS_WORDS['too large']],
  ];
  return el(
    'ul',
    { class: 'legend', 'aria-label': 'marks' },
    entries
      .filter(([isThere]) => isThere)
      .map(([, name, text]) => el('li', {}, svg('svg', { viewBox: '0 0 16 16', width: 16, height: 16, 'aria-hidden': 'true' }, svg('g', { class: name }, swatch(name))), text)),
  );
}

/** @param {string} name */
function swatch(name) {
  if (name.includes('too-large')) return svg('path', { class: 'shape', d: 'M4 4 L12 12 M4 12 L12 4' });
  if (name.includes('own')) return svg('path', { class: 'shape', d: 'M8 2 L14 8 L8 14 L2 8 Z' });
  return svg('circle', { class: 'shape', cx: 8, cy: 8, r: RADIUS });
}
