// Many ranks: a thin row per rank, steps across, the shade is the exposed wait. The rank that the others
// wait for is outlined and named.

import { el, onWidth, prepare, replace } from '../shared/dom.js';
import { number, plural, three, tickDecimals } from '../shared/format.js';
import { fromZero, last, roundStep } from '../shared/scale.js';
import { palette } from '../shared/theme.js';
import { hideTip, showTip } from '../shared/tip.js';

/** From this many ranks on, a thin row per rank. */
export const MANY_RANKS = 9;
const SHADES = 5;
const ROW_PX = 7;
const GAP_PX = 0.8;
const PER_SHADE = [1, 2, 4, 6];
/** Waits that begin above this share of the longest ones are shaded from there on. */
const NARROW = 0.4;

/**
 * Bounds between the five shades, in ms: round, from nothing on, or within the waits where all are alike.
 * @param {number[]} waits
 */
export function shadeBounds(waits) {
  const sorted = [...waits].sort((a, b) => a - b);
  /** @param {number} share */
  const at = (share) => sorted[Math.floor((sorted.length - 1) * share)];
  const high = at(0.95) || 1;
  const low = at(0.15); // beyond the one or two that the others wait for
  if (!(low > NARROW * high && high > low)) return PER_SHADE.map((factor) => factor * roundStep(high / 8));
  const unit = roundStep((high - low) / SHADES);
  const first = Math.ceil(low / unit);
  return PER_SHADE.map((_, index) => (first + index) * unit);
}

/** @param {Variant | undefined} variant */
export function isCrowded(variant) {
  return (variant?.ranks.length ?? 0) >= MANY_RANKS;
}

/**
 * Whether it is known how long each rank waits, which only traces show.
 * @param {Variant} variant
 */
export function hasWaits(variant) {
  return variant.hasTraces || variant.ranks.some((rank) => rank.exposed_wait_ms != null);
}

/**
 * Ranks sorted by mean wait, most first, each with its waits by step: `NaN` for a step that its trace lacks.
 * @param {Variant} variant
 * @param {RankBreakdown[] | null} traced
 * @returns {RankWaits[]}
 */
export function ranksByWait(variant, traced) {
  /** @param {RankBreakdown} rank */
  const deviceOf = (rank) => variant.ranks.find((each) => each.rank === rank.rank)?.device ?? rank.device;
  const all = (traced ?? []).flatMap((rank) => rank.steps.map((step) => step.step));
  const steps = [...new Set(all)].sort((a, b) => a - b);
  const typical = (traced ?? []).flatMap((rank) => {
    if (!rank.typical) return [];
    const waits = new Map(rank.steps.map((step) => [step.step, step.exposed_wait_ms]));
    return {
      rank: rank.rank,
      device: deviceOf(rank),
      // Without step markers the whole trace is one cell.
      waits: waits.size ? steps.map((step) => waits.get(step) ?? NaN) : [rank.typical.exposed_wait_ms],
      steps: waits.size ? steps : [],
      mean: rank.typical.exposed_wait_ms,
    };
  });
  const rows = typical.length
    ? typical
    : variant.ranks.map((rank) => ({
        rank: rank.rank,
        device: rank.device,
        waits: [rank.exposed_wait_ms ?? 0],
        steps: [],
        mean: rank.exposed_wait_ms ?? 0,
      }));
  return rows.sort((a, b) => b.mean - a.mean || a.rank - b.rank);
}

/**
 * Draws the strip of a variant; `traced` are the ranks of its breakdown, or `null`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 * @param {Variant} variant
 * @param {RankBreakdown[] | null} traced
 */
export function drawHeat(host, app, variant, traced) {
  const rows = ranksByWait(variant, traced);
  if (!rows.length) {
    replace(host, el('p', { class: 'muted' }, 'No figures by rank.'));
    return null;
  }
  const bounds = shadeBounds(rows.flatMap((row) => row.waits.filter((wait) => !Number.isNaN(wait))));
  const slowest = last(rows);
  const { scale, step } = fromZero(Math.max(...rows.map((row) => row.mean), 0.001), 3);
  const height = rows.length * ROW_PX;
  const canvas = el('canvas', {
    height,
    style: { height: `${height}px` },
    role: 'img',
    'aria-label': `${variant.label}: exposed wait of ${plural(rows.length, 'rank')}${hasSteps(rows) ? ' by step' : ''}; ${waitSentence(rows)}`,
  });
  const means = el('canvas', { height, style: { height: `${height}px` }, 'aria-hidden': 'true' });
  replace(
    host,
    el('div', { class: 'controls' }, el('span', { class: 'muted' }, variant.label), shadeLegend(bounds)),
    el(
      'div',
      { class: 'heat' },
      el('div', { class: 'names' }, nameMarks(rows)),
      canvas,
      el(
        'div',
        { class: 'mean' },
        means,
        el(
          'span',
          { style: { top: `${height - ROW_PX / 2}px` } },
          `${three(slowest.mean)} \u00b7 all wait for it`,
        ),
      ),
      el('span'),
      el('div', { class: 'where step-axis' }, stepAxis(rows)),
      el(
        'div',
        { class: 'where mean-axis' },
        el(
          'div',
          { class: 'axis' },
          scale
            .ticks(step)
            .map((tick) => el('span', { style: { left: scale.at(tick) } }, number(tick, step < 1 ? 2 : 0))),
        ),
      ),
    ),
  );
  onWidth(canvas, () => paintCells(canvas, rows, bounds));
  onWidth(means, () => paintMeans(means, rows, scale));
  listen(canvas, app, variant, rows);
  return waitSentence(rows);
}

