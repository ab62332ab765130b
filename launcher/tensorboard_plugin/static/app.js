// The page: run, tabs, and the view in front. Views draw into `main`; each hears of changes to what is
// looked at by being drawn again, but the timeline, which moves its own window.

import { showDevices } from './devices/devices.js';
import { el, found, isTyping, replace } from './shared/dom.js';
import { Run } from './model.js';
import { showOperators } from './operators/operators.js';
import { isAbort, Latest, messageOf } from './source.js';
import { showSearch } from './search/search.js';
import { showSplits } from './splits/splits.js';
import { State } from './state.js';
import { showTables } from './tables/tables.js';
import { emptyState, failedState, unopenedState } from './shared/states.js';
import { followTheme } from './shared/theme.js';
import { showTimeline } from './timeline/timeline.js';
import { hideTip } from './shared/tip.js';
import { showWhere } from './where/where.js';

/** @type {{ [tab: string]: { name: string, show: Show } }} */
const VIEWS = {
  splits: { name: 'Splits', show: showSplits },
  search: { name: 'Search', show: showSearch },
  where: { name: 'Where time goes', show: showWhere },
  timeline: { name: 'Timeline', show: showTimeline },
  operators: { name: 'Operators', show: showOperators },
  tables: { name: 'Tables', show: showTables },
  devices: { name: 'Devices', show: showDevices },
};
const STEPS_AT_ONCE = 50;
/** How often a run is asked for while it is going. */
const RUNNING_MS = 4000;

/** Builds the page in `root` and keeps it up to date. */
export class App {
  /** @param {HTMLElement} root @param {AnswerSource} source @param {State} [state] */
  constructor(root, source, state = new State()) {
    this.root = root;
    this.source = source;
    this.state = state;
    /** @type {RunEntry[]} */
    this.runs = [];
    this.runsVersion = '';
    /** @type {Run | null} */
    this.run = null;
    /** @type {View | null} */
    this.view = null;
    this.reloadS = 5;
    this.readAgain = false;
    this.loading = new Latest();
    this.controller = new AbortController();
    /** @type {Map<string, Steps>} */
    this.stepsKnown = new Map();
    this.main = el('main', { id: 'view', tabindex: -1, role: 'tabpanel' });
    this.head = el('header', { class: 'top' });
    this.live = el('div', { class: 'visually-hidden', role: 'status', 'aria-live': 'polite' });
    this.views = Object.fromEntries(
      Object.entries(VIEWS).filter(([key]) => !source.views || source.views.includes(key)),
    );
  }

  /** Draws for the first time; from then on the page looks after itself. */
  async start() {
    replace(this.root, this.head, this.main, this.live);
    followTheme(() => this.run && this.draw());
    this.state.onChange((changes) => this.changed(changes));
    document.addEventListener('keydown', (event) => this.key(event));
    await this.look();
  }

  /** Ends with the view that is in front: what it asks for is cancelled with it. */
  get signal() {
    return this.controller.signal;
  }

