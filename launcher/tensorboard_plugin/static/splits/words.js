// What the ranking says in words.

import { filterValues } from '../model.js';
import { plural } from '../shared/format.js';

/** @type {{ [status: string]: string }} */
export const STATUS_WORDS = {
  ok: 'measured',
  oom: 'out of memory',
  unsteady: 'unsteady',
  failed: 'failed',
  timeout: 'ran out of time',
  hung: 'hung',
  skipped: 'skipped',
  planned: 'not measured yet',
  running: 'running',
  'too large': 'takes more memory than the job allows',
};

/**
 * Why a variant is below the axis; what one failure ended together with the one above has no reason of its own.
 * @param {Variant} variant
 * @param {Variant} [above]
 */
export function whyUnranked(variant, above) {
  const word = STATUS_WORDS[variant.status] ?? variant.status;
  if (above && endedAlike(variant, above)) return `${word}: as above`;
  const reason = variant.reason ? `: ${variant.reason}` : '';
  return word + reason + logText(variant);
}

/**
 * Whether one reason with one log explains both, as in the terminal.
 * @param {Variant} variant
 * @param {Variant} above
 */
function endedAlike(variant, above) {
  if (!variant.result?.log || variant.stepMs || above.stepMs) return false;
  return whyUnranked(variant) === whyUnranked(above);
}

/**
 * Where what its processes wrote can be read; the path is that in the run directory.
 * @param {Variant} variant
 */
function logText(variant) {
  return variant.result?.log ? `; log: ${variant.result.log}` : '';
}

/**
 * What the run says after its headline, worded by the server as in the terminal, and how often it measured.
 * @param {Run} run
 */
export function subSentence(run) {
  return [run.answer.details, run.variants.length > 1 && rounds(run)].filter(Boolean).join('\n');
}

/** @param {Run} run */
function rounds(run) {
  const best = run.leader?.result;
  if (!best) return null;
  const each = filterValues(run, 'strategy').length > 1 ? 'strategy' : 'variant';
  return best.launches > 1
    ? `${plural(best.launches, 'launch').replace('launchs', 'launches')} of each ${each}, interleaved.`
    : `${plural(best.rounds, 'interleaved round')}.`;
}
