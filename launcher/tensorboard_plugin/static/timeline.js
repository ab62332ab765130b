// Timeline: all ranks in aligned lanes. The server is asked only for what the window can show; what is
// there already is drawn while the answer is under way.

import { number } from './format.js';
import { brokenState, indexingState, untracedState } from './states.js';
import { palette } from './theme.js';
import { hideTip } from './tip.js';
import { drawLanes, drawOverview, drawRuler } from './tl_draw.js';
import { Feed } from './tl_feed.js';
import { listenToKeys, listenToLanes, listenToOverview, listenToRuler } from './tl_input.js';
import { LABEL_PX, layout, mergedSteps } from './tl_layout.js';
import { buildPage } from './tl_page.js';
import { click, dragged, gripped, hover, zoomTo } from './tl_pointer.js';
import { Selection } from './tl_select.js';
import { aroundStretch, clamped, firstWindow, panned, zoomed } from './tl_window.js';

const AROUND_PX = 110;
const LEAST_BODY_PX = 220;
/** With more ranks than this, only those asked for are laid out when some are. */
const FEW_RANKS = 8;

/** Draws the view into `host`. */
export async function showTimeline(host, app) {
  const { run, state } = app;
  const variant = run.choose(state.get('variant'), run.traced);
  const asked = run.byId.get(state.get('variant'));
  if (asked && !asked.hasTraces) return untracedState(host, asked.label, run.isRunning);
  if (!variant) return untracedState(host, null, run.isRunning);
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
    Object.assign(this, { app, variant, meta, keeps: true, classes: meta.classes, version: meta.version });
    this.endNs = Math.max(1, meta.end_ns);
    this.steps = meta.apart ? [] : mergedSteps(meta.steps); // else steps of one number are one step
    this.expanded = new Set();
    this.scrollTop = 0;
    this.feed = new Feed(this);
    this.selection = new Selection(this);
    this.window = this.storedWindow() ?? firstWindow(this.steps, this.endNs);
    this.overviewLanes = meta.ranks
      .map((rank) => ({ ...rank.lanes.find((lane) => lane.kind === 'overview'), label: rank.label }))
      .filter((lane) => lane.lane != null);
    this.place();
    buildPage(host, this);
    this.listen();
    this.feed.askOverview();
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

  listen() {
    const verbs = this.verbs();
    listenToLanes(this.lanesCanvas, verbs);
    listenToRuler(this.ruler, verbs);
    listenToOverview(this.overviewCanvas, this, verbs);
    const stopKeys = listenToKeys(verbs);
    this.body.addEventListener('scroll', () => this.scrolled(), { passive: true });
    const onresize = () => this.resized();
    const observer = new ResizeObserver(onresize);
    observer.observe(this.ruler);
    addEventListener('resize', onresize);
    this.stop = () => {
      stopKeys();
      observer.disconnect();
      removeEventListener('resize', onresize);
      for (const one of [this.feed, this.selection, this.search]) one.stop();
    };
  }

  /** What mouse, touch and keys can ask for. */
  verbs() {
    return {
      zoom: (factor, at) => this.show(zoomed(this.window, factor, at, this.endNs)),
      pan: (share) => this.pan(share),
      drag: (dx, dy) => dragged(this, dx, dy),
      hover: (event) => hover(this, event),
      leave: hideTip,
      click: (event) => click(this, event),
      open: (event) => zoomTo(this, event),
      choose: (a, b, isDone) => this.selection.choose(a, b, isDone),
      fit: () => this.fit(),
      clear: () => this.selection.clear(),
      neighbour: (way) => this.selection.neighbour(way),
      grip: (grip, ns) => gripped(this, grip, ns),
    };
  }

  scrolled() {
    this.scrollTop = this.body.scrollTop;
    this.redraw();
    this.feed.ask();
  }

  resized() {
    this.viewHeight = Math.min(this.placed.height, Math.max(LEAST_BODY_PX, innerHeight - AROUND_PX));
    this.body.style.height = `${this.viewHeight}px`;
    this.spacer.style.height = `${Math.max(0, this.placed.height - this.viewHeight)}px`;
    this.redraw();
    this.feed.ask();
  }

  scrollToRank() {
    const title = this.placed.titles.find((one) => this.wantedRanks.includes(one.rank));
    if (title && this.placed.height > this.viewHeight) this.body.scrollTop = title.y;
  }

  /** Comes back to what the address says was selected or searched for. */
  restore() {
    const { state } = this.app;
    if (state.get('sel')) this.select({ id: state.get('sel') }, false);
    else if (state.get('range')) this.selection.restoreRange(state.list('range'));
    if (state.get('q')) this.search.find(state.get('q'));
  }

  // What is drawn: the feed's blocks, the selection, the search's matches.

  get data() {
    return this.feed.data;
  }

  get overview() {
    return this.feed.overview;
  }

  get selected() {
    return this.selection.event;
  }

  get range() {
    return this.selection.range;
  }

  get plotPx() {
    return Math.max(64, this.ruler.clientWidth - LABEL_PX);
  }

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
    this.feed.ask();
  }

  pan(share) {
    this.show(panned(this.window, share, this.endNs));
  }

  fit() {
    if (this.range) this.show(clamped(this.range, this.endNs));
    else if (this.selected)
      this.show(aroundStretch(this.selected.start_ns, this.selected.end_ns, this.endNs));
    else this.show({ from: 0, to: this.endNs });
  }

  select(what, bring = true) {
    this.selection.select(what, bring);
  }

  toggle(lane) {
    if (!this.expanded.delete(lane.lane)) this.expanded.add(lane.lane);
    this.placed = layout(this.ranks, this.expanded);
    this.resized();
  }

  /** The run has changed: perhaps its traces have. */
  update() {
    return this.app.renew(this);
  }

  /** An answer from the traces that are shown; where they have changed, all is drawn again. */
  async get(route, parameters, signal) {
    const asked = { run: this.app.run.name, variant: this.variant.id, ...parameters };
    const answer = await this.app.source.get(route, asked, signal);
    if (answer.version === this.version) return answer;
    this.app.state.note({ sel: null, range: null });
    this.app.draw();
    throw new DOMException('the trace has changed', 'AbortError');
  }

  failed(error) {
    if (error.name !== 'AbortError') this.found.textContent = error.message;
  }
}
