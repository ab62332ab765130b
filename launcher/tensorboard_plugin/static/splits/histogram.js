// Differences of hundreds of variants as a histogram, with a brush that chooses a range of them.

import { picture, svg } from '../shared/dom.js';
import { number } from '../shared/format.js';
import { SAME } from './forest.js';
import { roundStep, ticks } from '../shared/scale.js';

const HEIGHT = 58;
/** Beyond this share of the values, on the slow side, everything falls into one last bin. */
const TAIL = 0.985;

/**
 * Equal bins over the differences, in percent; the last one takes all that is slower still.
 * @param {number[]} percents
 * @param {number} [wanted]
 * @returns {Bins}
 */
export function bins(percents, wanted = 38) {
  const sorted = [...percents].sort((a, b) => a - b);
  const most = sorted[Math.floor((sorted.length - 1) * TAIL)] ?? 1;
  const low = Math.min(sorted[0] ?? 0, 0);
  const width = roundStep(Math.max(most - low, 2) / wanted);
  const first = Math.floor(low / width);
  const count = Math.max(1, Math.ceil(most / width + 1e-9) - first) + 1;
  const counts = new Array(count).fill(0);
  for (const value of sorted) counts[Math.min(count - 1, Math.floor(value / width) - first)] += 1;
  return { low: first * width, width, counts };
}

/**
 * The histogram; `brush` is [from, to] in percent or `null`; `onbrush` hears a new one.
 * @param {number[]} percents
 * @param {Brush | null} brush
 * @param {number} numSelected
 * @param {(brush: Brush | null) => void} onbrush
 */
export function histogram(percents, brush, numSelected, onbrush) {
  const data = bins(percents);
  const high = data.low + data.width * data.counts.length;
  const root = picture(
    {
      class: 'histogram',
      tabindex: 0,
      role: 'slider',
      'aria-label': 'range of differences from the baseline, in percent',
      'aria-valuemin': data.low,
      'aria-valuemax': high,
      'aria-valuenow': brush?.[1] ?? high,
      'data-key': 'histogram',
      'aria-valuetext': brush
        ? `${number(brush[0], 1, true)} to ${number(brush[1], 1, true)} %: ${numSelected} selected`
        : 'all',
    },
    (width) => parts(data, high, brush, numSelected, width),
  );
  listen(root, data, high, brush, onbrush);
  return root;
}

/**
 * @param {Bins} data
 * @param {number} high
 * @param {Brush | null} brush
 * @param {number} numSelected
 * @param {number} width
 */
function parts(data, high, brush, numSelected, width) {
  /** @param {number} value */
  const x = (value) => ((value - data.low) / (high - data.low)) * width;
  const tallest = Math.max(...data.counts);
  const bars = data.counts.flatMap((count, index) => {
    if (!count) return [];
    const from = data.low + index * data.width;
    const height = (count / tallest) * (HEIGHT - 14);
    return svg('rect', {
      class: `bin ${shade(from, data.width)}`,
      x: x(from),
      width: Math.max(1, x(from + data.width) - x(from) - 1),
      y: HEIGHT - height,
      height,
    });
  });
  const last = high - data.width;
  const step = roundStep((high - data.low) / 9);
  const labels = ticks(data.low, last - step / 2, step).map((tick) =>
    svg(
      'text',
      { x: x(tick), y: HEIGHT + 16, 'text-anchor': tick === data.low ? 'start' : 'middle' },
      number(tick, 0, true),
    ),
  );
  const end = svg(
    'text',
    { x: width, y: HEIGHT + 16, 'text-anchor': 'end' },
    `\u2265 ${number(last, 0, true)}`,
  );
  return [
    ...bars,
    svg('line', { class: 'axis', x1: 0, x2: width, y1: HEIGHT, y2: HEIGHT }),
    ...labels,
    end,
    ...brushParts(brush, numSelected, x),
  ];
}

/** @param {number} from @param {number} width */
function shade(from, width) {
  const middle = from + width / 2;
  return Math.abs(middle) <= SAME ? 'same' : middle < 0 ? 'faster' : '';
}

/** @param {Brush | null} brush @param {number} numSelected @param {(value: number) => number} x */
function brushParts(brush, numSelected, x) {
  if (!brush) return [];
  const [from, to] = brush.map(x);
  return [
    svg('rect', { class: 'brush', x: from + 0.5, y: 0.5, width: Math.max(1, to - from), height: HEIGHT }),
    svg('rect', { class: 'handle', x: to - 2, y: HEIGHT / 2 - 7, width: 5, height: 14 }),
    svg('text', { class: 'count', x: from + 9, y: 16 }, `${number(numSelected)} selected`),
  ];
}

/**
 * @param {SVGElement} root
 * @param {Bins} data
 * @param {number} high
 * @param {Brush | null} brush
 * @param {(brush: Brush | null) => void} onbrush
 */
function listen(root, data, high, brush, onbrush) {
  /** @param {PointerEvent} event */
  const value = (event) => {
    const box = root.getBoundingClientRect();
    return data.low + Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * (high - data.low);
  };
  /** @param {number} at */
  const snap = (at) => Math.round(at / data.width) * data.width;
  root.addEventListener('pointerdown', (event) => {
    root.setPointerCapture(event.pointerId);
    // Near the handle the range is stretched; elsewhere a new one begins.
    const near = brush && Math.abs(value(event) - brush[1]) < data.width * 1.5;
    const from = near ? brush[0] : snap(value(event));
    root.addEventListener(
      'pointerup',
      (end) => {
        const to = snap(value(end));
        onbrush(Math.abs(to - from) < data.width / 2 ? null : [Math.min(from, to), Math.max(from, to)]);
      },
      { once: true },
    );
  });
  root.addEventListener('keydown', (event) => {
    const move = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
    if (event.key === 'Escape') onbrush(null);
    if (!move) return;
    event.preventDefault();
    const [from, to] = brush ?? [data.low, high];
    onbrush([from, Math.max(from + data.width, snap(to + move * data.width))]);
  });
}
