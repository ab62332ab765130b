// Axes: a round distance between ticks, and places as shares of an axis.

/** The smallest of 1, 2, 5 times a power of ten (4 too if `four`) that is at least `least`. */
export function roundStep(least) {
  if (!(least > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
}

/** Every how many ticks at `places` there is room for names of these widths, all along: 1, 2, 5, 10 and so on. */
export function labelEvery(places, widths) {
  const fits = (every) =>
    places.every((at, index) => {
      const next = places[index + every];
      return index % every || next == null || next - at >= widths[index];
    });
  let every = 1;
  while (every < places.length && !fits(every)) every = roundStep(every * 1.5);
  return every;
}

/** Multiples of `step` within [low, high]. */
export function ticks(low, high, step) {
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, count) }, (_, index) => (first + index) * step);
}

/** A linear axis over [low, high]. */
export class Scale {
  constructor(low, high) {
    this.low = low;
    this.high = high > low ? high : low + 1;
  }

  /** Where `value` lies, as a share of the axis, possibly outside 0 to 1. */
  share(value) {
    return (value - this.low) / (this.high - this.low);
  }

  /** The same as a CSS or SVG length. */
  at(value) {
    return `${(100 * this.share(value)).toFixed(3)}%`;
  }

  ticks(step) {
    return ticks(this.low, this.high, step);
  }
}

/** From 0 to just beyond `most`, at a tick, with about `count` ticks. */
export function fromZero(most, count = 10) {
  const step = roundStep((most || 1) / count);
  return { scale: new Scale(0, Math.ceil((most || 1) / step - 1e-9) * step), step };
}

/** Around all values, at ticks; `least` is the narrowest range. */
export function around(values, count = 5, least = 1e-9) {
  let [low, high] = values.reduce(
    ([a, b], value) => [Math.min(a, value), Math.max(b, value)],
    [Infinity, -Infinity],
  );
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  const range = Math.max(high - low, least, Math.abs(high) * 1e-3);
  const step = roundStep(range / count);
  const from = Math.floor(low / step + 1e-9) * step;
  const to = Math.max(from + step, Math.ceil(high / step - 1e-9) * step);
  return { scale: new Scale(from, to), step };
}

/** In [−0.5, 0.5), the same for the same number every time: where a dot stands across its strip. */
export function jitter(index) {
  const mixed = Math.imul(index + 1, 0x9e3779b1) >>> 0;
  return (((mixed ^ (mixed >>> 15)) >>> 0) % 1000) / 1000 - 0.5;
}
