// What the ranking says in words.

import { interval, lowerFirst, number, plural, rate } from './format.js';

/** @type {{ [status: string]: string }} */
const STATUS_WORDS = {
  oom: 'out of memory',
  unsteady: 'unsteady',
  failed: 'failed',
  timeout: 'ran out of time',
  skipped: 'left out',
  planned: 'not measured yet',
  running: 'running',
};

/**
 * Why a variant is below the axis.
 * @param {Variant} variant
 */
export function whyUnranked(variant) {
  const word = STATUS_WORDS[variant.status] ?? variant.status;
  const reason = variant.reason ? `: ${variant.reason}` : '';
  return word + reason + (variant.status === 'unsteady' ? ', so it is not ranked' : '');
}

/**
 * Interval, noise, rounds and cause, behind the headline.
 * @param {Run} run
 */
export function subSentence(run) {
  const { fastest, baseline, comparison } = run;
  const sentences = [run.answer.unsaid];
  if (fastest && baseline && fastest !== baseline && fastest.stepMs && baseline.stepMs)
    sentences.push(against(fastest, baseline));
  if (run.hasBatches)
    sentences.push('Global batches differ, so variants are compared by their time per sample.');
  const noise = comparison?.noise;
  if (noise?.aa_percent != null)
    sentences.push(
      `The same split measured twice differs by ${number(Math.abs(noise.aa_percent), 1)} %${noise.ci ? ` (${interval(noise.ci)})` : ''}.`,
    );
  const best = fastest?.result;
  if (best)
    sentences.push(
      best.launches > 1
        ? `${plural(best.launches, 'launch').replace('launchs', 'launches')} of each strategy, interleaved.`
        : `${plural(best.rounds, 'interleaved round')}.`,
    );
  sentences.push(cause(run));
  return sentences.filter(Boolean).join(' ');
}

/**
 * Steps of different batches are different work: then samples are compared.
 * @param {Variant} fastest
 * @param {Variant} baseline
 */
function against(fastest, baseline) {
  const ci = interval(fastest.difference?.ci);
  if (isSameBatch(fastest, baseline))
    return `${oneDecimal(fastest.stepMs)} ms a step against ${oneDecimal(baseline.stepMs)}${ci ? ` (${ci} %)` : ''}.`;
  const rates = [fastest, baseline].map((variant) => rate(variant.result?.samples_per_s ?? NaN));
  return `${rates[0]} samples/s against the baseline\u2019s ${rates[1]}${ci ? ` (time per sample ${ci} %)` : ''}.`;
}

/** @param {Variant} one @param {Variant} other */
function isSameBatch(one, other) {
  return one.result?.global_batch === other.result?.global_batch;
}

/**
 * Why the baseline is slower than the fastest; where it is the fastest itself, why the next one is slower.
 * @param {Run} run
 */
function cause({ fastest, baseline, ranked }) {
  const slower = fastest === baseline ? ranked.find((variant) => variant !== baseline) : baseline;
  const said = slower?.planned.explanation;
  if (said && fastest && !isSameBatch(fastest, slower)) return null; // it speaks of steps
  return said ? `${slower.label}: ${lowerFirst(said)}` : null;
}

/** @param {number | null} ms */
function oneDecimal(ms) {
  return ms == null ? '' : number(ms, ms >= 100 ? 0 : ms >= 10 ? 1 : 2);
}