  /** The run that views are of; without one no view is in front. */
  get openRun() {
    if (!this.run) throw new Error('No run is open.');
    return this.run;
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key !== '/' || isTyping(event)) return;
    const field = this.main.querySelector('[data-search]');
    if (!(field instanceof HTMLInputElement)) return;
    event.preventDefault();
    field.focus();
    field.select();
  }

  /** Looks for runs, now and from time to time. */
  async look() {
    let waitMs = RUNNING_MS;
    try {
      const answer = await this.source.get('runs');
      if (answer.version !== this.runsVersion) await this.found(answer);
      this.runsVersion = answer.version; // of what is shown: after a failure all is asked for again
      waitMs = this.run?.isRunning ? RUNNING_MS : 1000 * this.reloadS;
    } catch (error) {
      if (!this.run) failedState(this.main, messageOf(error), () => this.look());
    }
    if (this.source.live) setTimeout(() => this.whenSeen(() => this.look()), waitMs);
  }

  /**
   * Waits with polling while no one sees the page: another tab of TensorBoard or of the browser is in front.
   * @param {() => void} work
   */
  whenSeen(work) {
    if (!document.hidden && innerWidth > 0 && this.root.getClientRects().length) work();
    else setTimeout(() => this.whenSeen(work), 1000);
  }

  /** @param {RunsAnswer} answer */
  async found(answer) {
    this.runs = answer.runs;
    this.reloadS = answer.reload_s;
    if (this.runs.length) {
      await this.open(this.state.get('run'));
      return;
    }
    this.leaveView();
    this.run = null;
    this.drawHead();
    emptyState(this.main, answer.logdir, answer.reload_s);
  }

  /**
   * Loads a run, the newest if `name` is none of them, and draws it.
   * @param {string | null | undefined} name
   */
  async open(name) {
    const known = this.runs.find((run) => run.name === name) ?? this.runs[0];
    const isOther = known.name !== this.run?.name;
    const answer = await this.loading.run((signal) => this.source.get('run', { run: known.name }, signal));
    if (!answer) return;
    if (!isOther && answer.version === this.run?.answer.version) return;
    if (isOther) this.stepsKnown.clear();
    this.run = new Run(answer);
    if (isOther) this.draw();
    else this.refresh();
  }

  /** New figures of the same run: never under the pointer or the cursor, and a timeline stays as it is. */
  refresh() {
    this.stepsKnown.clear();
    this.live.textContent = this.openRun.answer.headline ?? '';
    if (this.view?.keeps) this.view.update?.();
    else if (this.main.querySelector('table:hover'))
      this.main.addEventListener('pointerleave', () => this.draw(), { once: true });
    else this.draw();
  }

  /** @param {Changes} changes */
  changed(changes) {
    if ('variant' in changes && !('sel' in changes)) this.state.note({ sel: null, range: null });
    if ('run' in changes && changes.run !== this.run?.name) {
      this.open(changes.run).catch((error) =>
        failedState(this.main, messageOf(error), () => this.open(changes.run)),
      );
      return;
    }
    if (!('tab' in changes) && this.view?.changed?.(changes)) return;
    if ('tab' in changes) scrollTo(0, 0);
    this.draw();
  }

  get tab() {
    const wanted = this.state.get('tab') ?? '';
    const keys = this.tabs;
    return keys.includes(wanted) ? wanted : keys[0];
  }

  /** The views that the run has: traces have no ranking, and a search is only shown of others where it is asked for. */
  get tabs() {
    const isSearch =
      (this.run?.comparison?.search ?? this.run?.answer.improvement) != null || this.state.get('tab') === 'search';
    /** @type {{ [tab: string]: boolean }} */
    const has = { splits: !this.run?.isTraces, search: !this.run?.isTraces && isSearch };
    if (this.run?.isOfCurves) for (const view of ['where', 'timeline', 'operators', 'tables', 'devices']) has[view] = false;
    return Object.keys(this.views).filter((key) => has[key] ?? true);
  }

  drawHead() {
    const keys = this.tabs;
    const tabs = keys.map((key) =>
      el(
        'button',
        {
          type: 'button',
          role: 'tab',
          'aria-selected': String(key === this.tab),
          'aria-controls': 'view',
          tabindex: key === this.tab ? 0 : -1,
          'data-label': this.views[key].name,
          'data-key': `tab:${key}`,
          'data-tab': key,
          onclick: () => this.state.go({ tab: key, q: null }),
          onkeydown: (event) => this.tabKey(event, keys),
        },
        el('span', {}, this.views[key].name),
      ),
    );
    replace(
      this.head,
      this.picker(),
      this.run ? el('div', { class: 'tabs', role: 'tablist', 'aria-label': 'views' }, tabs) : null,
      el('div', { class: 'system', title: this.run?.answer.system ?? '' }, this.run?.answer.system ?? ''),
    );
  }

  picker() {
    if (!this.runs.length) return el('div', { class: 'strong', style: { 'align-self': 'center' } }, 'gpurun');
    const select = el(
      'select',
      {
        'aria-label': 'run',
        'data-key': 'run',
        onchange: (event) =>
          this.state.go({
            run: event.currentTarget.value,
            variant: null,
            against: null,
            oprank: null,
            tablerank: null,
            step: null,
            sel: null,
            range: null,
            from: null,
            to: null,
            rank: null,
          }),
      },
      this.runs.map((run) =>
        el(
          'option',
          { value: run.name, selected: run.name === this.run?.name },
          run.status === 'running' ? `${run.title} (running)` : run.title,
        ),
      ),
    );
    return el('div', { class: 'run-picker' }, select);
  }

  /** @param {KeyboardEvent} event @param {string[]} keys */
  tabKey(event, keys) {
    const move = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0;
    if (!move) return;
    event.preventDefault();
    const next = keys[(keys.indexOf(this.tab) + move + keys.length) % keys.length];
    this.state.go({ tab: next, q: null });
    found(this.head, `[data-tab="${next}"]`)?.focus();
  }

  /** Draws the view in front again. What the one before still waits for is cancelled. */
  async draw() {
    this.leaveView();
    this.drawHead();
    this.controller = new AbortController();
    const { signal } = this;
    this.main.dataset.view = this.tab;
    this.main.dataset.ready = 'false';
    try {
      const view = await this.show();
      if (signal.aborted) {
        view?.stop?.();
        return;
      }
      this.view = view ?? null;
      this.main.dataset.ready = 'true';
    } catch (error) {
      if (signal.aborted || isAbort(error)) return;
      failedState(this.main, messageOf(error), () => this.draw());
    }
  }

  leaveView() {
    this.view?.stop?.();
    this.view = null;
    this.controller.abort();
    hideTip();
  }

  show() {
    const run = this.openRun;
    const problems = run.isTraces && !run.traced.length ? (run.variants[0].planned.problems ?? []) : [];
    if (problems.length) return unopenedState(this.main, run.answer.title, problems);
    return this.views[this.tab].show(this.main, /** @type {OpenApp} */ (this)); // it has a run, as of above
  }

  // What views ask for.

  /**
   * Steps of variants, each asked for once.
   * @param {string[]} ids
   * @returns {Promise<{ [id: string]: Steps }>}
   */
  async steps(ids) {
    const missing = ids.filter((id) => !this.stepsKnown.has(id));
    for (let at = 0; at < missing.length; at += STEPS_AT_ONCE) {
      const answer = await this.source.get(
        'steps',
        { run: this.openRun.name, variant: missing.slice(at, at + STEPS_AT_ONCE) },
        this.signal,
      );
      for (const [id, steps] of Object.entries(answer.variants)) this.stepsKnown.set(id, steps);
    }
    /** @type {{ [id: string]: Steps }} */
    const known = {};
    for (const id of ids) {
      const steps = this.stepsKnown.get(id);
      if (steps?.step_ms.length) known[id] = steps;
    }
    return known;
  }

  /**
   * An answer that needs the index of a variant's traces; `undefined` once no one waits for it any more.
   * @template {TracedRoute} R
   * @param {R} route
   * @param {Asked} parameters
   * @param {(answer: UnderWay) => void} [progress]
   * @returns {Promise<Final<R> | undefined>}
   */
  async traced(route, parameters, progress) {
    const { signal } = this;
    const again = this.readAgain ? { again: 1 } : {};
    this.readAgain = false;
    try {
      return await this.source.ready(
        route,
        { run: this.openRun.name, ...parameters, ...again },
        { signal, progress: (answer) => !signal.aborted && progress?.(answer) },
      );
    } catch (error) {
      if (signal.aborted) return undefined;
      throw error;
    }
  }

  /** @param {string} variant @param {(answer: UnderWay) => void} progress */
  breakdown(variant, progress) {
    return this.traced('breakdown', { variant }, progress);
  }

  /**
   * Draws the view again if the variant's traces are no longer those that it shows.
   * @param {{ variant: Variant, version: string | undefined }} shown
   */
  async renew({ variant, version }) {
    const asked = { run: this.openRun.name, variant: variant.id };
    const meta = await this.source.get('timeline/meta', asked, this.signal).catch(() => null);
    if (meta && meta.version !== version) await this.draw();
  }

  /**
   * What a broken trace's message offers.
   * @returns {Retry}
   */
  retry() {
    return {
      live: this.source.live,
      isTraces: this.openRun.isTraces,
      again: () => {
        this.readAgain = true;
        this.draw();
      },
    };
  }
}
