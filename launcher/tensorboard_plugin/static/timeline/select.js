// What is selected on a timeline: one event, a collective on all its ranks, or a stretch of time.

import { Latest } from '../source.js';
import { LABEL_PX, MOST_LANES, shownBox } from './layout.js';
import { eventPanel, hintPanel, sumsPanel } from './panel.js';
import { clamped } from './window.js';

/** The selection of a timeline; the timeline draws it. */
export class Selection {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.latest = new Latest();
    /** @type {EventAnswer | null} */
    this.event = null;
    /** @type {Stretch | null} */
    this.range = null;
  }

  stop() {
    this.latest.cancel();
  }

  /** Nothing is selected any more. */
  clear() {
    this.event = null;
    this.range = null;
    this.latest.cancel();
    this.timeline.app.state.note({ sel: null, range: null });
    hintPanel(this.timeline.panel);
    this.timeline.redraw();
  }

  /**
   * Selects an event (or a collective on a rank); `bring` moves the window where it isn't in view.
   * @param {EventRequest} what
   * @param {boolean} [bring]
   */
  select(what, bring = true) {
    const { timeline } = this;
    this.latest
      .run(async (signal) => {
        const event = await timeline.get('timeline/event', what, signal);
        if (event.state !== 'ready') return;
        this.event = event;
        this.range = null;
        timeline.app.state.note({ sel: String(event.id), range: null });
        eventPanel(timeline.panel, event, (other) => this.select(other));
        if (bring) this.bring(event);
        timeline.redraw();
      })
      .catch((error) => timeline.failed(error));
  }

  /** @param {EventAnswer} event */
  bring(event) {
    const { timeline } = this;
    const { from, to } = timeline.window;
    if (event.start_ns < from || event.end_ns > to) {
      const span = Math.max(to - from, (event.end_ns - event.start_ns) * 2);
      const middle = (event.start_ns + event.end_ns) / 2;
      timeline.show(clamped({ from: middle - span / 2, to: middle + span / 2 }, timeline.endNs));
    }
    const folded = timeline.placed.byLane.get(event.lane);
    if (folded && event.row >= folded.shownRows) timeline.toggle(folded);
    const box = shownBox(timeline.placed, event.lane, event.row, event.rank);
    if (!box) return;
    const { y, height } = box;
    if (y < timeline.scrollTop || y + height > timeline.scrollTop + timeline.viewHeight)
      timeline.body.scrollTop = y - timeline.viewHeight / 2;
    this.uncover(y + height);
  }

  /**
   * The panel stays at the bottom of the window, over what the page has there: scrolls a lane out of it.
   * @param {number} bottom
   */
  uncover(bottom) {
    const { panel, body } = this.timeline;
    const seen = panel.getBoundingClientRect().top;
    const at = body.getBoundingClientRect().top + bottom - body.scrollTop;
    if (at > seen) scrollBy(0, at - seen + LABEL_PX / 8);
  }

  /**
   * Goes to the `next` or `previous` collective of the same group; to one in the window if none is selected.
   * @param {'next' | 'previous'} way
   */
  neighbour(way) {
    const { event } = this;
    const { data, window } = this.timeline;
    const next = event?.collective?.[way];
    if (event && next != null) this.select({ collective: next, rank: event.rank });
    else if (!event?.collective && data?.links.length) {
      const link = data.links.find((each) => each.parts[0][4] >= window.from) ?? data.links[0];
      this.select({ id: link.parts[0][3] });
    }
  }

  /**
   * Chooses the stretch between two shares of the window; once the choice is done it is summed up.
   * @param {number} a
   * @param {number} b
   * @param {boolean} isDone
   */
  choose(a, b, isDone) {
    const { timeline } = this;
    const { from: start, to: end } = timeline.window;
    /** @param {number} share */
    const ns = (share) => start + Math.min(Math.max(share, 0), 1) * (end - start);
    const [from, to] = [ns(a), ns(b)].sort((x, y) => x - y).map(Math.round);
    this.range = to > from ? { from, to } : null;
    timeline.redraw();
    if (!isDone || !this.range) return;
    this.event = null;
    timeline.app.state.note({ sel: null, range: `${from}~${to}` });
    this.sumUp(from, to);
  }

  /**
   * Chooses the stretch that the address has, as far as the trace has it.
   * @param {string[]} ends
   */
  restoreRange(ends) {
    const [from, to] = ends.map(Number).map((ns) => Math.min(Math.max(Math.round(ns), 0), this.timeline.endNs));
    if (!(to > from)) return;
    this.range = { from, to };
    this.sumUp(from, to);
  }

  /** @param {number} from @param {number} to */
  sumUp(from, to) {
    const { timeline } = this;
    const lanes = timeline.placed.lanes.slice(0, MOST_LANES).map((lane) => lane.lane);
    // Rows of the compact timeline have no names: those of all lanes are summed up.
    const named = timeline.compact ? {} : { lanes: lanes.join(',') };
    this.latest
      .run(async (signal) => {
        const asked = { from_ns: from, to_ns: to, ...named };
        const sums = await timeline.get('timeline/selection', asked, signal);
        if (sums.state === 'ready') sumsPanel(timeline.panel, sums);
      })
      .catch((error) => timeline.failed(error));
  }
}
