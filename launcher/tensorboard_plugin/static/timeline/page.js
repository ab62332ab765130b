// The elements around and of the timeline: headline, controls, canvases, panel.

import { headline, optionsOf, picker, searchField } from '../shared/controls.js';
import { el, hiddenTable, replace } from '../shared/dom.js';
import { duration, lowerFirst, number, plural, three } from '../shared/format.js';
import { legend } from '../shared/phases.js';
import { problemNotes } from '../shared/states.js';
import { bandClass, compactControls } from './compact.js';
import { exits } from './exits.js';
import { lengthNs, meanStepMs } from './layout.js';
import { hintPanel } from './panel.js';

/**
 * The elements that a timeline draws on and writes to.
 * @param {TimelineFacts} view
 * @returns {TimelineParts}
 */
export function timelineParts(view) {
  const keys = 'W and S zoom, A and D pan, F fits, N and P go to the next and previous collective.';
  const lanesCanvas = canvas('lanes', `${sentence(view)} ${keys}`);
  const spacer = el('div');
  return {
    overviewCanvas: canvas(
      'overview',
      'the whole trace; arrow keys move the window, with Shift they resize it',
    ),
    ruler: el('canvas', { 'data-canvas': 'ruler', 'aria-hidden': 'true' }),
    lanesCanvas,
    spacer,
    body: el('div', { class: 'body' }, lanesCanvas, spacer),
    panel: el('section', { class: 'panel', 'aria-label': 'selection', 'aria-live': 'polite' }),
    found: el('span', { class: 'matches', role: 'status' }),
  };
}

/**
 * Builds the page of a timeline into `host`.
 * @param {HTMLElement} host
 * @param {Timeline} view
 */
export function buildPage(host, view) {
  replace(
    host,
    headline(sentence(view), subSentence(view)),
    problemNotes(view.meta.problems, [view.variant.planned.far_note, ...view.meta.warnings].filter((note) => note != null)),
    controls(view),
    el('div', { class: 'timeline' }, view.overviewCanvas, view.ruler, view.body),
    view.panel,
    view.meta.steps.length ? stepTable(view.meta.apart ? view.meta.steps : view.steps) : null,
  );
  hintPanel(view.panel);
}

/** @param {string} name @param {string} label */
function canvas(name, label) {
  return el('canvas', { class: name, tabindex: 0, 'aria-label': label, 'data-canvas': name });
}

/** @param {(TracedStep | MergedStep)[]} steps */
function stepTable(steps) {
  const rows = steps.map((step) => [
    step.step,
    three(step.start_ns / 1e6),
    three(lengthNs(step) / 1e6),
  ]);
  return hiddenTable('steps, ms', ['step', 'start', 'duration'], rows);
}

/** @param {TimelineFacts} view */
function sentence({ app, variant, steps, meta }) {
  const said = variant.planned.explanation;
  const label = app.run.isTraces ? app.run.answer.title : variant.label;
  if (said) return `${label}: ${lowerFirst(said)}`.replace(/([^.])$/, '$1.');
  if (meta.apart) return `${label}: ${plural(meta.ranks.length, 'trace')} without a common moment.`;
  const found = steps.length ? plural(steps.length, 'traced step') : 'no step markers';
  return `${label}: ${found} on ${plural(meta.ranks.length, 'rank')}.`;
}

/** @param {TimelineFacts} view */
function subSentence({ app, variant, steps, meta, endNs }) {
  const shared = meta.linked ? '; ranks on one clock' : '; clocks as recorded';
  const clock = meta.apart ? '; each rank from its own start' : meta.ranks.length > 1 ? shared : '';
  const found = `${number(meta.num_events)} events in ${duration(endNs)}${clock}.`;
  if (app.run.isTraces) return found;
  const traced = meanStepMs(meta.apart ? meta.steps : steps);
  const taken =
    traced && variant.stepMs
      ? `: steps take ${three(traced)} ms here, the timed ones ${three(variant.stepMs)} ms`
      : '';
  return `${found} Recorded after the measurement, with the profiler on${taken}.`;
}

/** @param {Timeline} view */
function controls(view) {
  const { app, variant } = view;
  return el(
    'div',
    { class: 'controls' },
    el('div', { class: 'group' }, choice(view), search(view), view.found, allRanks(view)),
    compactControls(view),
    app.source.live ? exits(app, variant) : null,
    legendHere(view.compact),
    keyHints(),
  );
}

/** @param {Timeline} view */
function choice({ app, variant }) {
  const { run, state } = app;
  if (run.isTraces || !run.traced.length) return null;
  return picker('variant', optionsOf(run.traced), variant.id, (id) =>
    state.go({ tab: 'timeline', variant: id, sel: null, range: null, from: null, to: null, rank: null }),
  );
}

/** @param {Timeline} view */
function search(view) {
  return searchField('kernel, operator or stream', view.app.state.get('q') ?? '', {
    oninput: (q) => view.search.find(q),
    onenter: (back) => view.search.next(back ? -1 : 1),
    onleave: () => {
      view.search.find('');
      view.lanesCanvas.focus();
    },
  });
}

/** @param {Timeline} view */
function allRanks({ app, ranks, meta }) {
  if (ranks.length >= meta.ranks.length) return null;
  const onclick = () => app.state.go({ tab: 'timeline', rank: null });
  return el('button', { class: 'button', type: 'button', onclick }, `All ${number(meta.ranks.length)} ranks`);
}

/**
 * The phases that blocks can have.
 * @param {Compact | null} compact
 */
function legendHere(compact) {
  const list = compact
    ? legend(compact.colours.legend.map((each) => each.class), (name) => bandClass(compact, name))
    : legend(['compute', 'transfer', 'wait', 'copy', 'input']);
  list.style.marginLeft = '0';
  return list;
}

/** What single keys do. */
function keyHints() {
  /** @param {string} name */
  const key = (name) => el('kbd', {}, name);
  return el(
    'div',
    { class: 'keys', 'aria-hidden': 'true' },
    key('W'),
    key('S'),
    'zoom \u00b7',
    key('A'),
    key('D'),
    'pan \u00b7',
    key('F'),
    'fit \u00b7',
    key('/'),
    'search',
  );
}