/**
 * `63 ranks wait for rank 37 (cuda:5).`
 * @param {RankWaits[]} rows
 */
export function waitSentence(rows) {
  const slowest = last(rows);
  const waiting = rows.filter((row) => row !== slowest && row.mean > slowest.mean).length;
  const middle = rows[rows.length >> 1].mean;
  return `${plural(waiting, 'rank')} wait${waiting === 1 ? 's' : ''} for rank ${slowest.rank} (${slowest.device}), ${three(middle)} ms of ${hasSteps(rows) ? 'a typical step' : 'the whole trace'}.`;
}

/**
 * How ranks of anyone's traces are drawn.
 * @param {boolean} bySteps
 */
export function rowsAre(bySteps) {
  return bySteps
    ? 'Each row is the exposed wait of a rank by step, most first; right: its mean, ms.'
    : 'Each row is the exposed wait of a rank in the whole trace, most first; right: the same in ms.';
}

/** @param {RankWaits[]} rows */
function hasSteps(rows) {
  return rows.some((row) => row.steps.length > 0);
}

/** @param {number[]} bounds */
function shadeLegend(bounds) {
  const texts = [
    `under ${number(bounds[0], digits(bounds))}`,
    ...bounds
      .slice(1)
      .map((bound, index) => `${number(bounds[index], digits(bounds))} to ${number(bound, digits(bounds))}`),
    `over ${number(last(bounds), digits(bounds))}`,
  ];
  return el(
    'ul',
    { class: 'legend' },
    el('li', {}, 'wait, ms'),
    texts.map((text, index) =>
      el('li', {}, el('span', { class: 'swatch', style: { background: `var(--heat-${index})` } }), text),
    ),
  );
}

/** @param {number[]} bounds */
function digits(bounds) {
  return Math.min(4, tickDecimals(bounds[1] - bounds[0]));
}

/** @param {RankWaits[]} rows */
function nameMarks(rows) {
  const every = Math.max(1, Math.round(110 / ROW_PX));
  return rows.map((row, index) => {
    const isLast = index === rows.length - 1;
    if (!isLast && (index % every || rows.length - 1 - index < 3)) return null;
    return el(
      'span',
      { class: isLast ? 'last' : '', style: { top: `${(index + 0.5) * ROW_PX}px` } },
      `rank ${row.rank}`,
    );
  });
}

/** @param {RankWaits[]} rows */
function stepAxis(rows) {
  const longest = rows.reduce((a, b) => (b.waits.length > a.waits.length ? b : a));
  const steps = longest.waits.length;
  const every = roundStep(steps / 8) < 1 ? 1 : roundStep(steps / 8);
  const ticks = Array.from({ length: Math.ceil(steps / every) }, (_, index) => index * every);
  return el(
    'div',
    { class: 'axis' },
    ticks.map((tick) =>
      el(
        'span',
        { style: { left: `${(100 * (tick + 0.5)) / steps}%` } },
        longest.steps.length ? `step ${number(longest.steps[tick])}` : 'whole trace',
      ),
    ),
  );
}

/** @param {HTMLCanvasElement} canvas @param {RankWaits[]} rows @param {number[]} bounds */
function paintCells(canvas, rows, bounds) {
  const { context, width } = prepare(canvas);
  const colours = palette();
  rows.forEach((row, index) => {
    const cell = width / row.waits.length;
    row.waits.forEach((wait, step) => {
      if (Number.isNaN(wait)) return;
      const shade = bounds.filter((bound) => wait >= bound).length;
      context.fillStyle = colours[`heat-${Math.min(SHADES - 1, shade)}`];
      context.fillRect(step * cell, index * ROW_PX, cell + 0.3, ROW_PX - GAP_PX);
    });
  });
  context.strokeStyle = colours.text;
  context.lineWidth = 1.5;
  context.strokeRect(0.75, (rows.length - 1) * ROW_PX - 0.2, width - 1.5, ROW_PX - 0.8);
}

/** @param {HTMLCanvasElement} canvas @param {RankWaits[]} rows @param {Scale} scale */
function paintMeans(canvas, rows, scale) {
  const { context, width } = prepare(canvas);
  context.fillStyle = palette().wait;
  rows.forEach((row, index) =>
    context.fillRect(0, index * ROW_PX, scale.share(row.mean) * width, ROW_PX - GAP_PX),
  );
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {OpenApp} app
 * @param {Variant} variant
 * @param {RankWaits[]} rows
 */
function listen(canvas, app, variant, rows) {
  /** @param {MouseEvent} event */
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = rows[Math.min(rows.length - 1, Math.floor((event.clientY - box.top) / ROW_PX))];
    return { row, step: Math.floor(((event.clientX - box.left) / box.width) * row.waits.length) };
  };
  canvas.addEventListener('pointermove', (event) => {
    const { row, step } = at(event);
    const wait = row.waits[step];
    showTip(
      `rank ${row.rank} (${row.device}), ${row.steps.length ? `step ${row.steps[step]}` : 'whole trace'}: ${Number.isNaN(wait) ? 'not in its trace' : `waits ${three(wait)} ms`}`,
      event.clientX,
      event.clientY,
    );
  });
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('click', (event) => {
    const slowest = last(rows).rank;
    app.state.go({
      tab: 'timeline',
      variant: variant.id,
      rank: [...new Set([at(event).row.rank, slowest])].join('~'),
      from: null,
      to: null,
    });
  });
}
