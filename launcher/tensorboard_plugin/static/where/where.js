// Where time goes: one stacked bar per rank on one scale, a sentence next to it, every step as a dot.

import { filters, headline } from '../shared/controls.js';
import { el, hiddenTable, onWidth, replace, widest } from '../shared/dom.js';
import { columnDecimals, halfWidth, number, plural, three } from '../shared/format.js';
import { drawHeat, hasWaits, isCrowded, MANY_RANKS, rowsAre } from './heat.js';
import { passes } from '../model.js';
import { legend, partName, shownPhases, spoken, timedParts, tracedParts, whatBarsAre } from '../shared/phases.js';
import { fromZero } from '../shared/scale.js';
import { brokenState, indexingState, noTracesState, nothingTraced, problemNotes, untracedState } from '../shared/states.js';
import { fillStrips, tracedSteps } from './strip.js';
import { tipped } from '../shared/tip.js';

/** Variants that are drawn until all are asked for. */
const FIRST = 12;
/** From one bar's top to the next. */
const BAR_PX = 25;

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showWhere(host, app) {
  if (app.run.isTraces) return showTraces(host, app);
  const { run, state } = app;
  if (run.ranked.length && !run.ranked.some(hasBars)) return nothingTraced(host, run);
  const all = run.ranked.filter((variant) => passes(variant, (name) => state.list(name)));
  const crowded = [all.find((variant) => variant.id === state.get('variant')), all[0]].find(isCrowded);
  const shown = crowded ? [crowded] : chosenFirst(all, state.get('variant'), state.get('all') ? all.length : FIRST);
  const leader = all[0] ?? null;
  const grid = el('div', { class: 'where' });
  const many = crowded && hasWaits(crowded) ? crowded : null;
  replace(
    host,
    leader
      ? headline(leader.planned.step_sentence ?? '', many ? run.answer.bars.ranks : whatBarsAre(all.filter(hasBars), run.answer.bars))
      : headline((run.results.size && !all.length && !run.ranked.length && run.answer.headline) || 'No variant has figures yet.', null),
    problemNotes([], shown.map((variant) => variant.planned.far_note).filter((note) => note != null)),
    el(
      'div',
      { class: 'controls' },
      filters(run, state),
      counted(all.length, run.ranked.length),
      many || !shown.some(hasBars) ? null : legend(shownPhases(shown.flatMap((variant) => blockOf(variant).ranks))),
    ),
    grid,
    more(all, shown, state),
  );
  if (many) await drawRanks(grid, app, many);
  else drawBlocks(grid, app, shown);
  return {};
}

/** @param {number} chosen @param {number} total */
function counted(chosen, total) {
  return chosen === total
    ? null
    : el('span', { class: 'muted' }, `${number(chosen)} of ${plural(total, 'variant')} chosen`);
}

/** @param {Variant[]} all @param {Variant[]} shown @param {State} state */
function more(all, shown, state) {
  if (shown.length >= all.length || shown.some(isCrowded)) return null;
  return el(
    'p',
    {},
    el(
      'button',
      { class: 'button', type: 'button', onclick: () => state.go({ all: '1' }) },
      `Show all ${number(all.length)} variants`,
    ),
  );
}

/** @param {Variant[]} all @param {string | null} id @param {number} most */
function chosenFirst(all, id, most) {
  const shown = all.slice(0, most);
  const chosen = all.find((variant) => variant.id === id);
  return chosen && !shown.includes(chosen) ? [chosen, ...shown] : shown;
}

/**
 * Bars, sentences and dots of these variants.
 * @param {HTMLElement} grid
 * @param {OpenApp} app
 * @param {Variant[]} variants
 */
function drawBlocks(grid, app, variants) {
  const blocks = variants.filter(hasBars).map(blockOf);
  if (!blocks.length) return;
  drawGrid(grid, app, blocks);
  app
    .steps(blocks.map((block) => block.id))
    .then((steps) => fillStrips(grid, app, blocks, steps))
    .catch(() => {});
}

