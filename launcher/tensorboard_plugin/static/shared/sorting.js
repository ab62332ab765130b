// Tables that a click on a column's head sorts.

import { el } from './dom.js';

/**
 * The head of a column; a button with an arrow where the column can be sorted.
 * @param {Child} name
 * @param {string} className
 * @param {{ key: string, sorted: 'ascending' | 'descending' | null, choose: () => void } | null} order
 */
export function columnHead(name, className, order) {
  const arrows = { ascending: ' \u2191', descending: ' \u2193' };
  const arrow = order?.sorted ? arrows[order.sorted] : '';
  const content = order
    ? el('button', { type: 'button', 'data-key': order.key, onclick: order.choose }, name, arrow)
    : name;
  return el(
    'th',
    { scope: 'col', class: className, 'aria-sort': order ? (order.sorted ?? 'none') : null },
    content,
  );
}

/**
 * Orders what a column is sorted by; numbers in names count as numbers, and what is missing comes last.
 * @param {string | number | null | undefined} a
 * @param {string | number | null | undefined} b
 */
export function compare(a, b) {
  if (a == null || b == null) return Number(a == null) - Number(b == null);
  return typeof a === 'number' && typeof b === 'number'
    ? a - b
    : String(a).localeCompare(String(b), 'en', { numeric: true });
}
