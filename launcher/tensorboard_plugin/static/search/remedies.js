// What `gpurun improve` has found: the answer, each remedy with its verdict, and the change.

import { headline } from '../shared/controls.js';
import { el, replace, wholeWords } from '../shared/dom.js';
import { interval, percent } from '../shared/format.js';
import { forestAxis, forestRow } from '../splits/forest.js';
import { forestTable } from './effects.js';

const TITLE = 'Remedies';

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {Improvement} found
 */
export function showRemedies(host, { headline: answer, details, remedies, diff, notes }) {
  replace(
    host,
    headline(answer, null),
    details.map(([label, text]) => el('p', { class: 'sub' }, `${label}: ${text}`)),
    remedies.length ? remediesTable(remedies) : null,
    diff ? el('section', { class: 'searched' }, el('h2', {}, 'The change'), el('pre', { class: 'diff' }, diff)) : null,
    notes.map((note) => el('p', { class: 'sub' }, note)),
  );
  return {};
}

/** @param {RemedyResult[]} remedies */
function remediesTable(remedies) {
  const drawn = remedies.map(difference);
  const axis = forestAxis(drawn);
  const rows = remedies.map(({ code, verdict, percent: value, ci, place, why }, index) =>
    el(
      'tr',
      { 'data-remedy': code },
      el('td', {}, wholeWords(code)),
      el('td', { class: 'c-forest' }, forestRow(drawn[index], axis)),
      el('td', { class: 'right' }, value == null || !ci ? '' : percent(value)),
      el('td', { class: 'right muted' }, interval(ci)),
      el('td', { class: verdict === 'kept' ? 'faster' : 'muted' }, verdict),
      el('td', { class: 'roomy' }, wholeWords(place)),
      el('td', { class: 'muted roomy' }, why),
    ),
  );
  return forestTable({
    title: TITLE,
    look: 'effects remedies',
    columns: ['code', 'forest', 'percent', 'interval', 'verdict', 'place roomy', 'why roomy'],
    before: ['remedy'],
    time: 'step time',
    after: [['%', 'right'], ['95 % interval', 'right'], ['verdict', ''], ['place', 'roomy'], ['', 'roomy']],
    axis,
    rows,
    note: 'What is kept is compared with the same set without it, on launches that took part in no choice.',
  });
}

/** @param {RemedyResult} remedy @returns {DrawnDifference | null} */
function difference({ verdict, percent: value, ci }) {
  if (value == null || !ci) return null; // of trials, of which nothing is claimed
  return { percent: value, ci, verdict: verdict === 'kept' ? 'faster' : verdict === 'slower' ? 'slower' : 'inconclusive' };
}
