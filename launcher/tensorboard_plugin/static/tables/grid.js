// A table of the server's: names at left, figures at right, the rows of a tree below the one around them.

import { sparkline } from '../devices/charts.js';
import { el, replace, widest } from '../shared/dom.js';
import { columnHead, compare } from '../shared/sorting.js';
import { rowKeys, virtualRows } from '../shared/virtual.js';

const ROW_PX = 30;
const CURVE_PX = 58;
/** Of a larger tree only the rows to this depth are open at first. */
const OPEN_DEPTH = 2;
const LARGE_TREE = 60;
const INDENT_PX = 16;
const TEXT_PX = 13;
const HEAD_PX = 12;
const GAP_PX = 16;

/**
 * Draws `table` into `host`.
 * @param {HTMLElement} host
 * @param {ShownTable} table
 * @param {TableLook} look
 */
export function drawTable(host, table, look) {
  const rows = visible(table, look);
  const columns = columnsOf(table);
  const body = el('tbody');
  replace(
    host,
    el(
      'table',
      {
        class: `grid medium${table.curve_title ? ' curves' : ''}`,
        'aria-label': table.name_title || table.curve_title,
        style: { '--figures': columns.map((column) => column.width ?? '0px').join(' + ') },
      },
      el(
        'colgroup',
        {},
        columns.map((column) => el('col', { style: column.width ? { width: column.width } : {} })),
      ),
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          columns.map((column) => head(column, look)),
        ),
      ),
      body,
    ),
  );
  const height = table.curve_title ? CURVE_PX : ROW_PX;
  virtualRows(body, rows.length, height, (index) => line(rows[index], index, columns, look));
  if (!rows.length)
    body.append(el('tr', {}, el('td', { colspan: columns.length, class: 'muted' }, 'Nothing has such a name.')));
}

/** @param {ShownTable} table @returns {TableColumn[]} */
function columnsOf(table) {
  const figures = table.titles.map((title, index) => ({
    key: String(index),
    title,
    className: 'right',
    width: `${figurePx(table, index)}px`,
    sort: (/** @type {TreeRow} */ row) => row.cells[index].value,
    cell: (/** @type {TreeRow} */ row) => row.cells[index].text,
  }));
  const name = {
    key: 'name',
    title: table.name_title,
    className: '',
    sort: (/** @type {TreeRow} */ row) => row.name,
    cell: nameCell,
  };
  const curve = {
    key: 'curve',
    title: table.curve_title,
    className: 'pad',
    cell: (/** @type {TreeRow} */ row) =>
      sparkline(row.curve, Math.max(1, ...row.curve), null, table.curve_title, false),
  };
  return [...(table.name_title ? [name] : []), ...figures, ...(table.curve_title ? [curve] : [])];
}

/**
 * Wide enough for the longest figure of a column, and for each word above it.
 * @param {ShownTable} table
 * @param {number} index
 */
function figurePx({ titles, rows }, index) {
  const longest = rows.reduce((text, { cells }) => (cells[index].text.length > text.length ? cells[index].text : text), '');
  return Math.ceil(Math.max(widest([longest], TEXT_PX), widest(titles[index].split(' '), HEAD_PX))) + GAP_PX;
}

/** @param {TreeRow} row */
function nameCell(row) {
  const mark = row.inner.length ? (row.isOpen ? '\u25be' : '\u25b8') : '';
  return el(
    'span',
    { class: `name-cell${row.depth || row.inTree ? ' tree' : ''}`, style: { 'padding-left': `${INDENT_PX * row.depth}px` } },
    row.inTree ? el('span', { class: 'mark', 'aria-hidden': 'true' }, mark) : null,
    el('span', {}, row.name),
  );
}

/** @param {TableColumn} column @param {TableLook} look */
function head(column, { order, choose }) {
  const [key, direction] = (order ?? '').split('~');
  /** @type {'ascending' | 'descending' | null} */
  const sorted = key === column.key ? (direction === 'up' ? 'ascending' : 'descending') : null;
  const next = sorted === 'descending' || (!sorted && column.key === 'name') ? 'up' : 'down';
  const sorting =
    choose && column.sort
      ? { key: `table:${column.key}`, sorted, choose: () => choose(`${column.key}~${next}`) }
      : null;
  return columnHead(column.title, column.className, sorting);
}

/**
 * The rows to draw: sorted within what is around them, found, and in an open row.
 * @param {ShownTable} table
 * @param {TableLook} look
 * @returns {TreeRow[]}
 */
function visible(table, { q, order, toggled }) {
  const column = order ? columnsOf(table).find((each) => each.key === order.split('~')[0]) : null;
  const sort = column?.sort;
  const sign = order?.endsWith('~up') ? 1 : -1;
  /** @type {TreeRow[]} */
  const found = [];
  const isLarge = table.rows.length > LARGE_TREE;
  /** @param {TreeRow[]} rows */
  const add = (rows) => {
    const named = rows.filter((row) => !row.is_total);
    const sorted = sort ? named.sort((a, b) => sign * compare(sort(a), sort(b)) || 0) : named;
    for (const row of [...sorted, ...rows.filter((each) => each.is_total)]) {
      if (q && !row.is_total && !row.holds(q)) continue;
      const isFirstOpen = q ? true : !isLarge || row.depth < OPEN_DEPTH - 1;
      row.isOpen = toggled.has(row.path) !== isFirstOpen;
      found.push(row);
      if (row.isOpen) add(row.inner);
    }
  };
  add(treeOf(table.rows));
  return found;
}

/** @param {ShownRow[]} rows @returns {TreeRow[]} those that nothing is around */
function treeOf(rows) {
  const inTree = rows.some((row) => row.depth);
  /** @type {TreeRow[]} */
  const around = [];
  /** @type {TreeRow[]} */
  const outermost = [];
  for (const row of rows) {
    around.length = row.depth;
    const outer = around[row.depth - 1];
    /** @type {TreeRow} */
    const treeRow = {
      ...row,
      inTree,
      inner: [],
      isOpen: true,
      path: `${outer?.path ?? ''}\n${row.name}`,
      holds: (q) => treeRow.name.toLowerCase().includes(q) || treeRow.inner.some((each) => each.holds(q)),
    };
    (outer?.inner ?? outermost).push(treeRow);
    around.push(treeRow);
  }
  return outermost;
}

/** @param {TreeRow} row @param {number} index @param {TableColumn[]} columns @param {TableLook} look */
function line(row, index, columns, { toggled, again }) {
  const toggle = () => {
    if (!row.inner.length) return;
    if (!toggled.delete(row.path)) toggled.add(row.path);
    again();
  };
  return el(
    'tr',
    {
      class: row.is_total ? 'total' : null,
      tabindex: index ? -1 : 0,
      'aria-expanded': row.inner.length ? String(row.isOpen) : null,
      'data-key': row.inner.length ? `row:${row.path}` : null,
      onclick: toggle,
      onkeydown: (event) => rowKeys(event, toggle),
      title: row.name || null,
    },
    columns.map((column) => el('td', { class: column.className }, column.cell(row))),
  );
}
