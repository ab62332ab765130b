// Timeline: all ranks in aligned lanes. The server is asked only for what the window can show; what is
// there already is drawn while the answer is under way.

import { headline, picker, searchField } from './controls.js';
import { el, hiddenTable, replace } from './dom.js';
import { duration, lowerFirst, number, plural, three } from './format.js';
import { Latest } from './source.js';
import { brokenState, indexingState, problemNotes, untracedState } from './states.js';
import { palette } from './theme.js';
import { hideTip, showTip } from './tip.js';
import { drawLanes, drawOverview, drawRuler } from './tl_draw.js';
import { exits } from './tl_exits.js';
import { listenToKeys, listenToLanes, listenToOverview, listenToRuler } from './tl_input.js';
import { blockAt, indexed, LABEL_PX, lanesBetween, layout, mergedSteps } from './tl_layout.js';
import { keyHints, legendHere } from './tl_legend.js';
import { eventPanel, hintPanel, mergedPanel, sumsPanel } from './tl_panel.js';
import { Search } from './tl_search.js';
import { aroundStretch, askedFor, clamped, covers, firstWindow, panned, zoomed } from './tl_window.js';

const ASK_AFTER_MS = 40;
const MOST_LANES = 128;
const SLACK_PX = 2;
const AROUND_PX = 110;
const LEAST_BODY_PX = 220;
/** With more ranks than this, only those asked for are laid out when some are. */
const FEW_RANKS = 8;

/** Draws the view into `host`. */
export async function showTimeline(host, app) {
  const { run, state } = app;
  const variant = run.choose(state.get('variant'), run.traced);
  const asked = run.byId.get(state.get('variant'));
  if (asked && !asked.hasTraces) return untracedState(host, asked.label);
  if (!variant) return untracedState(host, null);
  const label = run.isTraces ? run.answer.title : variant.label;
  const meta = await app.traced('timeline/meta', { variant: variant.id }, (answer) =>
    indexingState(host, label, answer),
  );
  if (!meta) return undefined;
  if (meta.state !== 'ready')
    return meta.state === 'broken'
      ? brokenState(host, label, meta.problems, app.retry())
      : untracedState(host, label);
  return new Timeline(host, app, variant, meta);
}

class Timeline {
  constructor(host, app, variant, meta) {
    Object.assign(this, {
      app,
      variant,
      meta,
      keeps: true,
      endNs: Math.max(1, meta.end_ns),
      classes: meta.classes,
    });
    this.steps = mergedSteps(meta.steps);
    this.expanded = new Set();
    this.scrollTop = 0;
    this.asking = new Latest();
    this.selecting = new Latest();
    this.selected = null;
    this.range = null;
    this.window = this.storedWindow() ?? firstWindow(this.steps, this.endNs);
    this.overviewLanes = meta.ranks
      .map((rank) => ({ ...rank.lanes.find((lane) => lane.kind === 'overview'), label: rank.label }))
      .filter((lane) => lane.lane != null);
    this.place();
    this.build(host);
    this.listen();
    this.askOverview();
    this.resized();
    this.scrollToRank();
    this.restore();
  }

  storedWindow() {
    const { state } = this.app;
    const [from, to] = [Number(state.get('from', NaN)), Number(state.get('to', NaN))];
    return to > from ? clamped({ from, to }, this.endNs) : null;
  }

  // Layout

  get wantedRanks() {
    return (this.app.state.list('rank') ?? []).map(Number);
  }

  place() {
    const only = this.meta.ranks.length > FEW_RANKS ? this.wantedRanks : [];
    this.ranks = only.length ? this.meta.ranks.filter((rank) => only.includes(rank.rank)) : this.meta.ranks;
    if (!this.ranks.length) this.ranks = this.meta.ranks;
    this.placed = layout(this.ranks, this.expanded);
  }

  titleOf(title) {
    const rank = this.variant.ranks.find((one) => one.rank === title.rank);
    return [title.label, rank?.device ?? title.device, rank ? number(rank.local_batch) : null]
      .filter((part) => part != null && part !== '')
      .join(' \u00b7 ');
  }