/** @param {Variant} variant */
function hasBars(variant) {
  return blockOf(variant).ranks.length > 0;
}

/** @param {Variant} variant @returns {Bars} */
function blockOf(variant) {
  const ranks = variant.ranks.flatMap((rank) => {
    const parts = tracedParts(rank) ?? timedParts(variant, rank);
    return parts ? [{ rank: rank.rank, who: who(variant, rank), parts }] : [];
  });
  // One process with several devices has one trace, and one bar for all of them.
  if (ranks.length === 1 && variant.ranks.length > 1)
    ranks[0].who = withBatch(
      variant.ranks.map((rank) => rank.device).join(', '),
      variant.ranks.map((rank) => rank.local_batch),
    );
  const half = halfWidth(variant.stepMs, variant.result?.step_ms?.ci);
  const timed = variant.stepMs == null ? null : `${three(variant.stepMs)} ms a step as timed.`;
  return {
    id: variant.id,
    label: variant.label,
    said: [timed, variant.planned.explanation].filter(Boolean).join(' '),
    ranks,
    stepMs: variant.stepMs,
    isTraced: variant.ranks.some((rank) => rank.span_ms),
    half,
    canOpen: variant.hasTraces,
  };
}

/** @param {Variant} variant @param {RankFigures} rank */
function who(variant, rank) {
  const device = variant.planned.process_per_device ? `rank ${rank.rank} \u00b7 ${rank.device}` : rank.device;
  return withBatch(device, [rank.local_batch]);
}

/**
 * `cuda:0 · 34`; a program's batches are not known.
 * @param {string} device
 * @param {(number | null)[]} batches
 */
function withBatch(device, batches) {
  const known = batches.filter((batch) => batch != null);
  return known.length ? `${device} \u00b7 ${known.map((batch) => number(batch)).join('/')}` : device;
}

/** @param {HTMLElement} grid @param {OpenApp} app @param {Bars[]} blocks */
function drawGrid(grid, app, blocks) {
  const longest = Math.max(0, ...blocks.flatMap((block) => [endMs(block), ...block.ranks.map(sumOf)]));
  const { scale, step } = fromZero(longest, 9);
  const decimals = columnDecimals(
    blocks.map((block) => block.half),
    blocks.map((block) => block.stepMs ?? longest),
  );
  const context = {
    app,
    scale,
    step,
    decimals: Math.max(decimals, longest < 10 ? 2 : longest < 200 ? 1 : 0),
  };
  replace(
    grid,
    el('div', { class: 'head' }, whoName(app, blocks)),
    el('div', { class: 'head' }, `${barsName(blocks)} by rank, ms`),
    el('div', { class: 'head strip-head' }, 'every step, ms'),
    blocks.map((block) => blockRows(block, context)),
    el('div', { class: 'axis-name' }, blocks.some((block) => block.isWhole) ? 'ms of the trace' : 'ms of the step'),
    axis(scale, step),
    el('div', { class: 'axis strip-axis strip-scale' }),
  );
  onWidth(grid, () => fitValues(grid));
}

/** @param {OpenApp} app @param {Bars[]} blocks */
function whoName(app, [{ said }]) {
  if (!app.run.isTraces) return 'rank \u00b7 device \u00b7 batch';
  return said ? 'rank' : 'rank \u00b7 device';
}

/** @param {Bars[]} blocks */
function barsName(blocks) {
  if (blocks[0]?.isWhole) return 'whole trace';
  const isTraced = blocks.map((block) => block.isTraced);
  if (!isTraced.includes(false)) return 'mean traced step';
  return isTraced.includes(true) ? 'step' : 'timed step';
}

/** @param {RankBar} rank */
function sumOf(rank) {
  return rank.parts.reduce((sum, part) => sum + part.ms, 0);
}

