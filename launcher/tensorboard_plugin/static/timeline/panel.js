// The panel below the timeline: explains what is selected, or sums up a stretch of time.

import { el, replace } from '../shared/dom.js';
import { bytes, duration, number, plural, three } from '../shared/format.js';
import { DEVICE_PHASES } from '../shared/phases.js';
import { tipped } from '../shared/tip.js';

const NAMES_SHOWN = 8;
/**
 * A collective has two sums of one name.
 * @type {{ [kind: string]: string }}
 */
const PART_OF = { wait: 'waiting, ', transfer: 'transfer, ' };

/**
 * Nothing selected: what can be done here.
 * @param {HTMLElement} panel
 */
export function hintPanel(panel) {
  replace(
    panel,
    el(
      'p',
      { class: 'muted wide' },
      'Click a block to see what it is and what it waited for. Drag over the ruler (or with Shift over the lanes) to sum up a stretch of time. ',
      'The wheel zooms, dragging moves; over the names the wheel scrolls.',
    ),
  );
}

/**
 * An event: name, what it means, the same collective on all ranks, figures.
 * @param {HTMLElement} panel
 * @param {EventAnswer} event
 * @param {GoTo} goTo
 */
export function eventPanel(panel, event, goTo) {
  const { collective } = event;
  replace(
    panel,
    el('div', {}, el('h2', {}, event.name), el('div', { class: 'small' }, whereIs(event)), explained(event)),
    collective ? collectiveFigure(collective, goTo) : launchFigure(event, goTo),
    figures(firstFigures(event, goTo)),
    figures(secondFigures(event)),
  );
}

/** @param {EventAnswer} event */
function whereIs(event) {
  const step = event.step == null ? null : `step ${number(event.step)}`;
  return [event.lane_label, `rank ${event.rank}`, step].filter(Boolean).join(' \u00b7 ');
}

/** @param {EventAnswer} event */
function explained(event) {
  const { collective } = event;
  const own = collective?.ranks.find((rank) => rank.rank === event.rank);
  if (!collective || !own) return null;
  const moved = `moved ${collective.bytes ? `${bytes(collective.bytes)} ` : ''}in ${duration(own.transfer_ns)}`;
  const hiddenText =
    event.exposed_ns === 0
      ? 'All of it hidden behind compute.'
      : event.exposed_ns == null
        ? ''
        : `${duration(event.exposed_ns)} of it ${event.exposed_ns < event.duration_ns ? 'is' : 'are'} not hidden by compute.`;
  const sentence =
    own.wait_ns
      ? [
          'Waited ',
          el('strong', { class: 'slower' }, duration(own.wait_ns)),
          ` for rank ${collective.last_rank}, then ${moved}.`,
        ]
      : [
          collective.ranks.length > 1 ? 'Came last; the others waited for it. ' : '',
          moved[0].toUpperCase() + moved.slice(1),
          '.',
        ];
  return [el('p', {}, sentence), el('p', { class: 'small' }, hiddenText)];
}

/** @param {CollectiveAnswer} collective @param {GoTo} goTo */
function collectiveFigure(collective, goTo) {
  const ranks = collective.ranks;
  const start = Math.min(...ranks.map((rank) => rank.start_ns));
  const end = Math.max(...ranks.map((rank) => rank.start_ns + (rank.wait_ns ?? 0) + rank.transfer_ns));
  /** @param {number} ns */
  const share = (ns) => `${(100 * ns) / Math.max(1, end - start)}%`;
  const rows = ranks
    .slice(0, NAMES_SHOWN)
    .map((rank) =>
      el(
        'div',
        { class: 'same-rank' },
        el('span', {}, `rank ${rank.rank}`),
        el(
          'div',
          { class: 'same-bar' },
          sameBar('wait', rank.start_ns - start, rank.wait_ns ?? 0, rank, share, goTo),
          sameBar('transfer', rank.start_ns + (rank.wait_ns ?? 0) - start, rank.transfer_ns, rank, share, goTo),
        ),
      ),
    );
  const left = ranks.length - rows.length;
  return el(
    'figure',
    {},
    el(
      'figcaption',
      {},
      ranks.length === 1
        ? 'the collective, ms'
        : ranks.length === 2
          ? 'the same collective on both ranks, ms'
          : 'the same collective on all ranks, ms',
    ),
    rows,
    left > 0 ? el('div', { class: 'small' }, `and ${plural(left, 'more rank')}`) : null,
    el(
      'div',
      { class: 'small' },
      collective.next != null || collective.previous != null ? ['N: next, P: previous of this group'] : '',
    ),
  );
}

/**
 * @param {string} name
 * @param {number} at
 * @param {number} length
 * @param {CollectiveRank} rank
 * @param {(ns: number) => string} share
 * @param {GoTo} goTo
 */
function sameBar(name, at, length, rank, share, goTo) {
  if (!(length > 0)) return null;
  const isWide = parseFloat(share(length)) > 16;
  const text = isWide ? el('i', {}, three(length / 1e6)) : null;
  return el(
    'span',
    {
      class: name,
      style: { left: share(at), width: share(length) },
      onclick: () => goTo({ id: rank.id }),
      ...tipped(`rank ${rank.rank}: ${name} ${duration(length)}`),
    },
    text,
  );
}

