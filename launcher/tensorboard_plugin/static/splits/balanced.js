// What the devices of a balanced split cost: curves, figures and what was made of them, per variant.

import { costChart } from './cost_chart.js';
import { el, hiddenTable } from '../shared/dom.js';
import { number, three } from '../shared/format.js';

export const TITLE = 'Cost per device, and the best split by these costs';
/** More of them are folded away. */
const MOST_OPEN = 8;
/** A table of more devices scrolls. */
const MOST_ROWS = 12;

/**
 * A panel for each of these variants that is split by measured costs; `null` where none is.
 * @param {Variant[]} variants
 */
export function balancedPanels(variants) {
  const panels = variants.flatMap((variant) => {
    const found = variant.result?.balanced;
    return found ? [panel(variant, found, variant.result?.split ?? [])] : [];
  });
  if (!panels.length) return null;
  const folded = panels.splice(MOST_OPEN);
  return el(
    'section',
    { class: 'costs', 'aria-label': TITLE },
    el('h2', {}, TITLE),
    panels,
    folded.length
      ? el('details', {}, el('summary', {}, `${number(folded.length)} more balanced variants`), folded)
      : null,
  );
}

/** @param {Variant} variant @param {Balanced} found @param {number[]} split */
function panel(variant, found, split) {
  return el(
    'article',
    { class: 'cost', 'data-balanced': variant.id },
    el('h3', {}, variant.label),
    el(
      'figure',
      {},
      costChart(found, split, spoken(found, split)),
      el(
        'figcaption',
        { class: 'muted' },
        'Dots: measured. Rings: samples chosen. T*: the slowest device\u2019s time in the best split.',
      ),
    ),
    el(
      'div',
      { class: 'cost-figures' },
      el(
        'div',
        found.devices.length > MOST_ROWS ? { class: 'scrolls', tabindex: 0 } : {},
        figures(found, split, variant.label),
      ),
      variant.planned.cost_sentences.map((text) => el('p', {}, text)),
      hiddenTable(
        `${variant.label}: measured points`,
        ['device', 'samples', 'ms'],
        found.devices.flatMap((device) => device.points.map(([samples, ms]) => [device.device, samples, three(ms)])),
      ),
    ),
  );
}

const HEADER = ['device', 'per step, ms', 'per sample, ms', 'curve', 'samples'];

/** @param {Balanced} found @param {number[]} split @param {string} label */
function figures(found, split, label) {
  /** @param {number} index */
  const right = (index) => (index === HEADER.length - 1 ? 'right' : null);
  return el(
    'table',
    { 'aria-label': `${label}: what each device costs` },
    el('thead', {}, el('tr', {}, HEADER.map((name, index) => el('th', { scope: 'col', class: right(index) }, name)))),
    el(
      'tbody',
      {},
      found.devices.map((device, index) =>
        el(
          'tr',
          {},
          el('th', { scope: 'row' }, device.device),
          // Where the curve isn't α + β·b, these two say nothing.
          el('td', {}, device.straight ? withInterval(device.alpha_ms, device.alpha_ci) : '\u2013'),
          el('td', {}, device.straight ? withInterval(device.beta_ms, device.beta_ci) : '\u2013'),
          el('td', {}, curveWords(device)),
          el('td', { class: 'right' }, number(split[index])),
        ),
      ),
    ),
  );
}

/**
 * A sample may take microseconds; the interval has the decimals of its estimate.
 * @param {number} ms
 * @param {Interval | null} ci
 */
function withInterval(ms, ci) {
  const size = Math.abs(ms);
  const decimals = size > 0 && size < 0.1 ? 4 : size < 1 ? 3 : 2;
  const [low, high] = (ci ?? []).map((end) => number(end, decimals));
  return [number(ms, decimals), ci ? el('span', { class: 'muted' }, ` (${low} to ${high})`) : null];
}

/** @param {DeviceCost} device */
function curveWords(device) {
  const room = device.max_samples == null ? '' : `, memory for ${number(device.max_samples)}`;
  return (device.straight ? 'straight' : 'interpolated') + room;
}

/** @param {Balanced} found @param {number[]} split */
function spoken(found, split) {
  const chosen = found.devices.map((device, index) => `${device.device} ${number(split[index])}`);
  return `Time over samples of each device. Samples chosen: ${chosen.join(', ')}. T* is ${three(found.optimum_ms)} ms.`;
}