/** @param {Bars} block @param {BarContext} context */
function blockRows(block, context) {
  const { app, scale, decimals } = context;
  const chosen = app.state.get('variant') === block.id;
  const open = () => app.state.go({ tab: 'timeline', variant: block.id, rank: null, from: null, to: null });
  const lines = scale
    .ticks(context.step)
    .map((tick) => el('span', { class: 'gridline', style: { left: scale.at(tick) } }));
  const bars = block.ranks.map((rank) => bar(block, rank, context));
  return el(
    'section',
    { class: `block${chosen ? ' chosen' : ''}`, 'data-variant': block.id, 'aria-label': block.label },
    el(
      'div',
      { class: 'caption' },
      el(
        'div',
        { class: 'title' },
        block.canOpen
          ? el(
              'button',
              { type: 'button', title: 'open its timeline', 'data-key': `open:${block.id}`, onclick: open },
              block.label,
            )
          : block.label,
      ),
      el('div', { class: 'said' }, block.said),
    ),
    el(
      'div',
      { class: 'whos' },
      block.ranks.map((rank) => el('div', { class: 'who', title: rank.who }, rank.who)),
    ),
    el(
      'div',
      { class: 'bars' },
      lines,
      bars,
      totals(block, scale, decimals),
    ),
    el('div', { class: 'strip-name strip-scale' }, 'every step, ms'),
    el('div', { class: 'strip', 'data-strip': block.id }),
    hiddenTable(
      `${block.label}: parts of the step, ms`,
      ['rank', ...block.ranks[0].parts.map((part) => partName(part.name))],
      block.ranks.map((rank) => [rank.who, ...rank.parts.map((part) => number(part.ms, decimals))]),
    ),
  );
}

/**
 * Where the total of a variant without traces is: behind its step, which all its bars make up.
 * @param {Bars} block
 */
function endMs(block) {
  return block.isTraced ? 0 : (block.stepMs ?? 0);
}

/**
 * The step's length: of each rank as it was traced, or once as it was timed.
 * @param {Bars} block
 * @param {Scale} scale
 * @param {number} decimals
 */
function totals(block, scale, decimals) {
  const { ranks } = block;
  /** @param {number} at @param {number} ms @param {Style} style */
  const total = (at, ms, style) =>
    el('span', { class: 'total', style: { left: scale.at(at), ...style } }, number(ms, decimals));
  const timed = endMs(block);
  if (timed) return total(Math.max(timed, ...ranks.map(sumOf)), timed, {});
  return ranks.map((rank, index) =>
    total(sumOf(rank), sumOf(rank), { top: `${3 + index * BAR_PX}px`, bottom: 'auto', height: '22px' }),
  );
}

/** @param {Bars} block @param {RankBar} rank @param {BarContext} context */
function bar(block, rank, { app, scale, decimals }) {
  const total = sumOf(rank);
  const open = () =>
    block.canOpen &&
    app.state.go({ tab: 'timeline', variant: block.id, rank: String(rank.rank), from: null, to: null });
  return el(
    'div',
    { class: 'bar tall', role: 'group', 'aria-label': `${rank.who}: ${spoken(rank.parts, decimals)}` },
    rank.parts
      .filter((part) => part.ms > 0)
      .map((part) =>
        el('span', {
          class: part.name,
          style: { width: scale.at(part.ms) },
          'data-value': number(part.ms, decimals),
          tabindex: 0,
          role: 'button',
          'aria-label': `${partName(part.name)} ${number(part.ms, decimals)} ms`,
          onclick: open,
          onkeydown: (event) => event.key === 'Enter' && open(),
          ...tipped(
            `${partName(part.name)}: ${number(part.ms, decimals)} ms, ${number((100 * part.ms) / total, 1)} % of the ${block.isWhole ? 'trace' : 'step'}\n${app.run.answer.bars.meanings[part.name]}`,
          ),
        }),
      ),
  );
}

/**
 * Prints each value whose segment has room for it, with 2 px to spare on either side.
 * @param {HTMLElement} root
 */