/** @param {EventAnswer} event @param {GoTo} goTo */
function launchFigure(event, goTo) {
  if (!event.launches?.count) return el('div');
  const { count, first_id: first } = event.launches;
  const show = () => first != null && goTo({ id: first });
  return el(
    'div',
    { class: 'small' },
    `Launches ${plural(count, 'block')} on the device. `,
    first == null
      ? null
      : el(
          'a',
          {
            tabindex: 0,
            role: 'button',
            onclick: show,
            onkeydown: (key) => key.key === 'Enter' && show(),
          },
          'Show the first',
        ),
  );
}

/** @param {Figure[]} pairs */
function figures(pairs) {
  return el(
    'dl',
    {},
    pairs
      .filter(([, value]) => value != null && value !== '')
      .flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]),
  );
}

/** @param {EventAnswer} event @param {GoTo} goTo @returns {Figure[]} */
function firstFigures(event, goTo) {
  /** @param {{ id: number, name: string } | null} other */
  const link = (other) =>
    other &&
    el(
      'a',
      {
        tabindex: 0,
        role: 'button',
        onclick: () => goTo({ id: other.id }),
        onkeydown: (key) => key.key === 'Enter' && goTo({ id: other.id }),
      },
      other.name,
    );
  return [
    ['duration, ms', three(event.duration_ns / 1e6)],
    ['self, ms', event.self_ns == null ? null : three(event.self_ns / 1e6)],
    [
      'exposed, ms',
      event.exposed_ns == null ? null : event.exposed_ns === 0 ? '0' : three(event.exposed_ns / 1e6),
    ],
    ['inside', link(event.parent)],
    ['launched by', link(event.launched_by)],
    ['correlation', event.correlation == null ? null : number(event.correlation)],
  ];
}

/** @param {EventAnswer} event @returns {Figure[]} */
function secondFigures(event) {
  const { collective } = event;
  /** @type {Figure[]} */
  const pairs = [
    ['starts at, ms', three(event.start_ns / 1e6)],
    [
      'launch to start, \u00b5s',
      event.launch_to_start_ns == null ? null : three(event.launch_to_start_ns / 1e3),
    ],
  ];
  if (!collective) return pairs;
  return [
    ['bytes', collective.bytes == null ? null : number(collective.bytes)],
    ['kind', collective.kind?.replaceAll('_', '-')],
    ['group', collective.group],
    ['number in group', number(collective.seq)],
    ['bus bandwidth, GB/s', collective.bus_gb_per_s == null ? null : three(collective.bus_gb_per_s)],
    ...pairs,
  ];
}

/**
 * Several blocks that are too narrow to be drawn apart.
 * @param {HTMLElement} panel
 * @param {string} kind
 * @param {number} count
 * @param {number} busyNs
 */
export function mergedPanel(panel, kind, count, busyNs) {
  replace(
    panel,
    el(
      'div',
      { class: 'wide' },
      el('h2', {}, plural(count, 'block')),
      el(
        'p',
        {},
        `${duration(busyNs)} of ${kind.replace('_', ' ')}, each below half a pixel. Double click zooms in.`,
      ),
    ),
  );
}

/**
 * Sums over a stretch of time: classes per rank, then the names with most time.
 * @param {HTMLElement} panel
 * @param {SelectionAnswer} sums
 */
export function sumsPanel(panel, sums) {
  const steps = sums.ranks.slice(0, NAMES_SHOWN).map((rank) => rankSums(rank, sums.span_ns));
  const left = sums.ranks.length - steps.length;
  replace(
    panel,
    el(
      'div',
      { class: 'sums' },
      el('h2', {}, `${duration(sums.span_ns)} chosen`),
      el(
        'p',
        { class: 'small' },
        `from ${three(sums.from_ns / 1e6)} to ${three(sums.to_ns / 1e6)} ms; Esc clears`,
      ),
      steps,
      left > 0 ? el('div', { class: 'small' }, `and ${plural(left, 'more rank')}`) : null,
    ),
    el(
      'div',
      { class: 'sums' },
      el('div', { class: 'small' }, 'most time in these lanes: ms, count'),
      el(
        'dl',
        {},
        sums.names
          .slice(0, NAMES_SHOWN)
          .flatMap((named) => [
            el(
              'dt',
              { class: 'name-cell' },
              el('span', { class: `swatch ${named.class}` }),
              el('span', { title: named.name }, `${PART_OF[named.class] ?? ''}${named.label}`),
            ),
            el('dd', {}, `${three(named.total_ns / 1e6)} \u00b7 ${number(named.count)}`),
          ]),
      ),
    ),
  );
}

/** @param {RankSums} rank @param {number} spanNs */
function rankSums(rank, spanNs) {
  const parts = DEVICE_PHASES.map((name) => ({ name, ns: rank[`${name}_ns`] ?? 0 })).filter((part) => part.ns > 0);
  const said = parts.map((part) => `${part.name} ${three(part.ns / 1e6)}`).join(', ');
  return el(
    'div',
    { style: { 'margin-top': '6px' } },
    el('div', { class: 'small' }, `rank ${rank.rank}: ${said} ms`),
    el(
      'div',
      { class: 'bar', role: 'img', 'aria-label': said },
      parts.map((part) =>
        el('span', { class: part.name, style: { width: `${(99 * part.ns) / Math.max(1, spanNs)}%` } }),
      ),
    ),
  );
}
