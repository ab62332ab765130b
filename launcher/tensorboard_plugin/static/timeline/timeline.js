// Timeline: all ranks in aligned lanes. The server is asked only for what the window can show; what is
// there already is drawn while the answer is under way.

import { number } from '../shared/format.js';
import { indexingState, noTracesState, tracedVariant } from '../shared/states.js';
import { isAbort, messageOf } from '../source.js';
import { palette } from '../shared/theme.js';
import { hideTip } from '../shared/tip.js';
import { drawLanes } from './canvas/lanes.js';
import { drawOverview, drawRuler } from './canvas/ruler.js';
import { compactLayout, compactOf, FEW_RANKS } from './compact.js';
import { Feed } from './feed.js';
import { listenToKeys, listenToLanes, listenToOverview, listenToRuler } from './input.js';
import { LABEL_PX, layout, mergedSteps } from './layout.js';
import { buildPage, timelineParts } from './page.js';
import { click, dragged, gripped, hover, zoomTo } from './pointer.js';
import { Search } from './search.js';
import { Selection } from './select.js';
import { aroundStretch, clamped, firstWindow, panned, zoomed } from './window.js';

const AROUND_PX = 110;
const LEAST_BODY_PX = 220;

/**
 * Draws the view into `host`.
 * @param {HTMLElement} host
 * @param {OpenApp} app
 */
export async function showTimeline(host, app) {
  const { run } = app;
  const variant = tracedVariant(host, app);
  if (!variant) return undefined;
  const label = run.isTraces ? run.answer.title : variant.label;
  const meta = await app.traced('timeline/meta', { variant: variant.id }, (answer) =>
    indexingState(host, label, answer),
  );
  if (!meta) return undefined;
  if (meta.state !== 'ready') return noTracesState(host, label, meta, app.retry());
  return new Timeline(host, app, variant, meta);
}

export class Timeline {
  /** @param {HTMLElement} host @param {OpenApp} app @param {Variant} variant @param {MetaAnswer} meta */
  constructor(host, app, variant, meta) {
    this.app = app;
    this.variant = variant;
    this.meta = meta;
    this.keeps = true;
    this.classes = meta.classes;
    this.version = meta.version;
    this.endNs = Math.max(1, meta.end_ns);
    this.steps = meta.apart ? [] : mergedSteps(meta.steps); // else steps of one number are one step
    /** @type {Set<number>} */
    this.expanded = new Set();
    this.scrollTop = 0;
    this.viewHeight = 0;
    this.frame = 0;
    /** @type {((name: string) => boolean) | null} */
    this.matches = null; // whether a block's name is searched for
    this.feed = new Feed(this);
    this.selection = new Selection(this);
    this.window = this.storedWindow() ?? firstWindow(this.steps, this.endNs);
    this.overviewLanes = meta.ranks.flatMap((rank) => {
      const lane = rank.lanes.find((each) => each.kind === 'overview');
      return lane ? [{ ...lane, label: rank.label }] : [];
    });
    this.ranks = this.shownRanks();
    this.compact = compactOf(meta, this.ranks, app.state);
    this.placed = this.place();
    const parts = timelineParts(this);
    this.overviewCanvas = parts.overviewCanvas;
    this.ruler = parts.ruler;
    this.lanesCanvas = parts.lanesCanvas;
    this.body = parts.body;
    this.spacer = parts.spacer;
    this.panel = parts.panel;
    this.found = parts.found;
    this.search = new Search(this, this.found);
    buildPage(host, this);
    this.stopListening = this.listen();
    this.feed.askOverview();
    this.resized();
    this.scrollToRank();
    this.restore();
  }

  storedWindow() {
    const { state } = this.app;
    const [from, to] = [Number(state.get('from') ?? NaN), Number(state.get('to') ?? NaN)];
    return to > from ? clamped({ from, to }, this.endNs) : null;
  }

  // Layout

  get wantedRanks() {
    return (this.app.state.list('rank') ?? []).map(Number);
  }

  shownRanks() {
    const all = this.meta.ranks;
    const wanted = all.length > FEW_RANKS ? all.filter((rank) => this.wantedRanks.includes(rank.rank)) : [];
    return wanted.length ? wanted : all;
  }

  place() {
    return this.compact ? compactLayout(this.ranks, this.compact) : layout(this.ranks, this.expanded);
  }

  /** @param {PlacedTitle} title */
  titleOf(title) {
    const rank = this.variant.ranks.find((each) => each.rank === title.rank);
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
    return () => {
      stopKeys();
      observer.disconnect();
      removeEventListener('resize', onresize);
    };
  }

  stop() {
    this.stopListening();
    for (const each of [this.feed, this.selection, this.search]) each.stop();
  }

  /**
   * What mouse, touch and keys can ask for.
   * @returns {Verbs}
   */
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
    const title = this.placed.titles.find((each) => this.wantedRanks.includes(each.rank));
    if (title && this.placed.height > this.viewHeight) this.body.scrollTop = title.y;
  }

  /** Comes back to what the address says was selected or searched for. */
  restore() {
    const { state } = this.app;
    const [selected, range, text] = [state.get('sel'), state.list('range'), state.get('q')];
    if (selected) this.select({ id: selected }, false);
    else if (range) this.selection.restoreRange(range);
    if (text) this.search.find(text);
  }

  // What is drawn: the feed's blocks, the selection, the search's matches.

  get data() {
    return this.feed.data;
  }

  get loaded() {
    return this.feed.asked;
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

  /**
   * Shows another window.
   * @param {Stretch} window
   */
  show(window) {
    this.window = window;
    this.app.state.note({ from: String(window.from), to: String(window.to) });
    hideTip();
    this.redraw();
    this.feed.ask();
  }

  /** @param {number} share */
  pan(share) {
    this.show(panned(this.window, share, this.endNs));
  }

  fit() {
    if (this.range) this.show(clamped(this.range, this.endNs));
    else if (this.selected)
      this.show(aroundStretch(this.selected.start_ns, this.selected.end_ns, this.endNs));
    else this.show({ from: 0, to: this.endNs });
  }

  /** @param {EventRequest} what @param {boolean} [bring] */
  select(what, bring = true) {
    this.selection.select(what, bring);
  }

  /** @param {Lane} lane */
  toggle(lane) {
    if (!this.expanded.delete(lane.lane)) this.expanded.add(lane.lane);
    this.placed = this.place();
    this.resized();
  }

  /** The run has changed: perhaps its traces have. */
  update() {
    return this.app.renew(this);
  }

  /**
   * An answer from the traces that are shown; where they have changed, all is drawn again.
   * @template {TimelineRoute} R
   * @param {R} route
   * @param {Asked} parameters
   * @param {AbortSignal} [signal]
   * @returns {Promise<Routes[R]>}
   */
  async get(route, parameters, signal) {
    const asked = { run: this.app.run.name, variant: this.variant.id, ...parameters };
    const answer = await this.app.source.get(route, asked, signal);
    if (answer.version === this.version) return answer;
    this.app.state.note({ sel: null, range: null });
    this.app.draw();
    throw new DOMException('the trace has changed', 'AbortError');
  }

  /** @param {unknown} error */
  failed(error) {
    if (!isAbort(error)) this.found.textContent = messageOf(error);
  }
}
