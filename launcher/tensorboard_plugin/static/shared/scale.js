// Axes: a round distance between ticks, and places as shares of an axis.

/**
 * The smallest of 1, 2, 5 times a power of ten that is at least `least`.
 * @param {number} least
 */
export function roundStep(least) {
  if (!(least > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  return (
    [1, 2, 5].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9)) ?? 10 * power
  );
}

/**
 * Every how many ticks at `places` there is room for names of these widths, all along: 1, 2, 5, 10 and so on.
 * @param {number[]} places
 * @param {number[]} widths
 */
export function labelEvery(places, widths) {
  /** @param {number} every */
  const fits = (every) =>
    places.every((at, index) => {
      const next = places[index + every];
      return index % every || next == null || next - at >= widths[index];
    });
  let every = 1;
  while (every < places.length && !fits(every)) every = roundStep(every * 1.5);
  return every;
}

/**
 * Multiples of `step` within [low, high].
 * @param {number} low
 * @param {number} high
 * @param {number} step
 */
export function ticks(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, index) => (first + index) * step);
}

/** A linear axis over [low, high]. */
export class Scale {
  /** @param {number} low @param {number} high */
  constructor(low, high) {
    this.low = low;
    this.high = high > low ? high : low + 1;
  }

  /**
   * Where `value` lies, as a share of the axis, possibly outside 0 to 1.
   * @param {number} value
   */
  share(value) {
    return (value - this.low) / (this.high - this.low);
  }

  /**
   * The same as a CSS or SVG length.
   * @param {number} value
   */
  at(value) {
    return `${(100 * this.share(value)).toFixed(3)}%`;
  }

  /** @param {number} step */
  ticks(step) {
    return ticks(this.low, this.high, step);
  }
}

/** A logarithmic axis around values above 0, whose ends are 1, 2 or 5 times a power of ten. */
export class LogScale extends Scale {
  /** @param {number[]} values */
  constructor(values) {
    const most = Math.max(...values);
    super(10 ** Math.floor(Math.log10(Math.min(...values))), roundStep(most));
    while (this.marks[1] <= Math.min(...values)) [, this.low] = this.marks;
  }

  /** All 1, 2 and 5 times powers of ten from its low end to its high one. */
  get marks() {
    const found = [this.low];
    while (last(found) < this.high * (1 - 1e-9)) found.push(roundStep(last(found) * 1.5));
    return found;
  }

  /**
   * @override
   * @param {number} value
   */
  share(value) {
    return Math.log(value / this.low) / Math.log(this.high / this.low);
  }

  /**
   * Powers of ten; in a range of few of them also what is between.
   * @override
   */
  ticks() {
    const powers = this.marks.filter((mark) => Math.abs(Math.log10(mark) - Math.round(Math.log10(mark))) < 1e-9);
    return powers.length > 2 ? powers : this.marks;
  }

  /** @returns {Axis} */
  asAxis() {
    return { scale: this, step: this.high };
  }
}

/**
 * From 0 to just beyond `most`, at a tick, with about `count` ticks.
 * @param {number} most
 * @param {number} [count]
 * @returns {Axis}
 */
export function fromZero(most, count = 10) {
  const step = roundStep((most || 1) / count);
  return { scale: new Scale(0, Math.ceil((most || 1) / step - 1e-9) * step), step };
}

/**
 * Around all values, at ticks; `least` is the narrowest range.
 * @param {number[]} values
 * @param {number} [count]
 * @param {number} [least]
 * @returns {Axis}
 */
export function around(values, count = 5, least = 1e-9) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  const range = Math.max(high - low, least, Math.abs(high) * 1e-3);
  const step = roundStep(range / count);
  const from = Math.floor(low / step + 1e-9) * step;
  const to = Math.max(from + step, Math.ceil(high / step - 1e-9) * step);
  return { scale: new Scale(from, to), step };
}

/**
 * The last of some values, of which there is at least one.
 * @template T
 * @param {T[]} values
 */
export function last(values) {
  return values[values.length - 1];
}

/**
 * In [−0.5, 0.5), the same for the same number every time: where a dot is across its strip.
 * @param {number} index
 */
export function jitter(index) {
  const mixed = Math.imul(index + 1, 0x9e3779b1) >>> 0;
  return (((mixed ^ (mixed >>> 15)) >>> 0) % 1000) / 1000 - 0.5;
}
