// Searching the timeline: matches keep their colour, Enter goes from one to the next.

import { duration, number } from '../shared/format.js';
import { last } from '../shared/scale.js';
import { Latest } from '../source.js';

/** A search on a timeline; `said` is the element that says how many were found. */
export class Search {
  /** @param {Timeline} timeline @param {HTMLElement} said */
  constructor(timeline, said) {
    this.timeline = timeline;
    this.said = said;
    this.latest = new Latest();
    /** @type {Hits | null} */
    this.hits = null;
    /** @type {Promise<void> | null} */
    this.finding = null;
  }

  stop() {
    this.latest.cancel();
  }

  /**
   * Looks for names that contain `text`; an empty one ends the search.
   * @param {string} text
   */
  find(text) {
    const q = text.trim();
    this.timeline.app.state.note({ q: q || null });
    this.hits = null;
    this.timeline.matches = null;
    this.said.textContent = '';
    this.timeline.redraw();
    if (!q) {
      this.latest.cancel();
      return;
    }
    const lower = q.toLowerCase();
    this.timeline.matches = (name) => name.toLowerCase().includes(lower);
    this.finding = this.latest
      .run(async (signal) => {
        const answer = await this.timeline.get(
          'timeline/search',
          { q, after_ns: this.timeline.window.from },
          signal,
        );
        if (answer.state !== 'ready') return;
        this.hits = { q, events: answer.events, total: answer.total, at: -1 };
        const sum = answer.names.reduce((total, named) => total + named.total_ns, 0);
        this.said.textContent = answer.total
          ? `${number(answer.total)} found, ${duration(sum)}; Enter: next`
          : 'nothing found';
      })
      .catch((error) => this.timeline.failed(error));
  }

  /**
   * Selects the next match, or with −1 the one before, once they are known.
   * @param {number} sign
   */
  async next(sign) {
    await this.finding;
    if (!this.hits?.events.length) return;
    const { hits } = this;
    hits.at += sign;
    if (hits.at < 0) hits.at = hits.events.length - 1;
    if (hits.at >= hits.events.length) await this.more(hits);
    const event = hits.events[hits.at];
    if (!event) return;
    this.timeline.select({ id: event.id });
    this.said.textContent = `${number(hits.at + 1)} of ${number(hits.total)}`;
  }

  /**
   * The server gives the first few hundred from a time on; after the last of them come those behind it.
   * @param {Hits} hits
   */
  async more(hits) {
    const isAll = hits.events.length >= hits.total;
    const asked = { q: hits.q, after_ns: last(hits.events).start_ns + 1 };
    const { signal } = this.timeline.app;
    const answer = isAll ? null : await this.timeline.get('timeline/search', asked, signal);
    if (answer?.state === 'ready' && answer.events.length) hits.events.push(...answer.events);
    else hits.at = 0;
  }
}
