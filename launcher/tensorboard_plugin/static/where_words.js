// What the view of where time goes says in words.

import { number, plural, three } from './format.js';
import { slowestRank } from './model.js';
import { timedParts, tracedParts } from './phases.js';

/**
 * What the leader's step consists of, in a sentence.
 * @param {Variant} leader
 * @param {Run} run
 */
export function sentence(leader, run) {
  const rank = slowestRank(leader.ranks);
  const parts = tracedParts(rank) ?? timedParts(rank, leader.stepMs);
  if (!parts) return `${leader.label} takes ${three(leader.stepMs)} ms a step.`;
  const total = parts.reduce((sum, part) => sum + part.ms, 0);
  const [compute, ...rest] = parts;
  const loss = rest.reduce((most, part) => (part.ms > most.ms ? part : most));
  const lost =
    loss.ms >= 0.005 * total
      ? `; the largest other part is ${lossWord(loss.name)}, ${three(loss.ms)} of ${three(total)} ms`
      : '';
  const timed = run.isFarFromTimed(rank.span_ms, leader.stepMs)
    ? ` (in traced steps; timed ones take ${three(leader.stepMs)} ms)`
    : '';
  return `${leader.label} computes for ${number((100 * compute.ms) / total)} % of its step${lost}${timed}.`;
}

/**
 * A warning where bars aren't the steps that rank their variants; none where they are.
 * @param {Variant[]} variants
 * @param {Run} run
 */
export function farNotes(variants, run) {
  const far = variants.filter((variant) =>
    run.isFarFromTimed(slowestRank(variant.ranks)?.span_ms, variant.stepMs),
  );
  const which = far.length === 1 ? far[0].label : plural(far.length, 'variant');
  return far.length
    ? [`The traced steps of ${which} are far from the timed ones: these bars aren\u2019t the steps that were ranked.`]
    : [];
}

/** @param {PhaseName} name */
function lossWord(name) {
  return {
    compute: 'compute',
    transfer: 'exposed transfer',
    wait: 'waiting',
    copy: 'copying',
    input: 'waiting for data',
    other_steps: 'work of other steps',
    idle: 'idle time',
  }[name];
}

/**
 * What the bars are.
 * @param {Variant[]} variants
 */
export function subSentence(variants) {
  const untraced = variants.filter((variant) => !slowestRank(variant.ranks)?.span_ms);
  const traced =
    'Each bar is a rank\u2019s traced step: the mean of those in which least else ran. Transfer, wait and copy count only where no compute hides them.';
  if (!untraced.length) return traced;
  const timed = 'Without a trace, parts come from the timed phases, and transfer includes the waiting.';
  return untraced.length === variants.length ? timed : `${traced} ${timed}`;
}

/**
 * What a step takes, as `gpurun trace` says it, and which rank the others wait for.
 * @param {BreakdownAnswer} answer
 */
export function tracesSentence({ has_steps: hasSteps, mean, ranks, straggler }) {
  if (!mean?.span_ms) return 'These traces have no time to divide.';
  const share = number((100 * mean.compute_ms) / mean.span_ms);
  const over = ranks.length > 1 ? ', the mean of all ranks' : '';
  const what = hasSteps ? 'A step' : 'The recorded work';
  const step = `${what} takes ${three(mean.span_ms)} ms${over}; ${share} % of it is compute.`;
  if (!straggler) return step;
  const { rank, last_arrivals: late, collectives, caused_ms: caused } = straggler;
  return `${step} The others wait most for rank ${rank}: it came last ${number(late)} of ${plural(collectives, 'time')} and cost them ${three(caused)} ms.`;
}
