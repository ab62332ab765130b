// Search: what `gpurun tune` has tried, what each value does to the time, and what was left out; or what
// `gpurun improve` has.

import { headline } from '../shared/controls.js';
import { el, replace, wholeWords } from '../shared/dom.js';
import { memoryText, number, plural, three } from '../shared/format.js';
import { problemNotes } from '../shared/states.js';
import { tipped } from '../shared/tip.js';
import { rowKeys, SHORT, virtualRows } from '../shared/virtual.js';
import { STATUS_WORDS } from '../splits/words.js';
import { effectsTable } from './effects.js';
import { pointsChart, pointsLegend, WORDS } from './points.js';
import { showRemedies } from './remedies.js';

const ROW_PX = 22;
const TRIED = 'Combinations that were tried, fastest first';

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export function showSearch(host, app) {
  const search = app.run.comparison?.search;
  if (!search) return app.run.answer.improvement ? showRemedies(host, app.run.answer.improvement) : noSearch(host);
  const { answer } = app.run;
  const tried = search.combinations.map((combination) => new Combination(combination, search)).sort((a, b) => a.order - b.order);
  const failed = tried.filter((combination) => combination.ms == null);
  const mark = marker(host);
  replace(
    host,
    problemNotes([], answer.alerts),
    search.is_over ? headline(answer.headline ?? search.summary, search.summary) : headline(search.summary, null),
    tried.length > failed.length
      ? [el('div', { class: 'controls' }, pointsLegend(search, tried)), pointsChart(search, tried, mark)]
      : null,
    failedMarks(failed, mark),
    effectsTable(search.effects, unitOf(tried)),
    tried.length ? triedTable(tried, app, mark) : null,
    leftOut(search),
  );
  return {};
}

/** @param {HTMLElement} host */
function noSearch(host) {
  replace(
    host,
    el(
      'div',
      { class: 'state', 'data-state': 'none' },
      headline('This run is not a search.', 'A search tries all combinations of what a job lists under `compare`.'),
      el('pre', {}, 'gpurun tune job.yaml'),
    ),
  );
  return {};
}

/** A combination that was tried, as the chart and the table show it. */
export class Combination {
  /** @param {TriedCombination} tried @param {SearchResult} search */
  constructor(tried, search) {
    this.tried = tried;
    this.id = tried.variant;
    this.ms = tried.ms_per_sample ?? tried.step_ms;
    this.isOwn = tried.variant === search.own;
    this.isBest = tried.variant === search.best;
    this.isFinalist = search.finalists.includes(tried.variant);
    this.isOnFront = search.front.includes(tried.variant);
    this.isUsable = tried.status === 'ok';
  }

  /** Usable ones by their time, then the others. */
  get order() {
    return (this.isUsable ? 0 : 1e12) + (this.ms ?? 1e12);
  }

  get words() {
    const { status, reason } = this.tried;
    return [
      this.isUsable ? null : [STATUS_WORDS[status], reason].filter(Boolean).join(': '),
      this.isOwn ? WORDS.own : null,
      this.isBest ? 'the best' : null,
      this.isFinalist && !this.isBest ? WORDS.finalist : null,
      this.isOnFront ? WORDS.front : null,
    ].filter((text) => text != null);
  }

  get spoken() {
    const { tried } = this;
    const time = this.ms == null ? null : `${three(this.ms)} ${unitOf([this])} by ${plural(tried.trials, 'trial')}`;
    const memory = tried.peak_gib == null ? null : `${memoryText(tried.peak_gib)} at the peak`;
    return [tried.label, time, memory, ...this.words].filter(Boolean).join('\n');
  }
}

/** @param {Combination[]} tried */
function unitOf(tried) {
  return tried.some((combination) => combination.tried.ms_per_sample != null) ? 'ms per sample' : 'ms';
}

/**
 * Marks one combination wherever it is drawn; `null` none.
 * @param {HTMLElement} host
 * @returns {Mark}
 */
function marker(host) {
  return (id) => {
    for (const element of host.querySelectorAll('[data-tried]')) element.classList.toggle('on', element.getAttribute('data-tried') === id);
  };
}

