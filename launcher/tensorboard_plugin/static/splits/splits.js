// Splits: all variants ranked, with their difference from the baseline, interval and verdict.

import { filters, headline, searchField } from '../shared/controls.js';
import { el, hidden, replace, wholeWords, widest } from '../shared/dom.js';
import { columnDecimals, halfWidth, interval, number, percent, plural } from '../shared/format.js';
import { forestAxis, forestRow, forestScale, spokenDifference } from './forest.js';
import { histogram } from './histogram.js';
import { passes } from '../model.js';
import { legend, shownPhases, whatBarsAre } from '../shared/phases.js';
import { balancedPanels } from './balanced.js';
import { barOf, drawnBar, spokenBar } from './bars.js';
import { batchCharts } from './batches.js';
import { classes, COLUMNS, metricColumns, spokenFigure, withoutColumn } from './columns.js';
import { sizeCurves } from './sizes.js';
import { showWaiting } from './waiting.js';
import { subSentence, whyUnranked } from './words.js';
import { problemNotes } from '../shared/states.js';
import { tipped } from '../shared/tip.js';
import { columnHead, compare } from '../shared/sorting.js';
import { rowKeys, virtualRows } from '../shared/virtual.js';

/** From this many variants on, a histogram chooses among them and rows are low. */
const MANY = 40;

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export function showSplits(host, app) {
  const { run } = app;
  if (!run.results.size) return showWaiting(host, app);
  const view = new View(app);
  replace(
    host,
    headline(run.answer.headline ?? '', subSentence(run)),
    problemNotes([], run.answer.alerts),
    view.controls(),
    ...view.parts(),
    view.second(),
    run.answer.facts.length ? el('p', { class: 'sub facts' }, run.answer.facts.join('\n')) : null,
    ...view.found(),
  );
  return {};
}

class View {
  /** @param {OpenApp} app */
  constructor(app) {
    this.app = app;
    this.run = app.run;
    this.isCompared = this.run.ranked.length > 1;
    const columns = COLUMNS.filter((column) => this.isCompared || !column.compares);
    this.columns = [...columns.slice(0, -1), ...metricColumns(this.run.answer.metrics), ...columns.slice(-1)];
    /** @param {FilterName} name */
    const chosen = (name) => app.state.list(name);
    this.passing = this.run.ranked.filter((variant) => passes(variant, chosen));
    const unranked = this.run.unranked.filter((variant) => passes(variant, chosen));
    this.curved = unranked.filter((variant) => variant.hasCurves);
    this.others = unranked.filter((variant) => !(variant.hasCurves && variant.status === 'ok'));
    this.isMany = this.run.variants.length > MANY;
    this.rows = this.sorted(this.searched(this.withNoise()));
    this.axis = forestAxis(this.rows.map((row) => row.difference));
    this.bars = new Map(this.rows.map((row) => [row, barOf(row)]));
    this.fullMs = Math.ceil(Math.max(0, ...this.passing.map((variant) => variant.stepMs ?? 0)));
    this.decimals = columnDecimals(
      this.rows.map((row) => halfWidth(row.stepMs, row.result?.step_ms?.ci)),
      this.rows.map((row) => row.stepMs).filter((ms) => ms != null),
    );
    this.baselineLabel = this.run.baseline?.label ?? 'the baseline';
    this.height = this.isMany ? 22 : 36;
    this.position = el('span', { class: 'muted', role: 'status' });
  }

  /**
   * The baseline measured twice: what differs there is noise. Its row is below the baseline.
   * @returns {Row[]}
   */
  withNoise() {
    const noise = this.run.comparison?.noise;
    const { baseline } = this.run;
    if (noise?.aa_percent == null || !baseline || !this.passing.includes(baseline) || !this.isCompared)
      return this.passing;
    /** @type {Row} */
    const again = {
      isNoise: true,
      id: null,
      label: baseline.label,
      difference: { percent: noise.aa_percent, ci: noise.ci, verdict: 'noise' },
      stepMs: null,
      result: null,
      slowest: null,
      timedParts: {},
      differenceInterval: interval(noise.ci),
      figures: {},
    };
    const place = this.passing.indexOf(baseline) + 1;
    return [...this.passing.slice(0, place), again, ...this.passing.slice(place)];
  }

  /** @param {Row[]} rows */
  searched(rows) {
    const text = (this.app.state.get('q') ?? '').toLowerCase();

    const brush = this.isMany ? this.brush() : null;
    /** @param {Row} row */
    const inBrush = (row) => {
      const at = row.difference?.percent ?? NaN;
      return !brush || (at >= brush[0] && at <= brush[1]);
    };
    return rows.filter((row) => row.label.toLowerCase().includes(text) && inBrush(row));
  }

  /** @returns {Brush | null} */
  brush() {
    const ends = this.app.state.list('brush');
    return ends?.length === 2 ? [Number(ends[0]), Number(ends[1])] : null;
  }

