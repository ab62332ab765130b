// Long tables: only the rows that can be seen are in the page, and a few on either side. The page itself
// scrolls; empty rows above and below keep its length.

import { el } from './dom.js';

const BEYOND = 20;
/** Tables up to this long are simply drawn, so their rows may be of any height. */
export const SHORT = 120;

/**
 * Which of `count` rows of one height are in view, as [first, end).
 * @param {number} top
 * @param {number} viewHeight
 * @param {number} rowHeight
 * @param {number} count
 * @param {number} [beyond]
 * @returns {[first: number, end: number]}
 */
export function visibleRows(top, viewHeight, rowHeight, count, beyond = BEYOND) {
  const first = Math.max(0, Math.floor(-top / rowHeight) - beyond);
  const end = Math.min(count, Math.ceil((viewHeight - top) / rowHeight) + beyond);
  return first < end ? [first, end] : [0, Math.min(count, beyond)];
}

/**
 * Fills `body` (a tbody) with rows made by `rowOf(index)`; `seen(first, end)` hears what is in view.
 * @param {HTMLElement} body
 * @param {number} count
 * @param {number} rowHeight
 * @param {(index: number) => HTMLElement} rowOf
 * @param {(first: number, end: number) => void} [seen]
 */
export function virtualRows(body, count, rowHeight, rowOf, seen = () => {}) {
  if (count <= SHORT) {
    body.replaceChildren(...Array.from({ length: count }, (_, index) => rowOf(index)));
    return;
  }
  let drawn = '';
  let drawnFirst = 0;
  const draw = () => {
    if (!body.isConnected && drawn) {
      stop();
      return;
    }
    const top = body.isConnected ? body.getBoundingClientRect().top : 0;
    const [first, end] = visibleRows(top, innerHeight, rowHeight, count);
    const inView = visibleRows(top - 74, innerHeight - 74, rowHeight, count, 0);
    seen(...inView);
    if (drawn === `${first}-${end}`) return;
    const focused = [...body.children].findIndex((row) => row === document.activeElement);
    const hadFocus = body.contains(document.activeElement);
    const before = drawnFirst;
    drawn = `${first}-${end}`;
    drawnFirst = first;
    const rows = Array.from({ length: end - first }, (_, index) => rowOf(first + index));
    body.replaceChildren(
      spacer(first * rowHeight),
      ...rows,
      spacer((count - end) * rowHeight),
    );
    // Arrow keys go on from the row that they had come to, which is another element now.
    if (hadFocus) rows[before + focused - 1 - first]?.focus({ preventScroll: true }); // after the spacer
  };
  const stop = () => {
    removeEventListener('scroll', draw);
    removeEventListener('resize', draw);
  };
  addEventListener('scroll', draw, { passive: true });
  addEventListener('resize', draw, { passive: true });
  draw();
  requestAnimationFrame(draw);
}

/**
 * An empty row. It has one cell: more than a page shows would be columns of their own.
 * @param {number} height
 */
function spacer(height) {
  return el(
    'tr',
    { class: 'spacer', 'aria-hidden': 'true', style: { height: `${height}px` } },
    height ? el('td') : null,
  );
}

/**
 * Arrow keys move between rows, Enter opens.
 * @param {KeyboardEvent & { currentTarget: HTMLElement }} event
 * @param {() => void} open
 */
export function rowKeys(event, open) {
  const row = event.currentTarget;
  if (event.target !== row) return;
  if (event.key === 'Enter') open();
  if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
  event.preventDefault();
  const next = event.key === 'ArrowDown' ? 'nextElementSibling' : 'previousElementSibling';
  let other = row[next];
  while (other && !other.hasAttribute('tabindex')) other = other[next];
  if (other instanceof HTMLElement) other.focus({ preventScroll: false });
}