  build(host) {
    const canvas = (name, label) =>
      el('canvas', { class: name, tabindex: 0, 'aria-label': label, 'data-canvas': name });
    this.overviewCanvas = canvas(
      'overview',
      'the whole trace; arrow keys move the window, with Shift they resize it',
    );
    this.ruler = el('canvas', { 'data-canvas': 'ruler', 'aria-hidden': 'true' });
    this.lanesCanvas = canvas(
      'lanes',
      `${this.sentence()} W and S zoom, A and D pan, F fits, N and P go to the next and previous collective.`,
    );
    this.spacer = el('div');
    this.body = el('div', { class: 'body' }, this.lanesCanvas, this.spacer);
    this.panel = el('section', { class: 'panel', 'aria-label': 'selection', 'aria-live': 'polite' });
    const table = hiddenTable(
      'steps, ms',
      ['step', 'start', 'duration'],
      this.steps.map((step) => [
        step.step,
        three(step.start_ns / 1e6),
        three((step.end_ns - step.start_ns) / 1e6),
      ]),
    );
    replace(
      host,
      headline(this.sentence(), this.subSentence()),
      problemNotes(this.meta.problems, this.meta.warnings),
      this.controls(),
      el('div', { class: 'timeline' }, this.overviewCanvas, this.ruler, this.body),
      this.panel,
      table,
    );
    hintPanel(this.panel);
  }

  sentence() {
    const said = this.variant.planned.explanation;
    const label = this.app.run.isTraces ? this.app.run.answer.title : this.variant.label;
    if (said) return `${label}: ${lowerFirst(said)}`.replace(/([^.])$/, '$1.');
    return `${label}: ${plural(this.steps.length, 'traced step')} on ${plural(this.meta.ranks.length, 'rank')}.`;
  }

  subSentence() {
    const took = this.app.run.isTraces
      ? ''
      : ' Recorded after the measurement, with the profiler on: steps are a little slower here.';
    return `${number(this.meta.num_events)} events in ${duration(this.endNs)}; ranks on one clock.${took}`;
  }

  controls() {
    const { run, state } = this.app;
    const go = (id) =>
      state.go({ tab: 'timeline', variant: id, sel: null, from: null, to: null, rank: null });
    const choice =
      run.isTraces || !run.traced.length
        ? null
        : picker(
            'variant',
            run.traced.map((one) => [one.id, one.label]),
            this.variant.id,
            go,
          );
    this.found = el('span', { class: 'matches', role: 'status' });
    this.search = new Search(this, this.found);
    const search = searchField('kernel, operator or stream', state.get('q', ''), {
      oninput: (q) => this.search.find(q),
      onenter: (back) => this.search.next(back ? -1 : 1),
      onleave: () => this.lanesCanvas.focus(),
    });
    const allRanks =
      this.ranks.length < this.meta.ranks.length
        ? el(
            'button',
            { class: 'button', type: 'button', onclick: () => state.go({ tab: 'timeline', rank: null }) },
            `All ${number(this.meta.ranks.length)} ranks`,
          )
        : null;
    return el(
      'div',
      { class: 'controls' },
      el('div', { class: 'group' }, choice, search, this.found, allRanks),
      this.app.source.live ? exits(this.app, this.variant) : null,
      legendHere(),
      keyHints(),
    );
  }

  listen() {
    const verbs = {
      zoom: (factor, at) => this.show(zoomed(this.window, factor, at, this.endNs)),
      pan: (share) => this.show(panned(this.window, share, this.endNs)),
      drag: (dx, dy) => this.dragged(dx, dy),
      hover: (event) => this.hover(event),
      leave: hideTip,
      click: (event) => this.click(event),
      open: (event) => this.zoomTo(event),
      choose: (a, b, isDone) => this.choose(a, b, isDone),
      fit: () => this.fit(),
      clear: () => this.clear(),
      neighbour: (way) => this.neighbour(way),
      grip: (grip, ns) => this.gripped(grip, ns),
    };
    listenToLanes(this.lanesCanvas, verbs);
    listenToRuler(this.ruler, verbs);
    listenToOverview(this.overviewCanvas, this, verbs);
    const stopKeys = listenToKeys(verbs);
    this.body.addEventListener(
      'scroll',
      () => {
        this.scrollTop = this.body.scrollTop;
        this.redraw();
        this.ask();
      },
      { passive: true },
    );
    const observer = new ResizeObserver(() => this.resized());
    observer.observe(this.ruler);
    const onresize = () => this.resized();
    addEventListener('resize', onresize);
    this.stop = () => {
      stopKeys();
      observer.disconnect();
      removeEventListener('resize', onresize);
      for (const one of [this.asking, this.selecting]) one.cancel();
      this.search.stop();
    };
  }

  resized() {
    this.viewHeight = Math.min(this.placed.height, Math.max(LEAST_BODY_PX, innerHeight - AROUND_PX));
    this.body.style.height = `${this.viewHeight}px`;
    this.spacer.style.height = `${Math.max(0, this.placed.height - this.viewHeight)}px`;
    this.redraw();
    this.ask();
  }

  scrollToRank() {
    const title = this.placed.titles.find((one) => this.wantedRanks.includes(one.rank));
    if (title && this.placed.height > this.viewHeight) this.body.scrollTop = title.y;
  }

