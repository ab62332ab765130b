// What is shown where there is nothing to show yet, or something is broken: what happened, and what to do.

import { headline } from './controls.js';
import { el, replace } from './dom.js';
import { bytes, coarse, number } from './format.js';

/**
 * The frame of every state.
 * @param {Element} host
 * @param {Attributes<HTMLElement>} attributes
 * @param {...Child} children
 * @returns {undefined}
 */
function box(host, attributes, ...children) {
  replace(host, el('div', { class: 'state', ...attributes }, ...children));
}

/**
 * No run in the watched directory.
 * @param {Element} host
 * @param {string} logdir
 * @param {number} reloadS
 * @returns {undefined}
 */
export function emptyState(host, logdir, reloadS) {
  box(
    host,
    { 'data-state': 'empty' },
    headline('No runs here yet.', 'Start one; this page fills in as rounds finish.'),
    el('pre', {}, 'gpurun examples/quickstart.yaml'),
    el(
      'p',
      { class: 'muted' },
      'Looking in ',
      el('span', { style: { color: 'var(--text)' } }, logdir || 'the log directory'),
      `, again every ${number(reloadS ?? 5)} s.`,
    ),
  );
}

/**
 * A trace is being indexed.
 * @param {Element} host
 * @param {string} label
 * @param {UnderWay} answer
 * @returns {undefined}
 */
export function indexingState(host, label, answer) {
  if (answer.state !== 'indexing') return;
  const { done_bytes: done, total_bytes: total, seconds_left: seconds } = answer;
  const left = seconds == null ? '' : `, about ${coarse(seconds)} left`;
  box(
    host,
    { 'data-state': 'indexing', role: 'status' },
    headline(
      `Indexing the trace of ${label}.`,
      `${bytes(done)} of ${bytes(total)}${left}. This happens once; later the trace opens immediately.`,
    ),
    meter(total ? done / total : 0, 'indexed'),
  );
}

/**
 * The tables of traces are being made: first their index, then what only the tables need.
 * @param {Element} host
 * @param {string} label
 * @param {UnderWay} answer
 * @returns {undefined}
 */
export function readingState(host, label, answer) {
  if (answer.state === 'indexing') return indexingState(host, label, answer);
  box(
    host,
    { 'data-state': 'building', role: 'status' },
    headline(
      `Reading the trace of ${label} for this table.`,
      'This happens once for each step that is chosen, and once more for the critical path, which takes longest.',
    ),
  );
  return undefined;
}

/**
 * A thin bar that fills.
 * @param {number | null} share
 * @param {string} label
 */
export function meter(share, label) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  return el(
    'div',
    {
      class: 'meter',
      role: 'progressbar',
      'aria-label': label,
      'aria-valuenow': percent,
      'aria-valuemin': 0,
      'aria-valuemax': 100,
    },
    el('span', { style: { width: `${percent}%` } }),
  );
}

/**
 * Instead of what the traces of a variant would show: they can't be read, or there are none.
 * @param {Element} host
 * @param {string} label
 * @param {{ state: 'broken', problems: Problem[] } | { state: 'none' }} answer
 * @param {Retry} retry
 */
export function noTracesState(host, label, answer, retry) {
  return answer.state === 'broken'
    ? brokenState(host, label, answer.problems, retry)
    : untracedState(host, retry.isTraces ? null : label);
}

/**
 * A trace that can't be read: which file, where in it, and, in a run of ours, what still works.
 * @param {Element} host
 * @param {string} label
 * @param {Problem[]} problems
 * @param {Retry} retry
 * @returns {undefined}
 */
export function brokenState(host, label, problems, { again, live, isTraces }) {
  const first = problems[0] ?? { file: '', message: 'no reason is known', byte: null };
  box(
    host,
    { 'data-state': 'broken' },
    headline(
      isTraces
        ? `The traces of ${label} can\u2019t be read.`
        : `The trace of ${label}${ofRank(first.file)} can\u2019t be read.`,
      whatIsWrong(first),
    ),
    problems.map((problem) =>
      el('p', {}, el('code', {}, problem.file), problems.length > 1 ? ` ${problem.message}` : null),
    ),
    isTraces
      ? null
      : el(
          'dl',
          {},
          el('dt', {}, 'All other variants'),
          el('dd', {}, 'shown'),
          el('dt', {}, 'Splits, Devices'),
          el('dd', {}, 'not affected'),
        ),
    live
      ? el(
          'div',
          { class: 'actions' },
          el(
            'button',
            { class: 'button', type: 'button', onclick: () => navigator.clipboard?.writeText(first.file) },
            'Copy file name',
          ),
          el('button', { class: 'button', type: 'button', onclick: again }, 'Read again'),
        )
      : null,
  );
}

/**
 * `, rank 0,` of a file that is named after its rank.
 * @param {string} file
 */
