// The compact timeline: a row a rank. What the rows are coloured and sorted by comes from the server.

import { optionsOf, picker, segmented } from '../shared/controls.js';
import { el } from '../shared/dom.js';

/** With more ranks than this, rows are compact unless all lanes are asked for. */
export const FEW_RANKS = 8;
const ROW_PX = 16;
const LOW_ROW_PX = 12;
/** With more ranks than this, rows are low. */
const TALL_ROWS = 40;

/**
 * How the ranks are shown, or `null` where all their lanes are.
 * @param {MetaAnswer} meta
 * @param {MetaRank[]} ranks
 * @param {State} state
 * @returns {Compact | null}
 */
export function compactOf({ compact }, ranks, state) {
  const asked = state.get('rows');
  const isCompact = asked ? asked === 'compact' : ranks.length > FEW_RANKS;
  if (!isCompact || !compact.colours.length) return null;
  const order = compact.orders.find((each) => each.key === state.get('order')) ?? compact.orders[0];
  const colours = compact.colours.find((each) => each.key === state.get('colours')) ?? compact.colours[0];
  return { order, colours };
}

/**
 * Places of the rows, in px from the top.
 * @param {MetaRank[]} ranks
 * @param {Compact} compact
 * @returns {Layout}
 */
export function compactLayout(ranks, { order, colours }) {
  const rowPx = ranks.length > TALL_ROWS ? LOW_ROW_PX : ROW_PX;
  const byNumber = new Map(ranks.map((rank) => [rank.rank, rank]));
  const isGrouped = order.begins_group.includes(true);
  /** @type {PlacedLane[]} */
  const lanes = [];
  order.ranks.forEach((number, index) => {
    const rank = byNumber.get(number);
    const lane = rank?.lanes.find((each) => each.kind === colours.key);
    if (!rank || !lane) return;
    lanes.push({
      ...lane,
      label: rank.label,
      rank: number,
      y: lanes.length * rowPx,
      rowPx,
      shownRows: 1,
      height: rowPx,
      isThread: false,
      hasMore: false,
      isExpanded: false,
      band: {
        note: isGrouped && !order.begins_group[index] ? '' : order.notes[index],
        whole: `${order.note_title} ${order.notes[index]}`.trim(),
        beginsGroup: order.begins_group[index],
        activeNs: rank.active_ns,
      },
    });
  });
  return {
    titles: [],
    lanes,
    height: lanes.length * rowPx,
    byLane: new Map(lanes.map((lane) => [lane.lane, lane])),
    byRank: new Map(lanes.map((lane) => [lane.rank, lane])),
  };
}

/**
 * Where a row is idle but for its blocks: between its first and last, as far as they are loaded. What isn't
 * loaded yet is blank. `null`: no part of the row.
 * @param {PlacedLane} lane
 * @param {(Stretch & { lanes: Set<number> }) | null} loaded
 * @returns {Stretch | null}
 */
export function idleIn({ lane, band }, loaded) {
  if (!band || !loaded?.lanes.has(lane)) return null;
  const [from, to] = [Math.max(band.activeNs[0], loaded.from), Math.min(band.activeNs[1], loaded.to)];
  return from < to ? { from, to } : null;
}

/**
 * Compact or all lanes; of compact rows their order and colours, where there is a choice.
 * @param {Timeline} view
 */
export function compactControls({ app, compact, meta }) {
  if (meta.ranks.length < 2 || !meta.compact.colours.length) return null;
  const { orders, colours } = meta.compact;
  /** @param {Changes} changes */
  const go = (changes) => app.state.go({ tab: 'timeline', ...changes });
  return el(
    'div',
    { class: 'group' },
    segmented(
      'rows',
      [
        ['compact', 'a row a rank'],
        ['lanes', 'all lanes'],
      ],
      compact ? 'compact' : 'lanes',
      (rows) => go({ rows }),
    ),
    compact && orders.length > 1
      ? picker('order', options(orders), compact.order.key, (order) => go({ order }))
      : null,
    compact && colours.length > 1
      ? picker('colour', options(colours), compact.colours.key, (key) => go({ colours: key }))
      : null,
  );
}

/** @param {{ key: string, title: string }[]} choices */
function options(choices) {
  return optionsOf(choices.map(({ key, title }) => ({ id: key, label: title })));
}

/**
 * What a class of a row is called.
 * @param {Compact} compact
 * @param {string} name
 */
export function bandClass({ colours }, name) {
  return colours.legend.find((each) => each.class === name)?.label ?? name;
}

/**
 * The collective in which a rank is at `ns`, if the window links it.
 * @param {IndexedWindow | null} data
 * @param {number} rank
 * @param {number} ns
 */
export function partAt(data, rank, ns) {
  for (const link of data?.links ?? []) {
    const part = link.parts.find((each) => each[0] === rank && each[4] <= ns && ns < each[6]);
    if (part) return { link, part };
  }
  return null;
}