  /** Comes back to what the address says was selected or searched for. */
  restore() {
    const { state } = this.app;
    if (state.get('sel')) this.select({ id: state.get('sel') }, false);
    if (state.get('q')) this.search.find(state.get('q'));
  }

  // Drawing

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.ruler.isConnected) return;
      const colours = palette();
      drawOverview(this.overviewCanvas, this, colours);
      drawRuler(this.ruler, this, colours);
      drawLanes(this.lanesCanvas, this, colours);
      this.lanesCanvas.dataset.drawn = String(this.data != null && this.overview != null);
    });
  }

  /** Shows another window. */
  show(window) {
    this.window = window;
    this.app.state.note({ from: String(window.from), to: String(window.to) });
    hideTip();
    this.redraw();
    this.ask();
  }

  // Asking

  get plotPx() {
    return Math.max(64, this.ruler.clientWidth - LABEL_PX);
  }

  ask() {
    const lanes = lanesBetween(this.placed, this.scrollTop, this.scrollTop + this.viewHeight)
      .map((lane) => lane.lane)
      .slice(0, MOST_LANES);
    if (!lanes.length || covers(this.asked, this.window, lanes)) return;
    this.asking
      .run(
        async (signal) => {
          const { from, to, widthPx } = askedFor(this.window, this.plotPx, this.endNs);
          const answer = await this.get(
            'timeline/window',
            { from_ns: from, to_ns: to, width_px: widthPx, lanes: lanes.join(',') },
            signal,
          );
          if (signal.aborted || answer.state !== 'ready') return;
          this.data = indexed(answer);
          this.asked = { from, to, lanes: new Set(lanes) };
          this.redraw();
          this.ask();
        },
        this.data ? ASK_AFTER_MS : 0,
      )
      .catch((error) => this.failed(error));
  }

  askOverview() {
    if (!this.overviewLanes.length) return;
    const lanes = this.overviewLanes
      .slice(0, MOST_LANES)
      .map((lane) => lane.lane)
      .join(',');
    this.get(
      'timeline/window',
      { from_ns: 0, to_ns: this.endNs, width_px: Math.min(8192, Math.max(600, this.plotPx || 1000)), lanes },
      this.app.signal,
    )
      .then((answer) => {
        if (answer.state !== 'ready') return;
        this.overview = indexed(answer);
        this.redraw();
      })
      .catch((error) => this.failed(error));
  }

  get(route, parameters, signal) {
    return this.app.source.get(
      route,
      { run: this.app.run.name, variant: this.variant.id, ...parameters },
      signal,
    );
  }

  failed(error) {
    if (error.name !== 'AbortError') this.found.textContent = error.message;
  }

  // Moving

  dragged(dx, dy) {
    this.body.scrollTop -= dy;
    this.show(panned(this.window, -dx / this.plotPx, this.endNs));
  }

  gripped({ part, offset }, ns) {
    const { from, to } = this.window;
    if (part === 'all') this.show(clamped({ from: ns - offset, to: ns - offset + (to - from) }, this.endNs));
    else if (part === 'from') this.show(clamped({ from: Math.min(ns, to - 1), to }, this.endNs));
    else this.show(clamped({ from, to: Math.max(ns, from + 1) }, this.endNs));
  }

  fit() {
    if (this.range) this.show(clamped(this.range, this.endNs));
    else if (this.selected)
      this.show(aroundStretch(this.selected.start_ns, this.selected.end_ns, this.endNs));
    else this.show({ from: 0, to: this.endNs });
  }

  clear() {
    this.selected = null;
    this.range = null;
    this.selecting.cancel();
    this.app.state.note({ sel: null });
    hintPanel(this.panel);
    this.redraw();
  }

  // Pointing

  /** What lies under the pointer: a lane, and a block of it if there is one. */
  under(event) {
    const box = this.lanesCanvas.getBoundingClientRect();
    const y = event.clientY - box.top + this.scrollTop;
    const x = event.clientX - box.left;
    const lane = this.placed.lanes.find((one) => y >= one.y && y < one.y + one.height);
    if (!lane) return null;
    if (x < LABEL_PX) return { lane, isLabel: true };
    const nsPerPx = (this.window.to - this.window.from) / this.plotPx;
    const ns = this.window.from + (x - LABEL_PX) * nsPerPx;
    const data = this.data?.lanes.get(lane.lane);
    const index = blockAt(data, Math.floor((y - lane.y) / lane.rowPx), ns, SLACK_PX * nsPerPx);
    return { lane, data, index };
  }

  hover(event) {
    const found = this.under(event);
    const onBlock = found?.index >= 0;
    this.lanesCanvas.style.cursor =
      onBlock || (found?.isLabel && found.lane.hasMore) ? 'pointer' : found?.isLabel ? 'default' : 'grab';
    if (found?.isLabel) return showTip(found.lane.label, event.clientX, event.clientY);
    return onBlock ? showTip(this.told(found), event.clientX, event.clientY) : hideTip();
  }

  told({ lane, data, index }) {
    const long = data.end_ns[index] - data.start_ns[index];
    const kind = this.classes[data.class[index]].replace('_', ' ');
    if (data.name[index] < 0)
      return `${plural(data.count[index], 'block')} of ${kind}, ${duration(data.busy_ns[index])} in ${duration(long)}`;
    return `${this.data.names[data.name[index]]}\n${kind}, ${duration(long)} \u00b7 rank ${lane.rank} \u00b7 ${lane.label}`;
  }

  click(event) {
    this.lanesCanvas.focus({ preventScroll: true });
    const found = this.under(event);
    if (found?.isLabel) return found.lane.hasMore && this.toggle(found.lane);
    if (!(found?.index >= 0)) return this.clear();
    const { data, index } = found;
    if (data.id[index] >= 0) return this.select({ id: data.id[index] }, false);
    this.clear();
    return mergedPanel(this.panel, this.classes[data.class[index]], data.count[index], data.busy_ns[index]);
  }

  toggle(lane) {
    if (!this.expanded.delete(lane.lane)) this.expanded.add(lane.lane);
    this.placed = layout(this.ranks, this.expanded);
    this.resized();
  }

  zoomTo(event) {
    const found = this.under(event);
    if (found?.index >= 0)
      this.show(
        aroundStretch(found.data.start_ns[found.index], found.data.end_ns[found.index], this.endNs, 0.3),
      );
  }

  // Selecting

  /** Selects an event (or a collective on a rank); `bring` moves the window where it isn't in view. */
  select(what, bring = true) {
    this.selecting
      .run(async (signal) => {
        const event = await this.get('timeline/event', what, signal);
        if (event.state !== 'ready') return;
        this.selected = event;
        this.range = null;
        this.app.state.note({ sel: String(event.id) });
        eventPanel(this.panel, event, (other) => this.select(other));
        if (bring) this.bring(event);
        this.redraw();
      })
      .catch((error) => this.failed(error));
  }

  bring(event) {
    const { from, to } = this.window;
    if (event.start_ns < from || event.end_ns > to) {
      const span = Math.max(to - from, (event.end_ns - event.start_ns) * 2);
      const middle = (event.start_ns + event.end_ns) / 2;
      this.show(clamped({ from: middle - span / 2, to: middle + span / 2 }, this.endNs));
    }
    const lane = this.placed.byLane.get(event.lane);
    if (!lane) return;
    if (event.row >= lane.shownRows) this.toggle(lane);
    const y = this.placed.byLane.get(event.lane).y;
    if (y < this.scrollTop || y + lane.rowPx > this.scrollTop + this.viewHeight)
      this.body.scrollTop = y - this.viewHeight / 2;
    this.uncover(y + lane.height);
  }

  // The panel stays at the bottom of the window, over what the page has there: scrolls a lane out of it.
  uncover(bottom) {
    const seen = this.panel.getBoundingClientRect().top;
    const at = this.body.getBoundingClientRect().top + bottom - this.body.scrollTop;
    if (at > seen) scrollBy(0, at - seen + LABEL_PX / 8);
  }

  neighbour(way) {
    const collective = this.selected?.collective;
    if (collective && collective[way] != null)
      this.select({ collective: collective[way], rank: this.selected.rank });
    else if (!collective && this.data?.links.length) {
      const link = this.data.links.find((one) => one.parts[0][4] >= this.window.from) ?? this.data.links[0];
      this.select({ id: link.parts[0][3] });
    }
  }

  choose(a, b, isDone) {
    const ns = (share) =>
      this.window.from + Math.min(Math.max(share, 0), 1) * (this.window.to - this.window.from);
    const [from, to] = [ns(a), ns(b)].sort((x, y) => x - y).map(Math.round);
    this.range = to > from ? { from, to } : null;
    this.redraw();
    if (!isDone || !this.range) return;
    this.selected = null;
    this.app.state.note({ sel: null });
    const lanes = this.placed.lanes
      .slice(0, MOST_LANES)
      .map((lane) => lane.lane)
      .join(',');
    this.selecting
      .run(async (signal) => {
        const sums = await this.get('timeline/selection', { from_ns: from, to_ns: to, lanes }, signal);
        if (sums.state === 'ready') sumsPanel(this.panel, sums, (name) => name);
      })
      .catch((error) => this.failed(error));
  }
}
