// Figures as people read them: a real minus sign, thousands apart, no more decimals than are supported.

export const MINUS = '\u2212';

/**
 * `1,520.3`; `signed` shows a plus too. What rounds to zero has no sign.
 * @param {number | null | undefined} value
 * @param {number} [decimals]
 * @param {boolean} [signed]
 */
export function number(value, decimals = 0, signed = false) {
  if (value == null || !Number.isFinite(value)) return '';
  const [whole, part] = Math.abs(value).toFixed(decimals).split('.');
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ',');
  const text = part ? `${grouped}.${part}` : grouped;
  if (!/[1-9]/.test(text)) return text;
  return (value < 0 ? MINUS : signed ? '+' : '') + text;
}

/**
 * Three significant digits: `48.2`, `0.134`, `1,320`.
 * @param {number | null | undefined} value
 */
export function three(value) {
  if (value == null || !Number.isFinite(value)) return '';
  const size = Math.abs(value);
  const digits = size === 0 ? 0 : 2 - Math.floor(Math.log10(size));
  return number(value, Math.min(3, Math.max(0, digits)));
}

/**
 * The unit for memory of which `gib` is the most, and how many of it make a GiB; as `readable_unit` of launcher/units.py.
 * @param {number} gib
 * @returns {[unit: string, perGib: number]}
 */
export function memoryUnit(gib) {
  if (gib <= 0 || gib >= 0.1) return ['GiB', 1];
  return gib * 1024 >= 0.1 ? ['MiB', 1024] : ['KiB', 1024 * 1024];
}

/**
 * `1.25 GiB`, `84.0 MiB`, `4.19 KiB`.
 * @param {number} gib
 */
export function memoryText(gib) {
  const [unit, perGib] = memoryUnit(gib);
  return `${rate(gib * perGib)} ${unit}`;
}

/**
 * A rate per second in three significant digits, from 100 on in whole numbers: `1.16`, `1,520`.
 * @param {number} perSecond
 */
export function rate(perSecond) {
  return perSecond >= 100 ? number(perSecond) : three(perSecond);
}

/**
 * `+13.8`, always one decimal and a sign; zero has none.
 * @param {number} value
 */
export function percent(value) {
  return value === 0 ? '0' : number(value, 1, true);
}

/**
 * `−5.7 to −4.1`.
 * @param {Interval | null | undefined} ci
 */
export function interval(ci) {
  return ci ? `${percent(ci[0])} to ${percent(ci[1])}` : '';
}

/**
 * The larger side of a confidence interval: ± this covers the interval.
 * @param {number | null | undefined} middle
 * @param {Interval | null | undefined} ci
 */
export function halfWidth(middle, ci) {
  return ci && middle != null ? Math.max(middle - ci[0], ci[1] - middle) : null;
}

/**
 * Decimals that show the first digit of an interval's half-width, at most 3.
 * @param {number} half
 */
export function supportedDecimals(half) {
  return half > 0 ? Math.min(3, Math.max(0, -Math.floor(Math.log10(half)))) : 1;
}

/**
 * One count of decimals for a column of ms: what the middle row's interval supports.
 * @param {(number | null)[]} halves
 * @param {number[]} sizes
 */
export function columnDecimals(halves, sizes) {
  const known = halves
    .filter((half) => half != null)
    .filter((half) => half > 0)
    .sort((a, b) => a - b);
  if (known.length) return supportedDecimals(known[known.length >> 1]);
  const typical = [...sizes].sort((a, b) => a - b)[sizes.length >> 1] ?? 0;
  return typical >= 100 ? 0 : typical >= 10 ? 1 : 2;
}

/**
 * Decimals with which ticks at this distance differ.
 * @param {number} step
 */
export function tickDecimals(step) {
  return Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
}

/**
 * A duration given in nanoseconds, with its unit: `3.40 ms`, `812 µs`, `1.20 s`.
 * @param {number} ns
 */
export function duration(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${three(ns / 1e9)} s`;
  if (size >= 1e6) return `${three(ns / 1e6)} ms`;
  if (size >= 1e3) return `${three(ns / 1e3)} µs`;
  return `${number(ns)} ns`;
}

/**
 * Bytes with a decimal unit, as links are rated: `142 MB`.
 * @param {number} count
 */
export function bytes(count) {
  if (count >= 1e9) return `${three(count / 1e9)} GB`;
  if (count >= 1e6) return `${three(count / 1e6)} MB`;
  if (count >= 1e3) return `${three(count / 1e3)} kB`;
  return `${number(count)} B`;
}

/**
 * How long something takes, coarsely: `50 s`, `2 min`, `1 h 05 min`.
 * @param {number} seconds
 */
export function coarse(seconds) {
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60
    ? `${minutes} min`
    : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
}

/**
 * `1 rank`, `2 ranks`.
 * @param {number} count
 * @param {string} noun
 */
export function plural(count, noun) {
  return `${number(count)} ${count === 1 ? noun : `${noun}s`}`;
}

/**
 * `a, b and c`.
 * @param {string[]} words
 */
export function listed(words) {
  return words.length < 2 ? words.join('') : `${words.slice(0, -1).join(', ')} and ${words.at(-1)}`;
}

/**
 * A sentence as it goes on after a colon.
 * @param {string} text
 */
export function lowerFirst(text) {
  return text[0].toLowerCase() + text.slice(1);
}
