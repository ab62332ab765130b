"""Figures as people read them: with a unit, and with no more decimals than their interval supports."""

import math
from collections.abc import Sequence
from typing import Any

Interval = tuple[float, float]

GIB = 1 << 30
"""Bytes."""
MINUS = "\u2212"
COMMIT_CHARS = 10
"""The characters of a commit that are shown."""
_BYTES = ("B", "KiB", "MiB", "GiB")
TWICE = 99.5
"""Percent from which on a difference reads better as a factor."""
HALF = 50.0
"""Percent of time saved from which on a factor of the speed reads better."""
LOPSIDED = 1.5
"""Ratio of its sides from which on an interval is written out: one ± for both would claim too much of one."""


def scaled(value: float | None, factor: float) -> float | None:
    """The value times `factor`; `None` where it isn't known."""
    return None if value is None else factor * value


def format_ms(ms: float, ci: Interval | None = None) -> str:
    """Milliseconds without their unit: `42.1`, or `42.1 ± 0.2` with a confidence interval.

    The larger side of the interval is shown, rounded up: the interval never looks narrower than it is.
    """
    if ci is None:
        return format_number(ms, _three_digits(ms))
    half = half_width(ms, ci)
    decimals = supported_decimals(half, most=3)
    return f"{format_number(ms, decimals)} ± {format_number(round_up(half, decimals), decimals)}"


def format_like(ms: float, other_ms: float) -> str:
    """Milliseconds with the decimals of `format_ms(ms)`."""
    return format_number(other_ms, _three_digits(ms))


def format_half(ms: float, half_ms: float) -> str:
    """Half of an interval, rounded up to the decimals of `format_ms(ms)`."""
    decimals = _three_digits(ms)
    return format_number(round_up(half_ms, decimals), decimals)


def us_in_ms(us: float) -> str:
    """Microseconds in ms, to the microsecond; `-` for none."""
    return format_number(us / 1000, 3) if us else "-"


def format_percent(percent: float, ci: Interval | None = None, signed: bool = False) -> str:
    """`13.8 %`, as precise as `ci` (in percent) supports; without one whole, below 1 in tenths."""
    decimals = percent_decimals(percent, ci)
    return f"{format_number(percent, decimals, signed)} %"


def format_factor(percent: float, ci: Interval | None = None) -> str:
    """How many times as long, of percent longer: `2.3×`, as precise as `ci` supports."""
    decimals = 1 if ci is None else supported_decimals((ci[1] - ci[0]) / 200, most=2)
    return f"{format_number(1 + percent / 100, decimals)}×"


def format_factor_interval(ci: Interval) -> str:
    """`1.7 to 3.1×`, as precise as `format_factor`, of an interval in percent."""
    decimals = supported_decimals((ci[1] - ci[0]) / 200, most=2)
    low, high = (format_number(1 + end / 100, decimals) for end in ci)
    return f"{low} to {high}×"


def more_speed(saved: Interval) -> Interval:
    """Percent of time saved as percent more of the speed: 50 % less time is 100 % more."""
    low, high = (100 * end / (100 - end) if end < 100 else math.inf for end in saved)
    return low, high


def change_text(percent: float) -> str:
    """How much longer something takes: `14 % longer`, `9 % less time`, from twice on `2.3× as long`."""
    if percent >= TWICE:
        return f"{format_factor(percent)} as long"
    return f"{format_percent(abs(percent))} {'longer' if percent > 0 else 'less time'}"


def interval_figures(percent: float, ci: Interval | None) -> dict[str, Any]:
    """The interval next to `change_text`: `ci` in percent, or `ratio_ci` where that is a factor."""
    if ci is None or percent < TWICE:
        return {"ci": ci}
    return {"ratio_ci": (1 + ci[0] / 100, 1 + ci[1] / 100)}


def format_percent_interval(percent: float, ci: Interval, signed: bool = False) -> str:
    """`12.9 to 14.6`, as precise as `format_percent`; with signs also where the interval holds both.

    An end next to 0 has more decimals: with it, 0 would seem to be in the interval.
    """
    decimals = percent_decimals(percent, ci)
    signed = signed or ci[0] < 0 < ci[1]
    low, high = (format_number(end, _decimals_beyond_zero(end, decimals), signed) for end in ci)
    return f"{low} to {high}"


def _decimals_beyond_zero(value: float, decimals: int) -> int:
    return next((more for more in range(decimals, 3) if round(value, more)), 3) if value else decimals


def whole_parts(parts: Sequence[float], whole: float | None = None) -> list[int]:
    """Whole numbers that add up to the rounded whole (the parts' sum), each less than 1 from its part.

    What rounding down leaves goes to the largest remainders (Hamilton's method).
    """
    found = [math.floor(part) for part in parts]
    left = round(sum(parts) if whole is None else whole) - sum(found)
    if not 0 <= left <= len(found):  # they are no parts of it
        return [round(part) for part in parts]
    for index in sorted(range(len(parts)), key=lambda i: found[i] - parts[i])[:left]:
        found[index] += 1
    return found


def percent_decimals(percent: float, ci: Interval | None) -> int:
    """Decimals for a percentage: one digit of the interval's half-width, at most two decimals."""
    if ci is None:
        return 0 if abs(percent) >= 1 else 1
    return supported_decimals(max(percent - ci[0], ci[1] - percent), most=2)


def format_count(count: float) -> str:
    """A whole number with its thousands apart: `1,520`."""
    return format_number(count, 0)


