// What the views ask of a run: which variants, in which order, by which name. Verdicts and intervals come
// from the comparison as they are; nothing here decides one.

/** The answer to `run`, with the comparison's figures found by variant. */
export class Run {
  /** @param {RunAnswer} answer */
  constructor(answer) {
    this.answer = answer;
    this.comparison = answer.comparison;
    this.results = new Map((this.comparison?.variants ?? []).map((variant) => [variant.id, variant]));
    this.variants = answer.variants.map((variant) => new Variant(variant, this.results.get(variant.id)));
    this.byId = new Map(this.variants.map((variant) => [variant.id, variant]));
    this.baseline = this.byId.get(this.comparison?.baseline ?? '') ?? null;
    this.fastest = this.byId.get(this.comparison?.fastest ?? '') ?? null;
    this.leader = this.byId.get(this.comparison?.leader ?? '') ?? this.fastest;
  }

  get name() {
    return this.answer.name;
  }

  get isTraces() {
    return this.answer.kind === 'traces';
  }

  /** Whether global batches differ: then steps are other work, and variants are compared by time per sample. */
  get hasBatches() {
    const workload = this.baseline?.result?.workload;
    const compared = [...this.results.values()].filter((result) => result.workload === workload);
    return new Set(compared.map((result) => result.global_batch)).size > 1;
  }

  /** What differences from the baseline are of. */
  get whatIsCompared() {
    return this.hasBatches ? 'time per sample' : 'step time';
  }

  /** Whether it is a micro-benchmark: there are no steps to divide or to trace. */
  get isOfCurves() {
    return this.variants.some((variant) => variant.hasCurves);
  }

  get isRunning() {
    return this.answer.status === 'running';
  }

  /** Those with figures, fastest first; in the plan's order where they can't be ranked. */
  get ranked() {
    const ranked = this.variants.filter((variant) => variant.isRanked);
    if (this.comparison?.findings[0]?.code === 'not-ranked') return ranked;
    return ranked.sort((a, b) => a.sortKey - b.sortKey || (a.stepMs ?? 0) - (b.stepMs ?? 0));
  }

  /** Those that ended otherwise, in the plan's order. */
  get unranked() {
    return this.variants.filter((variant) => !variant.isRanked);
  }

  /** Those that a trace was taken of. */
  get traced() {
    return this.variants.filter((variant) => variant.hasTraces);
  }

  /**
   * The variant to begin with: the one asked for, else the leader, else any that has what is needed.
   * @param {string | null} id
   * @param {Variant[]} [among]
   */
  choose(id, among = this.variants) {
    const wanted = among.find((variant) => variant.id === id);
    return wanted ?? among.find((variant) => variant === this.leader) ?? among[0] ?? null;
  }

  /**
   * What a traced variant is shown next to: the baseline, unless another was chosen; the baseline itself is alone.
   * @param {Variant} variant
   * @param {string | null} wanted
   */
  against(variant, wanted) {
    if (wanted === 'none') return null;
    const chosen = this.traced.find((each) => each.id === wanted) ?? this.baseline;
    return chosen?.hasTraces && chosen !== variant ? chosen : null;
  }
}

/** One variant: the plan's facts, and the comparison's figures once there are any. */
export class Variant {
  /** @param {PlannedVariant} planned @param {VariantResult | undefined} result */
  constructor(planned, result) {
    this.planned = planned;
    this.result = result ?? null;
  }

  get id() {
    return this.planned.id;
  }

  get label() {
    return this.planned.label;
  }

  get strategy() {
    return this.planned.strategy;
  }

  get numDevices() {
    return this.planned.devices.length;
  }

  get precision() {
    return this.planned.precision;
  }

  get status() {
    return this.result?.status ?? this.planned.status;
  }

  get reason() {
    return this.result?.reason ?? this.planned.reason;
  }

  /** Unlike the second measurement of a baseline, which is a row of the ranking too. */
  get isNoise() {
    return false;
  }

  get hasTraces() {
    return this.planned.traces.length > 0;
  }

  /** Whether it is of a micro-benchmark, which has curves in place of steps. */
  get hasCurves() {
    return this.planned.curve_tables.length > 0;
  }

  get stepMs() {
    return this.result?.step_ms?.estimate ?? null;
  }

  /** Against the baseline; of the baseline itself 0 %. */
  get difference() {
    const found = this.result?.vs_baseline;
    return found?.verdict === 'baseline' ? { ...found, percent: 0 } : (found ?? null);
  }

  get ranks() {
    return this.result?.ranks ?? [];
  }

  /** The rank that the others wait for. */
  get slowest() {
    return this.ranks.find((rank) => rank.rank === this.planned.slowest_rank) ?? null;
  }

  get timedParts() {
    return this.planned.timed_parts;
  }

  get isRanked() {
    return ['ok', 'unsteady'].includes(this.status) && this.stepMs != null;
  }

  /** By difference, as far as there is one: it compares what was measured side by side. */
  get sortKey() {
    return this.difference?.percent ?? Infinity;
  }

  get differenceInterval() {
    return this.planned.difference_interval;
  }

  get figures() {
    return this.planned.figures;
  }
}

/** @type {{ [N in FilterName]: (variant: Variant) => string | null }} */
const FILTERS = {
  strategy: (variant) => variant.strategy,
  devices: (variant) => String(variant.numDevices),
  precision: (variant) => variant.precision,
};

/** @type {FilterName[]} */
export const FILTER_NAMES = ['strategy', 'devices', 'precision'];

/**
 * The values a filter can have in this run, in a natural order.
 * @param {Run} run
 * @param {FilterName} name
 */
export function filterValues(run, name) {
  const values = new Set(run.variants.map(FILTERS[name]).filter((value) => value != null));
  return [...values].sort((a, b) => a.localeCompare(b, 'en', { numeric: true }));
}

/**
 * Whether a variant passes all filters; `chosen(name)` is a list, or `null` for all.
 * @param {Variant} variant
 * @param {(name: FilterName) => string[] | null} chosen
 */
export function passes(variant, chosen) {
  return FILTER_NAMES.every((name) => {
    const wanted = chosen(name);
    return wanted == null || wanted.includes(FILTERS[name](variant) ?? '');
  });
}
