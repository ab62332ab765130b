// The tables of `gpurun trace --show`. Columns, figures and sentences are the server's; here they are sorted,
// searched, and their trees opened.

import { headline, optionsOf, picker, searchField, segmented } from '../shared/controls.js';
import { el, replace } from '../shared/dom.js';
import { number } from '../shared/format.js';
import { readingState, noTracesState, problemNotes, tracedVariant } from '../shared/states.js';
import { drawTable } from './grid.js';

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showTables(host, app) {
  const { run, state } = app;
  const variant = tracedVariant(host, app);
  if (!variant) return undefined;
  const label = run.isTraces ? run.answer.title : variant.label;
  const wanted = run.against(variant, state.get('against'));
  const parameters = {
    variant: variant.id,
    table: state.get('table') ?? undefined,
    against: wanted?.id,
    rank: state.get('tablerank') ?? undefined,
    step: state.get('step') ?? undefined,
  };
  const answer = await app.traced('tables', parameters, (part) => readingState(host, label, part));
  if (!answer) return undefined;
  if (answer.state !== 'ready') return noTracesState(host, label, answer, app.retry());
  const against = answer.table === 'operators' ? wanted : null; // the server compares no other tables
  return new Tables(host, app, { variant, against, answer });
}

class Tables {
  /**
   * @param {HTMLElement} host
   * @param {OpenApp} app
   * @param {{ variant: Variant, against: Variant | null, answer: TablesAnswer }} found
   */
  constructor(host, app, { variant, against, answer }) {
    this.app = app;
    this.variant = variant;
    this.against = against;
    this.answer = answer;
    this.version = answer.version;
    this.keeps = true;
    /** @type {Set<string>} */
    this.toggled = new Set();
    this.tables = answer.tables.map(() => el('div', { class: 'requested' }));
    replace(
      host,
      headline(answer.sentence, null),
      problemNotes(answer.problems, answer.warnings),
      this.controls(),
      this.tables,
      answer.notes.map((note) => el('p', { class: answer.tables.length ? 'sub' : '' }, note)),
    );
    this.draw();
  }

  /**
   * Only sorting and searching are done here; everything else is asked for again.
   * @param {Changes} changes
   */
  changed(changes) {
    if (!Object.keys(changes).every((key) => key === 'tablesort' || key === 'q')) return false;
    this.draw();
    return true;
  }

  /** The run has changed: perhaps its traces have. */
  update() {
    return this.app.renew(this);
  }

  controls() {
    const { run, state } = this.app;
    /** @type {Options} */
    const kinds = this.answer.kinds.map(({ key, title }) => [key, title]);
    return el(
      'div',
      { class: 'controls' },
      segmented('table', kinds, this.answer.table, (table) =>
        state.go({ tab: 'tables', table, tablesort: null, q: null }),
      ),
      el(
        'div',
        { class: 'group' },
        run.isTraces
          ? null
          : picker('variant', optionsOf(run.traced), this.variant.id, (id) =>
              state.go({ tab: 'tables', variant: id, tablerank: null, step: null }),
            ),
        this.whose(),
      ),
      this.answer.tables.some((table) => table.name_title)
        ? searchField('filter names', state.get('q') ?? '', {
            oninput: (q) => state.go({ q: q || null }),
            onleave: () => state.go({ q: null }),
          })
        : null,
    );
  }

  /** Which rank and step; of two variants that are compared, all. */
  whose() {
    const { answer, against } = this;
    const { run, state } = this.app;
    const others = run.isTraces ? [] : optionsOf(run.traced.filter((each) => each !== this.variant));
    return [
      answer.table === 'operators' && others.length
        ? [
            el('span', { class: 'name' }, 'against'),
            picker('against', [['none', 'nothing'], ...others], against?.id ?? 'none', (id) =>
              state.go({ tab: 'tables', against: id, tablerank: null, step: null }),
            ),
          ]
        : null,
      against || answer.table === 'critical-path' ? null : this.chooser('tablerank', 'rank', answer.ranks),
      against ? null : this.chooser('step', 'step', answer.steps),
    ];
  }

  /** @param {'tablerank' | 'step'} key @param {string} noun @param {number[]} numbers */
  chooser(key, noun, numbers) {
    const { state } = this.app;
    if (numbers.length < 2) return null;
    /** @type {Options} */
    const options = [
      ['', key === 'step' ? 'the whole trace' : 'all ranks'],
      ...numbers.map((value) => /** @type {const} */ ([String(value), `${noun} ${number(value)}`])),
    ];
    return picker(noun, options, state.get(key) ?? '', (value) =>
      state.go({ tab: 'tables', [key]: value || null }),
    );
  }

  draw() {
    const { state } = this.app;
    const order = state.get('tablesort');
    this.answer.tables.forEach((table, index) => {
      drawTable(this.tables[index], table, {
        q: (state.get('q') ?? '').toLowerCase(),
        // Only the first has its order in the address: the others are short.
        order: index ? null : order,
        choose: index ? null : (next) => state.go({ tablesort: next }),
        toggled: this.toggled,
        again: () => this.draw(),
      });
    });
  }
}
