// Operators, kernels and modules: where the slowest rank's step goes by name, next to another variant.

import { headline, optionsOf, picker, searchField, segmented } from '../shared/controls.js';
import { el, replace } from '../shared/dom.js';
import { number, plural } from '../shared/format.js';
import { cellClass, decimalsFor, differenceText, diverging, nameCell, rankCell, selfHead, shareCell } from './cells.js';
import { rankGroups, shownRanks } from './ranks.js';
import { legend } from '../shared/phases.js';
import { indexingState, noTracesState, problemNotes, tracedVariant } from '../shared/states.js';
import { columnHead, compare } from '../shared/sorting.js';
import { rowKeys, virtualRows } from '../shared/virtual.js';

/** @type {Options} */
const KINDS = [
  ['ops', 'Operators'],
  ['kernels', 'Kernels'],
  ['modules', 'Modules'],
];
/** @type {{ [K in OperatorKind]: string }} */
const NOUNS = { ops: 'operator', kernels: 'kernel', modules: 'module' };
const ROW_PX = 30;

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showOperators(host, app) {
  const { run, state } = app;
  const variant = tracedVariant(host, app);
  if (!variant) return undefined;
  const against = run.against(variant, state.get('against'));
  const label = run.isTraces ? run.answer.title : variant.label;
  const parameters = { variant: variant.id, against: against?.id, kind: state.get('kind') ?? 'ops' };
  const answer = await app.traced('operators', parameters, (part) => indexingState(host, label, part));
  if (!answer) return undefined;
  if (answer.state !== 'ready') return noTracesState(host, label, answer, app.retry());
  return new Operators(host, app, { variant, against, answer, label });
}

class Operators {
  /**
   * @param {HTMLElement} host
   * @param {OpenApp} app
   * @param {{ variant: Variant, against: Variant | null, answer: OperatorsAnswer, label: string }} found
   */
  constructor(host, app, found) {
    this.app = app;
    this.variant = found.variant;
    this.against = found.against;
    this.answer = found.answer;
    this.label = found.label;
    this.version = found.answer.version;
    this.keeps = true;
    this.ranks = shownRanks(found.answer, app.state.get('oprank'));
    this.decimals = decimalsFor(found.answer.step_ms);
    this.sorted = { key: '', direction: '' };
    this.columns = this.makeColumns();
    this.table = el('div');
    replace(
      host,
      headline(this.answer.sentence, this.answer.details),
      problemNotes(this.answer.problems),
      this.controls(),
      this.table,
    );
    this.draw();
  }

  /**
   * Only sorting and searching are done here; everything else is asked for again.
   * @param {Changes} changes
   */
  changed(changes) {
    if (!Object.keys(changes).every((key) => key === 'opsort' || key === 'q')) return false;
    this.draw();
    return true;
  }

  /** The run has changed: perhaps its traces have. */
  update() {
    return this.app.renew(this);
  }

  get hasAgainst() {
    return this.against != null && this.answer.against_step_ms != null;
  }

  get noun() {
    return NOUNS[this.answer.kind];
  }

  /** What the figures add up to. */
  get whole() {
    return this.answer.steps ? 'step' : 'trace';
  }

  controls() {
    const { run, state } = this.app;
    const others = optionsOf(run.traced.filter((each) => each !== this.variant));
    const pickers = run.isTraces
      ? []
      : [
          picker(
            'variant',
            optionsOf(run.traced),
            this.variant.id,
            (id) => state.go({ tab: 'operators', variant: id }),
          ),
          others.length ? el('span', { class: 'name' }, 'against') : null,
          others.length
            ? picker('against', [['none', 'nothing'], ...others], this.against?.id ?? 'none', (id) =>
                state.go({ tab: 'operators', against: id }),
              )
            : null,
        ];
    const count = this.answer.rows.filter((row) => row.named).length;
    return el(
      'div',
      { class: 'controls' },
      el(
        'div',
        { class: 'group' },
        segmented('kind', KINDS, this.answer.kind, (kind) =>
          state.go({ tab: 'operators', kind: kind === 'ops' ? null : kind }),
        ),
        pickers,
        this.rankPicker(),
      ),
      searchField(`filter ${plural(count, this.noun)}`, state.get('q') ?? '', {
        oninput: (q) => state.go({ q: q || null }),
        onleave: () => state.go({ q: null }),
      }),
      legend(['compute', 'transfer', 'wait', 'copy', 'idle']),
    );
  }