function ofRank(file) {
  const rank = /(?:^|\/)rank(\d+)\./.exec(file);
  return rank ? `, rank ${rank[1]},` : '';
}

/** @param {Pick<Problem, 'message' | 'byte'>} problem */
function whatIsWrong({ message, byte }) {
  const sentence = `${message[0].toUpperCase()}${message.slice(1)}`.replace(/\.?$/, '.');
  return saysWhere(message, byte) ? sentence : `${sentence} Byte ${number(byte)}.`;
}

/**
 * Whether there is no place to add to a message.
 * @param {string} message
 * @param {number | null} byte
 */
function saysWhere(message, byte) {
  return byte == null || /\bbyte\b/.test(message);
}

/**
 * The variant whose traces a view shows: the one asked for, else any; `null` where there are none, which `host` says then.
 * @param {Element} host
 * @param {OpenApp} app
 */
export function tracedVariant(host, { run, state }) {
  const asked = run.byId.get(state.get('variant') ?? '');
  const variant = asked && !asked.hasTraces ? null : run.choose(asked?.id ?? null, run.traced);
  if (!variant) nothingTraced(host, run, asked);
  return variant;
}

/**
 * The run, or one variant of it, has no traces.
 * @param {Element} host
 * @param {Run} run
 * @param {Variant} [asked]
 */
export function nothingTraced(host, run, asked) {
  const variants = asked ? [asked] : run.variants;
  const why = variants.map((variant) => variant.planned.untraced).find((text) => text != null);
  return untracedState(host, asked?.label ?? null, run.isRunning, why);
}

/**
 * A variant without traces: of a run that goes on, they are still to come; a program may have ended before them.
 * @param {Element} host
 * @param {string | null} label
 * @param {boolean} [isRunning]
 * @param {string} [why]
 * @returns {undefined}
 */
export function untracedState(host, label, isRunning = false, why) {
  if (isRunning)
    box(
      host,
      { 'data-state': 'none' },
      headline(
        `${label ?? 'This run'} is not traced yet.`,
        'Unless the job says otherwise, a few steps are traced when the rounds are done.',
      ),
    );
  else
    box(
      host,
      { 'data-state': 'none' },
      headline(
        label ? `${label} has no trace.` : 'Nothing was traced in this run.',
        why ?? 'A few steps are traced, unless the job says otherwise.',
      ),
      why ? null : el('pre', {}, 'profile: {steps: 3}'),
    );
}

/**
 * Traces that gpurun did not record, of which none may be opened.
 * @param {Element} host
 * @param {string} label
 * @param {Problem[]} problems
 * @returns {undefined}
 */
export function unopenedState(host, label, problems) {
  box(
    host,
    { 'data-state': 'unopened' },
    headline(
      `No trace of ${label} is opened.`,
      whatIsWrong({ message: `${problems.length > 1 ? 'Each' : 'It'} ${problems[0].message}`, byte: null }),
    ),
    problems.map((problem) => el('p', {}, el('code', {}, problem.file))),
  );
}

/**
 * Something failed that should not have.
 * @param {Element} host
 * @param {string} message
 * @param {() => void} again
 * @returns {undefined}
 */
export function failedState(host, message, again) {
  box(
    host,
    { 'data-state': 'failed', role: 'alert' },
    headline('This view could not be loaded.', message),
    el('p', {}, el('button', { class: 'button', type: 'button', onclick: again }, 'Try again')),
  );
}

/**
 * Some files couldn't be read while others could.
 * @param {Problem[]} [problems]
 * @param {string[]} [warnings]
 */
export function problemNotes(problems = [], warnings = []) {
  const lines = [
    ...problems.map(
      (problem) => `${problem.file} ${problem.message}${saysWhere(problem.message, problem.byte) ? '' : ` (byte ${number(problem.byte)})`}`,
    ),
    ...warnings,
  ];
  return lines.length
    ? el(
        'div',
        { class: 'problems', role: 'note' },
        lines.slice(0, 5).map((line) => el('div', {}, line)),
        lines.length > 5 ? `and ${lines.length - 5} more` : null,
      )
    : null;
}

/**
 * What a run does now and how far it is; that it stopped, if it did.
 * @param {ProgressAnswer} progress
 */
export function runningStrip({ stage, status, done, seconds_left: left }) {
  if (status !== 'running' || !stage)
    return status === 'stopped'
      ? el(
          'p',
          { class: 'problems' },
          'This run stopped before it was done; gpurun --resume RUN continues it.',
        )
      : null;
  return el(
    'div',
    { class: 'running' },
    el('span', { class: 'strong' }, `running: ${[stage.label, stage.text].filter(Boolean).join(', ')}`),
    done == null ? null : meter(done, 'progress of the run'),
    el('span', { class: 'muted' }, left == null ? '' : `${coarse(left)} left`),
  );
}
