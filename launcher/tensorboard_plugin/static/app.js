// The page: run, tabs, and the view in front. Views draw into `main`; each hears of changes to what is
// looked at by being drawn again, but the timeline, which moves its own window.

import { showDevices } from './devices.js';
import { el, isTyping, replace } from './dom.js';
import { Run } from './model.js';
import { showOperators } from './operators.js';
import { Latest } from './source.js';
import { showSplits } from './splits.js';
import { State } from './state.js';
import { emptyState, failedState, unopenedState } from './states.js';
import { followTheme } from './theme.js';
import { showTimeline } from './timeline.js';
import { hideTip } from './tip.js';
import { drawBlocks, showWhere } from './where.js';

const VIEWS = {
  splits: { name: 'Splits', show: showSplits },
  where: { name: 'Where time goes', show: showWhere },
  timeline: { name: 'Timeline', show: showTimeline },
  operators: { name: 'Operators', show: showOperators },
  devices: { name: 'Devices', show: showDevices },
};
const STEPS_AT_ONCE = 50;
/** While a run goes on it is looked at this often. */
const RUNNING_MS = 4000;

/** Builds the page in `root` and keeps it up to date. */
export class App {
  constructor(root, source, state = new State()) {
    this.root = root;
    this.source = source;
    this.state = state;
    this.runs = [];
    this.run = null;
    this.view = null;
    this.loading = new Latest();
    this.signal = undefined;
    this.stepsKnown = new Map();
    this.views = Object.fromEntries(
      Object.entries(VIEWS).filter(([key]) => !source.views || source.views.includes(key)),
    );
  }

  /** Draws for the first time; from then on the page looks after itself. */
  async start() {
    this.main = el('main', { id: 'view', tabindex: -1, role: 'tabpanel' });
    this.head = el('header', { class: 'top' });
    this.live = el('div', { class: 'visually-hidden', role: 'status', 'aria-live': 'polite' });
    replace(this.root, this.head, this.main, this.live);
    followTheme(() => this.run && this.draw());
    this.state.onChange((changes) => this.changed(changes));
    document.addEventListener('keydown', (event) => this.key(event));
    await this.look();
  }

  key(event) {
    if (event.key !== '/' || isTyping(event)) return;
    const field = this.main.querySelector('[data-search]');
    if (!field) return;
    event.preventDefault();
    field.focus();
    field.select();
  }

  /** Looks for runs, now and from time to time. */
  async look() {
    let waitMs = RUNNING_MS;
    try {
      const answer = await this.source.getChanged('runs');
      if (answer) await this.found(answer);
      waitMs = this.run?.isRunning ? RUNNING_MS : 1000 * (this.reloadS ?? 5);
    } catch (error) {
      if (!this.run) failedState(this.main, error.message, () => this.look());
    }
    if (this.source.live) setTimeout(() => this.whenSeen(() => this.look()), waitMs);
  }

  /** Waits with polling while nobody sees the page: another tab of TensorBoard or of the browser is in front. */
  whenSeen(work) {
    if (!document.hidden && innerWidth > 0 && this.root.getClientRects().length) return work();
    return setTimeout(() => this.whenSeen(work), 1000);
  }

  async found(answer) {
    this.runs = answer.runs;
    this.reloadS = answer.reload_s;
    if (!this.runs.length) {
      this.run = null;
      this.drawHead();
      return emptyState(this.main, answer.logdir, answer.reload_s);
    }
    return this.open(this.state.get('run'));
  }

  /** Loads a run, the newest if `name` is none of them, and draws it. */
  async open(name) {
    const known = this.runs.find((run) => run.name === name) ?? this.runs[0];
    const isOther = known.name !== this.run?.name;
    const answer = await this.loading.run((signal) => this.source.get('run', { run: known.name }, signal));
    if (!answer) return;
    if (!isOther && answer.version === this.run.answer.version) return;
    if (isOther) this.stepsKnown.clear();
    this.run = new Run(answer);
    if (isOther) this.draw();
    else this.refresh();
  }

  /** New figures of the same run: never under the pointer or the cursor, and a timeline stays as it is. */
  refresh() {
    this.stepsKnown.clear();
    this.live.textContent = this.run.answer.headline ?? '';
    if (this.view?.keeps) return this.view.update?.();
    if (this.main.querySelector('table:hover')) {
      this.main.addEventListener('pointerleave', () => this.draw(), { once: true });
      return undefined;
    }
    return this.draw();
  }