  /** @param {Row[]} rows */
  sorted(rows) {
    const [key, direction] = (this.app.state.get('sort') ?? '').split('~');
    const sort = this.columns.find((column) => column.key === key)?.sort;
    if (!sort) return rows;
    const sign = direction === 'down' ? -1 : 1;
    return [...rows].sort((a, b) => sign * compare(sort(a), sort(b)));
  }

  controls() {
    const { state } = this.app;
    const search =
      this.isMany &&
      searchField('variant', state.get('q') ?? '', {
        oninput: (q) => state.go({ q }),
        onleave: () => state.go({ q: null }),
      });
    return el(
      'div',
      { class: 'controls' },
      search || null,
      filters(this.run, state),
      this.isMany ? this.position : null,
      this.drawn.length ? legend(shownPhases(this.drawn), undefined, 'c-bar') : null,
    );
  }

  /** The bars that there are. */
  get drawn() {
    return [...this.bars.values()].flatMap((parts) => (parts ? [{ parts }] : []));
  }

  parts() {
    const table = this.run.ranked.length ? this.table() : null;
    const after = [sizeCurves(this.curved), this.below(), this.note()];
    if (!this.isMany) return [table, ...after];
    const percents = this.passing
      .map((variant) => variant.difference?.percent)
      .filter((value) => value != null);
    /** @param {Brush | null} ends */
    const onbrush = (ends) =>
      this.app.state.go({ brush: ends?.map((end) => end.toFixed(2)).join('~') ?? null });
    return [histogram(percents, this.brush(), this.rows.length, onbrush), table, ...after];
  }

  /** What bars are, as far as there is room for them, and where the figures are that have no column. */
  note() {
    const { answer } = this.run;
    const drawn = this.passing.filter((row) => this.bars.get(row));
    const bars = whatBarsAre(drawn, { ...answer.bars, traced: answer.bars.ranked });
    const hovered = withoutColumn(answer.metrics, this.rows);
    return bars || hovered ? el('p', { class: 'sub note' }, el('span', { class: 'c-bar' }, bars), hovered) : null;
  }

  /** A single variant is no comparison yet. */
  second() {
    const [variant, other] = this.run.variants;
    if (other || !variant.isRanked) return null;
    return el(
      'div',
      { class: 'state' },
      el('p', { class: 'muted' }, 'A second variant makes it a comparison; in the job file:'),
      el('pre', {}, this.run.answer.compare ?? ''),
    );
  }

  /** What the run found out besides the ranking: throughput over the batch, and what devices cost. */
  found() {
    const shown = new Set(this.passing.map((variant) => variant.id));
    const curves = this.run.comparison?.batch_curves ?? [];
    const passing = curves.filter((curve) => curve.points.some((point) => shown.has(point.variant)));
    return [batchCharts(passing, this.app.run.answer.knee), balancedPanels([...this.passing, ...this.others])];
  }

