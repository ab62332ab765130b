// Which ranks have columns of their own in the table of operators.

import { number } from '../shared/format.js';

/** Columns for single ranks; more don't fit. */
const RANKS_SHOWN = 4;

/**
 * The ranks shown: those around the wanted one, else around the slowest; none where there is but one.
 * @param {OperatorsAnswer} answer
 * @param {string | null} wanted
 */
export function shownRanks(answer, wanted) {
  const { ranks } = answer;
  if (ranks.length < 2) return [];
  const asked = wanted == null ? -1 : ranks.indexOf(Number(wanted));
  const at = asked < 0 ? ranks.indexOf(answer.slowest_rank) : asked;
  const first = at - (at % RANKS_SHOWN);
  return ranks.slice(first, first + RANKS_SHOWN);
}

/**
 * All groups of ranks, as `[first rank, text]` of a picker.
 * @param {OperatorsAnswer} answer
 * @returns {Options}
 */
export function rankGroups({ ranks }) {
  const firsts = ranks.filter((_, index) => index % RANKS_SHOWN === 0);
  return firsts.map((rank, group) => {
    const last = ranks[Math.min((group + 1) * RANKS_SHOWN, ranks.length) - 1];
    const text = last === rank ? `rank ${number(rank)}` : `ranks ${number(rank)} to ${number(last)}`;
    return [String(rank), `${text} of ${number(ranks.length)}`];
  });
}