/**
 * Those without a time, a mark each.
 * @param {Combination[]} failed
 * @param {Mark} mark
 */
function failedMarks(failed, mark) {
  if (!failed.length) return null;
  const marks = failed.map((combination) =>
    el('span', { class: 'cross', role: 'img', 'aria-label': combination.spoken, 'data-tried': combination.id, ...pointed(combination, mark) }, '\u00d7'),
  );
  return el('p', { class: 'failed-marks' }, el('span', { class: 'muted' }, `${number(failed.length)} without a time:`), marks);
}

/**
 * What hovering a row or a mark does.
 * @param {Combination} combination
 * @param {Mark} mark
 * @returns {Attributes<HTMLElement>}
 */
function pointed(combination, mark) {
  const tip = tipped(combination.spoken);
  return {
    ...tip,
    onpointerenter: () => mark(combination.id),
    onpointerleave: (event) => {
      mark(null);
      tip.onpointerleave?.(event);
    },
    onfocus: (event) => {
      mark(combination.id);
      tip.onfocus?.(event);
    },
    onblur: (event) => {
      mark(null);
      tip.onblur?.(event);
    },
  };
}

/** @param {Combination[]} tried @param {OpenApp} app @param {Mark} mark */
function triedTable(tried, app, mark) {
  const body = el('tbody');
  /** @param {number} index */
  const row = (index) => {
    const combination = tried[index];
    const open = () => app.run.byId.has(combination.id) && app.state.go({ tab: 'where', variant: combination.id });
    return el(
      'tr',
      {
        class: [combination.isBest ? 'best' : '', combination.isUsable ? '' : 'unranked'].join(' '),
        tabindex: index ? -1 : 0,
        'data-tried': combination.id,
        'data-key': `tried:${combination.id}`,
        onclick: open,
        onkeydown: (event) => rowKeys(event, open),
        ...pointed(combination, mark),
      },
      el('td', {}, wholeWords(combination.tried.label)),
      el('td', { class: 'right' }, three(combination.ms)),
      el('td', { class: 'right' }, combination.tried.peak_gib == null ? '\u2013' : memoryText(combination.tried.peak_gib)),
      el('td', { class: 'right roomy' }, number(combination.tried.trials)),
      el('td', { class: 'pad muted roomy' }, combination.words.join('; ')),
    );
  };
  virtualRows(body, tried.length, ROW_PX, row);
  return el(
    'section',
    { class: 'searched', 'aria-label': TRIED },
    el('h2', {}, TRIED),
    el(
      'table',
      { class: `grid dense tried${tried.length > SHORT ? '' : ' wraps'}`, 'aria-label': TRIED },
      el('colgroup', {}, ['label', 'ms', 'memory', 'trials roomy', 'words roomy'].map((name) => el('col', { class: `c-${name}` }))),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          el('th', { scope: 'col' }, 'combination'),
          el('th', { scope: 'col', class: 'right' }, unitOf(tried)),
          el('th', { scope: 'col', class: 'right' }, 'peak memory'),
          el('th', { scope: 'col', class: 'right roomy' }, 'trials'),
          el('th', { scope: 'col', class: 'pad roomy' }, ''),
        ),
      ),
      body,
    ),
  );
}

/** @param {SearchResult} search */
function leftOut({ left_out: left }) {
  if (!left.length) return null;
  const rows = left.map(({ settings, reason }) =>
    el('tr', {}, el('td', {}, settingsText(settings)), el('td', { class: 'pad muted' }, reason)),
  );
  return el(
    'details',
    { class: 'searched' },
    el('summary', {}, `${plural(left.length, 'combination')} left out`),
    el('table', { class: 'grid dense wraps left-out', 'aria-label': 'combinations left out' }, el('tbody', {}, rows)),
  );
}

/** @param {{ [key: string]: unknown }} settings */
function settingsText(settings) {
  return Object.entries(settings)
    .map(([key, value]) => `${key}=${typeof value === 'string' ? value : JSON.stringify(value)}`)
    .join(' ');
}
