// What a timeline has of its trace: the blocks of a stretch around the window, and of the overview.

import { Latest } from '../source.js';
import { indexed, lanesBetween, MOST_LANES } from './layout.js';
import { askedFor, covers } from './window.js';

/** While something is shown already, a moving window has this long to come to rest. */
const ASK_AFTER_MS = 40;

/** Asks the server for what the window needs; what is there stays until the answer has come. */
export class Feed {
  /** @param {Timeline} timeline */
  constructor(timeline) {
    this.timeline = timeline;
    this.latest = new Latest();
    /** @type {IndexedWindow | null} */
    this.data = null;
    /** @type {IndexedWindow | null} */
    this.overview = null;
    /** @type {(Stretch & { lanes: Set<number> }) | null} */
    this.asked = null;
  }

  stop() {
    this.latest.cancel();
  }

  /** Asks for the window, unless what is there covers it finely enough. */
  ask() {
    const { timeline } = this;
    const lanes = this.lanesInView();
    if (!lanes.length || covers(this.asked, timeline.window, lanes)) return;
    this.latest
      .run((signal) => this.load(lanes, signal), this.data ? ASK_AFTER_MS : 0)
      .catch((error) => timeline.failed(error));
  }

  lanesInView() {
    const { placed, scrollTop, viewHeight } = this.timeline;
    return lanesBetween(placed, scrollTop, scrollTop + viewHeight)
      .map((lane) => lane.lane)
      .slice(0, MOST_LANES);
  }

  /** @param {number[]} lanes @param {AbortSignal} signal */
  async load(lanes, signal) {
    const { timeline } = this;
    const { from, to, widthPx } = askedFor(timeline.window, timeline.plotPx, timeline.endNs);
    const asked = { from_ns: from, to_ns: to, width_px: widthPx, lanes: lanes.join(',') };
    const answer = await timeline.get('timeline/window', asked, signal);
    if (signal.aborted || answer.state !== 'ready') return;
    this.data = indexed(answer);
    this.asked = { from, to, lanes: new Set(lanes) };
    timeline.redraw();
    this.ask();
  }

  /** Asks for the whole trace, a thin row per rank, once. */
  async askOverview() {
    const { timeline } = this;
    if (!timeline.overviewLanes.length) return;
    const lanes = timeline.overviewLanes.slice(0, MOST_LANES).map((lane) => lane.lane);
    const widthPx = Math.min(8192, Math.max(600, timeline.plotPx || 1000));
    const asked = { from_ns: 0, to_ns: timeline.endNs, width_px: widthPx, lanes: lanes.join(',') };
    try {
      const answer = await timeline.get('timeline/window', asked, timeline.app.signal);
      if (answer.state !== 'ready') return;
      this.overview = indexed(answer);
      timeline.redraw();
    } catch (error) {
      timeline.failed(error);
    }
  }
}
