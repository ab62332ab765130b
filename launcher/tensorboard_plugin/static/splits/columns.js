// Columns of the ranking: of differences and bars, and of the figures that the server names.

import { el, wholeWords } from '../shared/dom.js';
import { number } from '../shared/format.js';
import { last } from '../shared/scale.js';

/** @type {Column[]} */
export const COLUMNS = [
  { key: 'variant', name: 'variant', sort: (row) => row.label },
  { key: 'forest', compares: true, name: (view) => [`${view.run.whatIsCompared} against `, ...wholeWords(`${view.baselineLabel},\u00a0%`)] },
  { key: 'diff', compares: true, name: 'diff., %', sort: (row) => row.difference?.percent, right: true },
  { key: 'verdict', compares: true, name: 'verdict', sort: (row) => row.difference?.verdict, pad: true },
  { key: 'ms', name: 'step ms', sort: (row) => row.figures.step_ms?.value, right: true },
  { key: 'unit', name: '' },
  {
    key: 'bar',
    name: (view) => view.drawn.length > 0 && ['slowest rank', el('span', { class: 'c-wide' }, `, 0 to ${number(view.fullMs)} ms`)],
    pad: true,
  },
];

/** Figures that a narrow terminal drops before these have no column here: a hover shows them. */
const MOST_DROP = 4;

/**
 * Columns of the figures, as the server has defined them for all reports.
 * @param {Metric[]} metrics
 * @returns {Column[]}
 */
export function metricColumns(metrics) {
  return metrics
    .filter((metric) => metric.drop > 0 && metric.drop <= MOST_DROP)
    .map((metric) => ({
      key: metric.key,
      name: metric.short,
      sort: (row) => row.figures[metric.key]?.value,
      right: true,
      className: `c-figure c-drop-${metric.drop}`,
    }));
}

/**
 * Where to find the figures that have no column, or none on a narrow page: the terminal's table has one for each.
 * @param {Metric[]} metrics
 * @param {Row[]} rows
 */
export function withoutColumn(metrics, rows) {
  const found = metrics
    .filter((metric) => metric.drop > 0 && rows.some((row) => row.figures[metric.key]))
    .sort((a, b) => a.drop - b.drop);
  const names = found.map(({ short, drop }, index) =>
    el('span', { class: withoutAt(drop) }, index < found.length - 1 ? `${short}, ` : short),
  );
  return names.length
    ? el('span', { class: withoutAt(last(found).drop) }, matchMedia('(hover: none)').matches ? ' Tap a row for ' : ' Hover over a row for ', names, '.')
    : null;
}

/**
 * The class of what is shown where a metric has no column.
 * @param {number} drop
 */
function withoutAt(drop) {
  return drop <= MOST_DROP ? `without-${drop}` : null;
}

/**
 * `peak memory: 13.20 GiB`.
 * @param {Metric} metric
 * @param {Row} row
 */
export function spokenFigure(metric, row) {
  const figure = row.figures[metric.key];
  return figure && `${metric.title}: ${[figure.text, figure.uncertainty, metric.unit].filter(Boolean).join(' ')}`;
}

/**
 * Classes of a column's cells.
 * @param {Column} column
 */
export function classes(column) {
  return [`c-${column.key}`, column.className, column.right ? 'right' : '', column.pad ? 'pad' : ''].filter(Boolean).join(' ');
}
