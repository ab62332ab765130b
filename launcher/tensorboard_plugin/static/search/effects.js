// What each value of each key does to the time, with the intervals of the search's model.

import { el, wholeWords } from '../shared/dom.js';
import { interval, percent } from '../shared/format.js';
import { forestAxis, forestRow, forestScale } from '../splits/forest.js';

const TITLE = 'What each value does to the time';

/**
 * A row for each value; `null` while none is known.
 * @param {SearchEffect[]} effects
 * @param {string} unit
 */
export function effectsTable(effects, unit) {
  if (!effects.length) return null;
  const drawn = effects.map(difference);
  const axis = forestAxis(drawn);
  const rows = effects.map((effect, index) =>
    el(
      'tr',
      { 'data-effect': `${effect.key}=${effect.value}` },
      el('td', {}, effects[index - 1]?.key === effect.key ? '' : wholeWords(effect.key)),
      el('td', {}, effect.value),
      el('td', { class: 'muted' }, effect.against),
      el('td', { class: 'c-forest' }, forestRow(drawn[index], axis)),
      el('td', { class: `right ${toneOf(drawn[index])}` }, percent(effect.percent)),
      el('td', { class: 'right muted' }, interval(effect.ci)),
    ),
  );
  return el(
    'section',
    { class: 'searched', 'aria-label': TITLE },
    el('h2', {}, TITLE),
    el(
      'table',
      { class: 'grid dense effects', 'aria-label': TITLE },
      el('colgroup', {}, ['key', 'value', 'against', 'forest', 'percent', 'interval'].map((name) => el('col', { class: `c-${name}` }))),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          ['key', 'value', 'instead of'].map((name) => el('th', { scope: 'col' }, name)),
          el('th', { scope: 'col', class: 'c-forest' }, `${unit === 'ms' ? 'step time' : 'time per sample'}, %`),
          ['%', '95 % interval'].map((name) => el('th', { scope: 'col', class: 'right' }, name)),
        ),
      ),
      el(
        'tbody',
        {},
        rows,
        el('tr', { class: 'axis-row plain' }, el('td', { colspan: 3 }), el('td', {}, forestScale(axis)), el('td', { colspan: 2 })),
      ),
    ),
    el(
      'p',
      { class: 'sub' },
      'Means over all pairs of combinations whose other common settings are equal. Means and intervals are predicted by a model fitted to short trials; they are not verdicts.',
    ),
  );
}

/** @param {SearchEffect} effect @returns {DrawnDifference} */
function difference({ percent: value, ci }) {
  const verdict = ci[0] > 0 ? 'slower' : ci[1] < 0 ? 'faster' : 'inconclusive';
  return { percent: value, ci, verdict };
}

/** @param {DrawnDifference} one */
function toneOf({ verdict }) {
  return verdict === 'inconclusive' ? 'muted' : verdict;
}