  changed(changes) {
    if ('variant' in changes && !('sel' in changes)) this.state.note({ sel: null, range: null });
    if ('run' in changes && changes.run !== this.run?.name)
      return this.open(changes.run).catch((error) =>
        failedState(this.main, error.message, () => this.open(changes.run)),
      );
    if (!('tab' in changes) && this.view?.changed?.(changes)) return undefined;
    if ('tab' in changes) scrollTo(0, 0);
    return this.draw();
  }

  get tab() {
    const wanted = this.state.get('tab');
    if (this.views[wanted] && !(this.run?.isTraces && wanted === 'splits')) return wanted;
    return this.run?.isTraces ? 'where' : Object.keys(this.views)[0];
  }

  drawHead() {
    const keys = Object.keys(this.views).filter((key) => !(this.run?.isTraces && key === 'splits'));
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
            run: event.target.value,
            variant: null,
            against: null,
            oprank: null,
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

  tabKey(event, keys) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = keys[(keys.indexOf(this.tab) + move + keys.length) % keys.length];
    this.state.go({ tab: next, q: null });
    this.head.querySelector(`[data-tab="${next}"]`)?.focus();
  }

  /** Draws the view in front anew. What the one before still waits for is cancelled. */
  async draw() {
    this.view?.stop?.();
    this.view = null;
    hideTip();
    this.drawHead();
    this.controller?.abort();
    this.controller = new AbortController();
    const { signal } = this.controller;
    this.signal = signal;
    this.main.dataset.view = this.tab;
    this.main.dataset.ready = 'false';
    try {
      const view = await this.show();
      if (signal.aborted) return view?.stop?.();
      this.view = view ?? null;
      this.main.dataset.ready = 'true';
    } catch (error) {
      if (signal.aborted || error.name === 'AbortError') return undefined;
      failedState(this.main, error.message, () => this.draw());
    }
    return undefined;
  }

  show() {
    const problems = this.run.isTraces && !this.run.traced.length ? this.run.variants[0].planned.problems : [];
    if (problems.length) return unopenedState(this.main, this.run.answer.title, problems);
    return this.views[this.tab].show(this.main, this);
  }

  // What views ask for.

  /** Steps of variants, each asked for once. */
  async steps(ids) {
    const missing = ids.filter((id) => !this.stepsKnown.has(id));
    for (let at = 0; at < missing.length; at += STEPS_AT_ONCE) {
      const answer = await this.source.get(
        'steps',
        { run: this.run.name, variant: missing.slice(at, at + STEPS_AT_ONCE) },
        this.signal,
      );
      for (const [id, steps] of Object.entries(answer.variants)) this.stepsKnown.set(id, steps);
    }
    return Object.fromEntries(
      ids.map((id) => [id, this.stepsKnown.get(id)]).filter(([, steps]) => steps?.step_ms.length),
    );
  }

  /** An answer that needs the index of a variant's traces; `undefined` once nobody waits for it any more. */
  async traced(route, parameters, progress) {
    const { signal } = this;
    const again = this.readAgain ? { again: 1 } : {};
    this.readAgain = false;
    try {
      const told = (answer) => !signal.aborted && progress?.(answer);
      return await this.source.ready(
        route,
        { run: this.run.name, ...parameters, ...again },
        { signal, progress: told },
      );
    } catch (error) {
      if (signal.aborted) return undefined;
      throw error;
    }
  }

  breakdown(variant, progress) {
    return this.traced('breakdown', { variant }, progress);
  }

  /** Draws the view again if the variant's traces are no longer those that it shows. */
  async renew({ variant, version }) {
    const asked = { run: this.run.name, variant: variant.id };
    const meta = await this.source.get('timeline/meta', asked, this.signal).catch(() => null);
    if (meta && meta.version !== version) await this.draw();
  }

  /** What a broken trace's message offers. */
  retry() {
    return {
      live: this.source.live,
      isTraces: this.run.isTraces,
      again: () => {
        this.readAgain = true;
        this.draw();
      },
    };
  }

  drawBlocks(grid, variants) {
    drawBlocks(grid, this, variants);
  }
}