  /** Which ranks have columns, where not all fit. */
  rankPicker() {
    const { answer, app } = this;
    if (answer.ranks.length < 2 || answer.ranks.length <= this.ranks.length) return null;
    const groups = picker('ranks in columns', rankGroups(answer), String(this.ranks[0]), (rank) =>
      app.state.go({ oprank: rank }),
    );
    return el('span', { class: 'roomy' }, groups);
  }

  /** @returns {OperatorColumn[]} */
  makeColumns() {
    const { answer } = this;
    const widest = Math.max(1e-9, ...answer.rows.map((row) => row.self_ms ?? 0));
    const most = Math.max(1e-9, ...answer.rows.map((row) => Math.abs(row.difference_ms ?? 0)));
    /** @param {number | null} value */
    const ms = (value) => number(value, this.decimals);
    /** @param {number} rank */
    const batch = (rank) => this.variant.ranks.find((each) => each.rank === rank)?.local_batch;
    /** @type {OperatorColumn[]} */
    const columns = [
      {
        key: 'name',
        head: this.noun,
        sort: (row) => row.name ?? '\uffff',
        cell: (row) => nameCell(row, answer.rows.length),
        total: this.whole,
      },
      {
        key: 'calls',
        head: ['calls', el('br'), answer.steps ? 'per step' : 'in the trace'],
        right: true,
        width: '70px',
        className: 'roomy',
        sort: (row) => row.calls,
        cell: (row) => number(row.calls, Number.isInteger(row.calls) ? 0 : 1),
      },
      {
        key: 'self',
        head: selfHead(answer),
        right: true,
        width: '100px',
        sort: (row) => row.self_ms,
        cell: (row) => ms(row.self_ms),
        total: ms(answer.step_ms),
      },
      {
        key: 'share',
        className: 'wide-only',
        head: `share of ${this.whole}, %`,
        pad: true,
        width: '190px',
        sort: (row) => row.self_ms,
        cell: (row) => shareCell(row, widest),
      },
    ];
    const { ranks } = this;
    ranks.forEach((rank, place) => {
      const index = answer.ranks.indexOf(rank);
      columns.push({
        key: `rank${rank}`,
        head: [
          `rank ${rank}${batch(rank) == null ? ', ms' : ''}`,
          batch(rank) == null ? null : [el('br'), `${number(batch(rank))}, ms`],
        ],
        right: true,
        width: ranks.length > 2 ? '76px' : '88px',
        className: place > 1 ? 'c-samples' : 'roomy',
        sort: (row) => row.by_rank_ms[index],
        cell: (row) => rankCell(row, index, ms),
        total: ms(answer.step_by_rank_ms[index]),
      });
    });
    if (this.against && this.hasAgainst) columns.push(...this.againstColumns(this.against, ms, most));
    return columns;
  }

  /** @param {Variant} against @param {(value: number | null) => string} ms @param {number} most @returns {OperatorColumn[]} */
  againstColumns(against, ms, most) {
    const longer = this.answer.step_ms - (this.answer.against_step_ms ?? 0);
    return [
      {
        key: 'against',
        head: [against.label, el('br'), 'slowest, ms'],
        right: true,
        width: '100px',
        className: 'c-samples',
        sort: (row) => row.against_ms,
        cell: (row) => el('span', { class: 'muted' }, ms(row.against_ms)),
        total: ms(this.answer.against_step_ms),
      },
      {
        key: 'difference',
        head: ['difference,', el('br'), 'ms'],
        right: true,
        width: '96px',
        sort: (row) => row.difference_ms,
        cell: (row) => differenceText(row.difference_ms, this.decimals),
        total: differenceText(longer, this.decimals),
      },
      {
        key: 'bar',
        className: 'wide-only',
        head: ['less', '\u2003', 'more time'],
        pad: true,
        width: '160px',
        cell: (row) => diverging(row.difference_ms, most),
      },
    ];
  }

  rows() {
    const text = (this.app.state.get('q') ?? '').toLowerCase();
    const order = this.app.state.get('opsort') ?? (this.hasAgainst ? 'difference~down' : 'self~down');
    const [key, direction] = order.split('~');
    const column = this.columns.find((each) => each.key === key && each.sort) ?? this.columns[2];
    const sign = direction === 'down' ? -1 : 1;
    const named = this.answer.rows.filter((row) => row.name != null && row.name.toLowerCase().includes(text));
    this.sorted = { key: column.key, direction };
    const rest = text ? [] : this.answer.rows.filter((row) => row.name == null);
    const sort = column.sort ?? (() => null);
    return [...named.sort((a, b) => sign * compare(sort(a), sort(b))), ...rest];
  }

