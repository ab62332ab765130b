// Where the lanes of the timeline lie: ranks below each other, each with the same lanes in the same order.

export const LABEL_PX = 140;
export const TITLE_PX = 27;
/** More lanes than this are not asked for at once. */
export const MOST_LANES = 128;
const THREAD_ROW_PX = 17;
const STREAM_ROW_PX = 30;
const LANE_GAP_PX = 6;
/** Rows of a thread that are drawn before its label is clicked. */
const FIRST_ROWS = 4;

/**
 * Places of ranks and lanes, in px from the top, and the height of all of them.
 * @param {MetaRank[]} ranks
 * @param {Set<number>} expanded
 * @returns {Layout}
 */
export function layout(ranks, expanded) {
  /** @type {PlacedTitle[]} */
  const titles = [];
  /** @type {PlacedLane[]} */
  const lanes = [];
  let y = 0;
  for (const rank of ranks) {
    titles.push({ rank: rank.rank, device: rank.device, label: rank.label, y });
    y += TITLE_PX;
    for (const lane of rank.lanes.filter((each) => each.kind === 'thread' || each.kind === 'stream')) {
      const placed = place(lane, rank.rank, y, expanded.has(lane.lane));
      lanes.push(placed);
      y += placed.height + LANE_GAP_PX;
    }
    y += 4;
  }
  return { titles, lanes, height: y, byLane: new Map(lanes.map((lane) => [lane.lane, lane])), byRank: null };
}

/**
 * @param {Lane} lane
 * @param {number} rank
 * @param {number} y
 * @param {boolean} isExpanded
 * @returns {PlacedLane}
 */
function place(lane, rank, y, isExpanded) {
  const isThread = lane.kind === 'thread';
  const rows = isThread && !isExpanded ? Math.min(lane.rows, FIRST_ROWS) : Math.max(1, lane.rows);
  const rowPx = isThread ? THREAD_ROW_PX : lane.rows > 1 ? THREAD_ROW_PX + 3 : STREAM_ROW_PX;
  return {
    ...lane,
    rank,
    y,
    rowPx,
    shownRows: rows,
    height: rows * rowPx,
    isThread,
    hasMore: lane.rows > FIRST_ROWS && isThread,
    isExpanded,
  };
}

/**
 * Lanes that lie at least partly between two heights.
 * @param {Layout} placed
 * @param {number} top
 * @param {number} bottom
 */
export function lanesBetween(placed, top, bottom) {
  return placed.lanes.filter((lane) => lane.y < bottom && lane.y + lane.height > top);
}

/**
 * Top and height of one row's blocks.
 * @param {PlacedLane} lane
 * @param {number} row
 * @returns {Box}
 */
export function rowBox(lane, row) {
  return { y: lane.y + row * lane.rowPx, height: lane.rowPx - 2 };
}

/**
 * Where a rank's row is shown: in a compact timeline its band, whatever the row.
 * @param {Layout} placed
 * @param {number} number
 * @param {number} row
 * @param {number} rank
 * @returns {Box | null}
 */
export function shownBox(placed, number, row, rank) {
  const lane = placed.byRank ? placed.byRank.get(rank) : placed.byLane.get(number);
  return lane && (lane.band || row < lane.shownRows) ? rowBox(lane, lane.band ? 0 : row) : null;
}

/**
 * Steps over all ranks: from the first start to the last end of each, and how long its slowest rank took.
 * @param {TracedStep[]} steps
 * @returns {MergedStep[]}
 */
export function mergedSteps(steps) {
  const merged = new Map();
  for (const step of steps) {
    const known = merged.get(step.step);
    const longest_ns = Math.max(known?.longest_ns ?? 0, step.end_ns - step.start_ns);
    if (!known) merged.set(step.step, { ...step, longest_ns });
    else {
      known.longest_ns = longest_ns;
      known.start_ns = Math.min(known.start_ns, step.start_ns);
      known.end_ns = Math.max(known.end_ns, step.end_ns);
    }
  }
  const sorted = [...merged.values()].sort((a, b) => a.start_ns - b.start_ns);
  // A rank may begin a step before another has ended the one before: each shows up to the next one's start.
  return sorted.map((step, index) => ({
    ...step,
    shown_end_ns: Math.min(step.end_ns, sorted[index + 1]?.start_ns ?? Infinity),
  }));
}

/** @param {(TracedStep | MergedStep)[]} steps */
export function meanStepMs(steps) {
  return steps.length && steps.reduce((sum, step) => sum + lengthNs(step), 0) / steps.length / 1e6;
}

/**
 * How long a step takes: on its slowest rank, where it is one of all ranks.
 * @param {TracedStep | MergedStep} step
 */
export function lengthNs(step) {
  return 'longest_ns' in step ? step.longest_ns : step.end_ns - step.start_ns;
}

/**
 * The answer to `timeline/window`, with blocks found by lane and row.
 * @param {WindowAnswer} answer
 * @returns {IndexedWindow}
 */
export function indexed(answer) {
  const lanes = new Map(answer.lanes.map((lane) => [lane.lane, { ...lane, rows: rowRanges(lane.row) }]));
  const partOf = new Map();
  for (const link of answer.links) for (const part of link.parts) partOf.set(part[3], link);
  return { ...answer, lanes, partOf };
}

/**
 * Columns are ordered by row, then start: of each row, [first, end).
 * @param {number[]} rows
 */
function rowRanges(rows) {
  const ranges = new Map();
  rows.forEach((row, index) => {
    const range = ranges.get(row);
    if (range) range[1] = index + 1;
    else ranges.set(row, [index, index + 1]);
  });
  return ranges;
}

/**
 * Index of the block of a lane's row that covers `ns`, or is within `slack_ns` of it; −1 if there is none.
 * @param {IndexedLane | undefined} lane
 * @param {number} row
 * @param {number} ns
 * @param {number} slackNs
 */
export function blockAt(lane, row, ns, slackNs) {
  const range = lane?.rows.get(row);
  if (!lane || !range) return -1;
  let [low, high] = range;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start_ns[middle] <= ns) low = middle + 1;
    else high = middle;
  }
  const candidates = [low - 1, low].filter((index) => index >= range[0] && index < range[1]);
  return (
    candidates.find((index) => lane.start_ns[index] - slackNs <= ns && ns <= lane.end_ns[index] + slackNs) ??
    -1
  );
}