export function fitValues(root) {
  const segments = [...root.querySelectorAll('[data-value]')];
  const widths = segments.map((segment) => segment.getBoundingClientRect().width);
  segments.forEach((segment, index) => {
    const text = segment.getAttribute('data-value') ?? '';
    const plate = segment.classList.contains('wait') ? 8 : 0;
    const fits = widest([text], 12) + 4 + plate <= widths[index];
    segment.replaceChildren(...(fits ? [el('i', {}, text)] : []));
  });
}

/** @param {Scale} scale @param {number} step */
function axis(scale, step) {
  const decimals = step < 1 ? Math.ceil(-Math.log10(step)) : 0;
  return el(
    'div',
    { class: 'axis', 'aria-hidden': 'true' },
    scale.ticks(step).map((tick) => el('span', { style: { left: scale.at(tick) } }, number(tick, decimals))),
  );
}

/**
 * A variant of many ranks: a row per rank, steps across, sorted by wait.
 * @param {HTMLElement} grid
 * @param {OpenApp} app
 * @param {Variant} variant
 */
async function drawRanks(grid, app, variant) {
  grid.className = '';
  const answer = variant.hasTraces
    ? await app.breakdown(variant.id, (part) => indexingState(grid, variant.label, part))
    : null;
  if (answer === undefined) return;
  if (answer?.state === 'broken') {
    brokenState(grid, variant.label, answer.problems, app.retry());
    return;
  }
  const said = drawHeat(grid, app, variant, answer?.state === 'ready' ? answer.ranks : null);
  const title = grid.parentElement?.querySelector('h1');
  if (said && title) title.textContent = `${variant.label}: ${said}`;
}

/**
 * A directory of traces that gpurun did not record: the same bars, from the traces alone.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
async function showTraces(host, app) {
  const [variant] = app.run.variants;
  if (!variant?.hasTraces) return untracedState(host, null);
  const answer = await app.breakdown(variant.id, (part) => indexingState(host, app.run.answer.title, part));
  if (answer === undefined) return undefined;
  if (answer.state !== 'ready') return noTracesState(host, app.run.answer.title, answer, app.retry());
  const ranks = answer.ranks.filter((rank) => rank.typical?.span_ms);
  // A device that all ranks have is named once: narrow pages have no room for it at each bar.
  const devices = new Set(ranks.map((rank) => rank.device));
  const bars = ranks.flatMap((rank) => {
    const parts = tracedParts(rank.typical);
    return parts ? [{ rank: rank.rank, who: devices.size > 1 ? `rank ${rank.rank} \u00b7 ${rank.device}` : `rank ${rank.rank}`, parts }] : [];
  });
  const block = {
    id: variant.id,
    label: app.run.answer.title,
    said: devices.size > 1 ? '' : [...devices].join(''),
    stepMs: null,
    isTraced: true,
    half: null,
    canOpen: true,
    isWhole: !answer.has_steps,
    ranks: bars,
  };
  const grid = el('div', { class: 'where' });
  replace(
    host,
    headline(
      answer.sentence,
      [
        ...answer.parallelism,
        ranks.length < MANY_RANKS ? `Each bar is ${answer.has_steps ? 'the mean of all traced steps' : 'the whole trace'} of a rank.` : rowsAre(answer.has_steps),
        app.run.answer.bars.hidden,
      ].join(' '),
    ),
    problemNotes(answer.problems, answer.warnings),
    ranks.length >= MANY_RANKS ? null : el('div', { class: 'controls' }, legend(shownPhases(bars))),
    grid,
  );
  if (!block.ranks.length) return undefined;
  if (ranks.length >= MANY_RANKS) {
    grid.className = '';
    drawHeat(grid, app, variant, answer.ranks);
    return undefined;
  }
  drawGrid(grid, app, [block]);
  fillStrips(grid, app, [block], { [variant.id]: tracedSteps(ranks) });
  return undefined;
}