def format_rate(per_second: float) -> str:
    """A rate in three significant digits, from 100 on in whole numbers: `1.16`, `1,520`."""
    digits = 2 - math.floor(math.log10(per_second)) if 0 < per_second < math.inf else 0
    return format_number(per_second, min(9, max(0, digits)))


def plural(count: int, noun: str) -> str:
    """`1 device`, `2 devices`, `3 micro-batches`, `4 remedies`."""
    if count == 1:
        return f"{count} {noun}"
    several = f"{noun[:-1]}ies" if noun.endswith("dy") else f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{format_count(count)} {several}"


def first_of(words: Sequence[str], most: int) -> str:
    """The first `most` words, and how many there are besides: `a, b and 3 more`."""
    more = len(words) - most
    return listed([*words[:most], *([f"{more} more"] if more > 0 else [])])


def listed(words: Sequence[str]) -> str:
    """`ddp`, `ddp and dp`, `ddp, dp and fsdp`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`, `ranks 0–30, 32`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {numbers_text(ranks)}"


def numbers_text(numbers: Sequence[int]) -> str:
    """`0, 1, 3`, `0–30, 32`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(_run_text(first, last) for first, last in runs)


def _run_text(first: int, last: int) -> str:
    if last - first < 3:
        return ", ".join(map(str, range(first, last + 1)))
    return f"{first}–{last}"


def size_text(size: int, unit: str) -> str:
    """`64 KiB`, or `2,048 rows`."""
    if unit != "bytes":
        return f"{format_count(size)} {unit}"
    power = 0
    while size >= 1024 and size % 1024 == 0 and power < len(_BYTES) - 1:
        size, power = size // 1024, power + 1
    return f"{format_count(size)} {_BYTES[power]}"


SMALLER_UNITS = {
    "GiB": (("MiB", 1024.0), ("KiB", 1024.0)),
    "GFLOP/s": (("MFLOP/s", 1000.0), ("kFLOP/s", 1000.0)),
}
"""Smaller units by the unit that people read, each with how many of it make one of the unit before."""
LEAST_OF_UNIT = 0.1
"""Below this a smaller unit reads better."""


def readable_unit(most: float, unit: str) -> tuple[str, float]:
    """The unit for figures of which `most` is the largest, and how many of it make one `unit`."""
    name, factor = unit, 1.0
    for smaller, ratio in SMALLER_UNITS.get(unit, ()):
        if most <= 0 or factor * most >= LEAST_OF_UNIT:
            break
        name, factor = smaller, factor * ratio
    return name, factor


def format_gib(gib: float, decimals: int | None = None) -> str:
    """Memory: `139.8 GiB`, below one GiB `0.42 GiB`, less in a smaller unit: `14.3 MiB`, `4.19 KiB`."""
    unit, factor = readable_unit(gib, "GiB")
    if factor > 1:
        return f"{format_rate(factor * gib)} {unit}"
    usual = 1 if gib >= 1 else 2
    return f"{format_number(gib, usual if decimals is None else decimals)} {unit}"


def format_duration(seconds: float) -> str:
    """How long something takes, coarsely: `0.4 s`, `50 s`, `2 min`, `1 h 05 min`."""
    if seconds < 9.95:
        return f"{format_number(seconds, 1)} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


def format_number(value: float, decimals: int, signed: bool = False) -> str:
    """A number with a real minus sign and thousands apart; `signed` shows a plus too. Zero has no sign."""
    text = f"{abs(value):,.{decimals}f}"
    if not any(digit in "123456789" for digit in text):
        return text
    sign = MINUS if value < 0 else "+" if signed else ""
    return sign + text


def supported_decimals(half_width: float, most: int) -> int:
    """Decimals that show the first digit of an interval's half-width, at most `most`."""
    if half_width <= 0:
        return most
    return min(most, max(0, -math.floor(math.log10(half_width))))


def round_up(value: float, decimals: int) -> float:
    """The next multiple of the last decimal; one that is met but for a float's error stays."""
    scale = 10.0**decimals
    return math.ceil(value * scale - 1e-6) / scale


def least_decimals(value: float, decimals: int) -> int:
    """`decimals`, or as many as show two digits of a smaller value, at most 6: 0.00013, not 0.00."""
    if value <= 0:
        return decimals
    return max(decimals, min(6, 1 - math.floor(math.log10(value))))


def _three_digits(value: float) -> int:
    """Decimals for three significant digits, at most 3."""
    if value <= 0:
        return 1
    return min(3, max(0, 2 - math.floor(math.log10(value))))


def half_width(middle: float, interval: Interval) -> float:
    """The larger side of a confidence interval, so that what ± shows covers the interval."""
    return max(middle - interval[0], interval[1] - middle)


def is_lopsided(middle: float, interval: Interval, limit: float = LOPSIDED) -> bool:
    """Whether ± would mislead: one side is much longer, or the longer one, taken for both, would reach 0."""
    half, shorter = half_width(middle, interval), min(middle - interval[0], interval[1] - middle)
    reaches_zero = abs(middle) <= half and not interval[0] <= 0 <= interval[1]
    return reaches_zero or half > limit * max(shorter, 0.0)


def refuse_no_time(budget_s: float | None) -> None:
    """Raises `ValueError` for a recorded budget of which no time is a share: the record may be anyone's."""
    if budget_s is not None and budget_s < 1e-9:
        raise ValueError("a budget of less than a nanosecond can't be spent")
