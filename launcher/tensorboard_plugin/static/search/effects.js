// What each value of each key does to the time: at the best combination, and on average by the search's model.

import { el, wholeWords } from '../shared/dom.js';
import { interval, percent } from '../shared/format.js';
import { forestAxis, forestRow, forestScale } from '../splits/forest.js';

const TITLE = 'The best with one value changed';

/**
 * A row for each value; `null` while none is known.
 * @param {SearchEffect[]} effects
 * @param {string} unit
 */
export function effectsTable(effects, unit) {
  const shown = effects.filter((effect) => effect.at_best || effect.average);
  if (!shown.length) return null;
  const drawn = shown.map((effect) => difference(effect.at_best));
  const axis = forestAxis(drawn);
  const rows = shown.map(({ key, value, against, at_best, average }, index) =>
    el(
      'tr',
      { 'data-effect': `${key}=${value}` },
      el('td', {}, shown[index - 1]?.key === key ? '' : wholeWords(key)),
      el('td', {}, value),
      el('td', { class: 'muted' }, against),
      el('td', { class: 'c-forest' }, forestRow(drawn[index], axis)),
      el('td', { class: `right ${toneOf(drawn[index])}` }, at_best ? percent(at_best.percent) : 'not measured'),
      el('td', { class: 'right muted' }, interval(at_best?.ci)),
      el('td', { class: 'right' }, average ? percent(average.percent) : ''),
      el('td', { class: 'right muted roomy' }, interval(average?.ci)),
    ),
  );
  const time = unit === 'ms' ? 'step time' : 'time per sample';
  return forestTable({
    title: TITLE,
    look: 'effects',
    columns: ['key', 'value', 'against', 'forest', 'percent', 'interval', 'percent', 'interval roomy'],
    before: ['key', 'value', 'instead of'],
    time,
    after: [['%', 'right'], ['95 % interval', 'right'], ['on average, %', 'right'], ['95 % interval', 'right roomy']],
    axis,
    rows,
    note: 'Each row compares the best combination with itself after this one change: by the comparison at the end where it has both, else by short trials. Averages are over all pairs of combinations whose other common settings are equal, by a model fitted to the trials; they are not verdicts.',
  });
}

/**
 * Rows with a difference each, above their axis.
 * @param {ForestTable} table
 */
export function forestTable({ title, look, columns, before, time, after, axis, rows, note }) {
  return el(
    'section',
    { class: 'searched', 'aria-label': title },
    el('h2', {}, title),
    el(
      'table',
      { class: `grid dense ${look}`, 'aria-label': title },
      el('colgroup', {}, columns.map((name) => el('col', { class: `c-${name}` }))),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          before.map((name) => el('th', { scope: 'col' }, name)),
          el('th', { scope: 'col', class: 'c-forest' }, `${time}, %`),
          after.map(([name, side]) => el('th', { scope: 'col', class: side }, name)),
        ),
      ),
      el(
        'tbody',
        {},
        rows,
        el(
          'tr',
          { class: 'axis-row plain' },
          el('td', { colspan: before.length }),
          el('td', {}, forestScale(axis)),
          el('td', { colspan: after.length }),
        ),
      ),
    ),
    el('p', { class: 'sub' }, note),
  );
}

/** @param {TimeChange | null} change @returns {DrawnDifference | null} */
function difference(change) {
  if (!change) return null;
  const { percent: value, ci } = change;
  const verdict = ci && ci[0] > 0 ? 'slower' : ci && ci[1] < 0 ? 'faster' : 'inconclusive';
  return { percent: value, ci, verdict };
}

/** @param {DrawnDifference | null} drawn */
function toneOf(drawn) {
  return drawn === null || drawn.verdict === 'inconclusive' ? 'muted' : drawn.verdict;
}