  draw() {
    const rows = this.rows();
    const body = el('tbody');
    const isAll = !this.app.state.get('q');
    if (isAll && !rows.some((row) => row.name != null)) {
      replace(this.table);
      return;
    }
    replace(
      this.table,
      el(
        'table',
        { class: 'grid medium operators', 'aria-label': `${this.noun}s by time` },
        el(
          'colgroup',
          {},
          this.columns.map((column) =>
            el('col', { class: column.className, style: column.width ? { width: column.width } : {} }),
          ),
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
        isAll ? el('tbody', {}, this.restRow(), this.overlapRow(), this.totalRow()) : null,
      ),
    );
    virtualRows(body, rows.length, ROW_PX, (index) => this.row(rows[index], index));
    if (!rows.length)
      body.append(
        el('tr', {}, el('td', { colspan: this.columns.length, class: 'muted' }, 'No name contains that.')),
      );
  }

  /** @param {OperatorColumn} column */
  header(column) {
    const { state } = this.app;
    /** @type {'ascending' | 'descending' | null} */
    const sorted =
      this.sorted.key === column.key ? (this.sorted.direction === 'down' ? 'descending' : 'ascending') : null;
    const next = sorted === 'descending' ? 'up' : sorted ? 'down' : column.key === 'name' ? 'up' : 'down';
    const choose = () => state.go({ opsort: `${column.key}~${next}` });
    const order = column.sort ? { key: `op:${column.key}`, sorted, choose } : null;
    return columnHead(column.head, cellClass(column), order);
  }

  /** @param {OperatorRow} row @param {number} index */
  row(row, index) {
    const isFound = row.name != null && row.named;
    const open = () => {
      if (isFound) this.app.state.go({ tab: 'timeline', q: row.name });
    };
    return el(
      'tr',
      {
        tabindex: index ? -1 : 0,
        onclick: open,
        onkeydown: (event) => rowKeys(event, open),
        title: isFound ? `${row.name}: find it in the timeline` : null,
      },
      this.columns.map((column) => el('td', { class: cellClass(column) }, column.cell(row))),
    );
  }

  restRow() {
    const { answer } = this;
    return this.mutedRow('input, idle', answer.rest_ms, answer.rest_by_rank_ms, answer.against_rest_ms);
  }

  /** What the rows count twice because it ran side by side, or in no step: without it they'd be longer than the step. */
  overlapRow() {
    const { answer, decimals } = this;
    /** @param {number} value */
    const of = (value) => 0 - value;
    const all = [answer.overlap_ms, ...answer.overlap_by_rank_ms, answer.against_overlap_ms ?? 0];
    if (all.every((value) => Number(value.toFixed(decimals)) === 0)) return null;
    return this.mutedRow(
      `above, but side by side${this.answer.steps ? ' or outside of steps' : ''}`,
      of(answer.overlap_ms),
      answer.overlap_by_rank_ms.map(of),
      answer.against_overlap_ms == null ? null : of(answer.against_overlap_ms),
    );
  }

  /** @param {string} title @param {number} self @param {number[]} byRank @param {number | null} against */
  mutedRow(title, self, byRank, against) {
    const { answer, decimals } = this;
    /** @type {{ [column: string]: number | null }} */
    const values = { self, against };
    answer.ranks.forEach((rank, index) => {
      values[`rank${rank}`] = byRank[index];
    });
    const difference = this.hasAgainst ? self - (against ?? 0) : null;
    return el(
      'tr',
      { class: 'muted' },
      this.columns.map((column) =>
        el(
          'td',
          { class: cellClass(column) },
          column.key === 'name'
            ? el('span', { class: 'name-cell' }, el('span', { class: 'swatch idle' }), title)
            : column.key === 'difference'
              ? differenceText(difference, decimals)
              : values[column.key] == null
                ? ''
                : number(values[column.key], decimals),
        ),
      ),
    );
  }

  totalRow() {
    return el(
      'tr',
      { class: 'total' },
      this.columns.map((column) => el('td', { class: cellClass(column) }, column.total ?? '')),
    );
  }
}