  table() {
    const body = el('tbody');
    const table = el(
      'table',
      { class: `grid splits${this.isMany ? ' dense' : ''}`, 'aria-label': `variants, ranked by ${this.run.whatIsCompared}`, ...this.labelRoom() },
      el(
        'colgroup',
        {},
        this.columns.map((column) => el('col', { class: `c-${column.key} ${column.className ?? ''}` })),
      ),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          this.columns.map((column) => this.header(column)),
        ),
      ),
      body,
    );
    virtualRows(
      body,
      this.rows.length,
      this.height,
      (index) => this.row(this.rows[index], index),
      (first, end) => this.showPosition(first, end),
    );
    this.showPosition(0, this.rows.length);
    return table;
  }

  /**
   * Room for the longest label and interval, within reason.
   * @returns {{ style?: Style }}
   */
  labelRoom() {
    const labels = this.rows.map((row) => (row.isNoise ? `${row.label} again (noise)` : row.label));
    const intervals = this.rows.map((row) => row.figures.step_ms?.uncertainty ?? '');
    const room = { '--label-px': labels, '--unit-px': intervals };
    const widths = Object.entries(room).map(([name, texts]) => [name, `${Math.ceil(widest(texts, 13))}px`]);
    return { style: Object.fromEntries(widths) };
  }

  /** @param {number} first @param {number} end */
  showPosition(first, end) {
    const total = this.rows.length;
    this.position.textContent = total
      ? `rows ${number(first + 1)} to ${number(end)} of ${number(total)} selected`
      : 'none selected';
  }

  /** @param {Column} column */
  header(column) {
    const { state } = this.app;
    const name = typeof column.name === 'function' ? column.name(this) : column.name;
    const [key, direction] = (state.get('sort') ?? 'none').split('~');
    const sorted = key === column.key ? (direction === 'down' ? 'descending' : 'ascending') : null;
    const next = sorted === 'ascending' ? `${column.key}~down` : sorted ? null : `${column.key}~up`;
    const choose = () => state.go({ sort: next });
    return columnHead(name, classes(column), column.sort ? { key: `sort:${column.key}`, sorted, choose } : null);
  }

  /** @param {Row} row @param {number} index */
  row(row, index) {
    const { app, run } = this;
    const verdict = row.difference?.verdict;
    const open = () => {
      if (row.id) app.state.go({ tab: 'where', variant: row.id });
    };

    const cells = this.cells(row);
    return el(
      'tr',
      {
        class: row === run.fastest && verdict === 'faster' ? 'best' : null,
        tabindex: row.id ? (index ? -1 : 0) : null,
        'data-key': row.id,
        'data-variant': row.id,
        onclick: open,
        onkeydown: (event) => rowKeys(event, open),
        ...tipped(this.exact(row)),
      },
      this.columns.map((column) =>
        el(
          'td',
          {
            class: `${classes(column)} ${column.key === 'diff' || column.key === 'verdict' ? toneOf(verdict) : ''}`,
          },
          cells[column.key],
        ),
      ),
    );
  }

  /** @param {Row} row @returns {{ [column: string]: Child }} */
  cells(row) {
    return {
      variant: el(
        'span',
        { class: 'label' },
        // In one piece: between boxes in this one, spaces would be lost.
        el('span', {}, wholeWords(row.label), row.isNoise ? [' again ', el('span', { class: 'muted' }, '(noise)')] : null),
      ),
      forest: [
        forestRow(row.difference, this.axis),
        hidden(spokenDifference(row.difference)),
      ],
      diff: [percent(row.difference?.percent ?? NaN), below(row.differenceInterval)],
      verdict: row.difference?.verdict ?? '',
      ...Object.fromEntries(Object.entries(row.figures).map(([key, figure]) => [key, figure.text])),
      ms: [row.figures.step_ms?.text ?? '', below(row.figures.step_ms?.uncertainty ?? '')],
      unit: el('span', { class: 'muted' }, row.figures.step_ms?.uncertainty ?? ''),
      bar: row.isNoise ? '' : this.bar(row),
    };
  }

  /** @param {Row} row @returns {Child} */
  bar(row) {
    const parts = this.bars.get(row);
    return parts ? drawnBar(row, parts, this.fullMs) : '';
  }

  /**
   * What a hover shows: the interval, the rounds, the parts.
   * @param {Row} row
   */
  exact(row) {
    if (row.isNoise)
      return `${row.label} measured twice in the same rounds: ${spokenDifference(row.difference).replace(': noise', '')}`;
    return [
      row.label,
      ...this.run.answer.metrics.map((metric) => spokenFigure(metric, row)),
      this.isCompared ? spokenDifference(row.difference) : null,
      `${plural(row.result?.rounds ?? 0, 'round')} in ${row.result?.launches === 1 ? 'one launch' : `${row.result?.launches} launches`}`,
      spokenBar(row, this.decimals),
    ]
      .filter(Boolean)
      .join('\n');
  }

  /** The axis, and what could not be ranked: a table of its own, since its columns are others. */
  below() {
    return el(
      'table',
      { class: `grid below${this.isMany ? ' dense' : ''}`, 'aria-label': 'variants that are not ranked', ...this.labelRoom() },
      el('colgroup', {}, el('col', { class: 'c-variant' }), el('col', { class: 'c-forest' }), el('col')),
      el(
        'tbody',
        {},
        this.isCompared && this.rows.length ? this.axisRow() : null,
        this.others.map((variant, at) => this.unrankedRow(variant, this.others[at - 1])),
      ),
    );
  }

  axisRow() {
    const note = `Shaded: within \u00b11 % counts as the same. Bars through dots: the intervals that verdicts rest on. Arrows: beyond the scale.${this.run.hasBatches ? ' Differences are of the time per sample.' : ''}`;
    return el(
      'tr',
      { class: 'axis-row plain' },
      el('td', {}),
      el('td', {}, forestScale(this.axis)),
      el('td', { class: 'note' }, note),
    );
  }

  /**
   * @param {Variant} variant
   * @param {Variant} [above]
   */
  unrankedRow(variant, above) {
    const open = () =>
      this.app.state.go({ tab: variant.hasTraces ? 'where' : 'devices', variant: variant.id });
    return el(
      'tr',
      {
        class: 'unranked',
        tabindex: -1,
        'data-variant': variant.id,
        'data-status': variant.status,
        onclick: open,
        onkeydown: (event) => rowKeys(event, open),
      },
      el('td', {}, variant.label),
      el('td', { colspan: 2 }, whyUnranked(variant, above)),
    );
  }
}

/**
 * An interval below its figure: that of a step only where the page is too narrow for a column.
 * @param {string} text
 */
function below(text) {
  return text ? el('span', { class: 'below-figure muted' }, text) : null;
}

/** @param {string | undefined} verdict */
function toneOf(verdict) {
  return verdict === 'faster' || verdict === 'slower' ? verdict : 'muted';
}
