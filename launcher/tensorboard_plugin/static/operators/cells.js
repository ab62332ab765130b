// Cells of the table of operators.

import { el } from '../shared/dom.js';
import { number } from '../shared/format.js';

/**
 * Classes of a column's cells.
 * @param {OperatorColumn} column
 */
export function cellClass(column) {
  return [column.className, column.right ? 'right' : '', column.pad ? 'pad' : ''].filter(Boolean).join(' ');
}

/**
 * A name with the colour of its class.
 * @param {OperatorRow} row
 * @param {number} count
 */
export function nameCell(row, count) {
  const name = row.name == null ? `all beyond the first ${number(count - 1)}` : row.name;
  return el(
    'span',
    { class: `name-cell${row.name == null ? ' muted' : ''}` },
    el('span', { class: `swatch ${row.class}` }),
    el('span', {}, name),
  );
}

/**
 * A bar as long as the share, its waiting hatched, and the share.
 * @param {OperatorRow} row
 * @param {number} widest
 */
export function shareCell(row, widest) {
  /** @param {string} name @param {number} ms */
  const bar = (name, ms) =>
    ms > 0 ? el('span', { class: name, style: { width: `${(100 * ms) / widest}%` } }) : null;
  const wait = Math.min(row.wait_ms, row.self_ms);
  return el(
    'span',
    { class: 'share-cell' },
    el('span', { class: 'track' }, bar(row.class, row.self_ms - wait), bar('wait', wait)),
    el('span', { class: 'value' }, number(row.share_percent, 1)),
  );
}

/**
 * One rank's time, with a mark where much of it is waiting.
 * @param {OperatorRow} row
 * @param {number} index
 * @param {(value: number) => string} ms
 */
export function rankCell(row, index, ms) {
  const wait = row.wait_by_rank_ms?.[index] ?? 0;
  const value = ms(row.by_rank_ms[index]);
  if (wait < 0.05 * (row.by_rank_ms[index] || 1) || wait <= 0) return value;
  return el(
    'span',
    { title: `waits for ${ms(wait)} ms` },
    el('span', { class: 'swatch wait', style: { 'margin-right': '5px', 'vertical-align': '-1px' } }),
    value,
  );
}

/**
 * More in the slower colour, less in the other, with a sign.
 * @param {number | null} value
 * @param {number} decimals
 */
export function differenceText(value, decimals) {
  const text = number(value, decimals, true);
  const isNothing = !/[1-9]/.test(text);
  return el('span', { class: isNothing ? 'muted' : `strong ${(value ?? 0) > 0 ? 'slower' : 'less'}` }, text);
}

/**
 * A bar to the right for more, to the left for less.
 * @param {number | null} value
 * @param {number} most
 */
export function diverging(value, most) {
  if (!value) return el('div', { class: 'diverging', 'aria-hidden': 'true' });
  const width = (Math.abs(value) / most) * (value > 0 ? 78 : 20);
  return el(
    'div',
    { class: 'diverging', 'aria-hidden': 'true' },
    el('span', {
      class: value > 0 ? 'more' : 'fewer',
      style: value > 0 ? { left: '20%', width: `${width}%` } : { right: '80%', width: `${width}%` },
    }),
  );
}

/**
 * Decimals of a table whose step takes so long.
 * @param {number} stepMs
 */
export function decimalsFor(stepMs) {
  return stepMs >= 1000 ? 0 : stepMs >= 100 ? 1 : stepMs >= 1 ? 2 : 3;
}

/**
 * The head of the column of self times.
 * @param {OperatorsAnswer} answer
 * @returns {Child}
 */
export function selfHead({ ranks, is_straggler: isStraggler, slowest_rank: rank }) {
  if (ranks.length < 2) return 'self, ms';
  return isStraggler ? ['self,', el('br'), `rank ${rank}, ms`] : ['self, slowest', el('br'), 'rank, ms'];
}
