"""A difference to the baseline in the cells of tables: verdict, uncertainty and factor."""

from rich.text import Text

from gpurun.launcher.compare.model import Difference
from gpurun.launcher.units import (
    LOPSIDED,
    TWICE,
    Interval,
    format_factor,
    format_factor_interval,
    format_number,
    format_percent,
    format_percent_interval,
    half_width,
    is_lopsided,
    round_up,
)

WIDE = 5.0
"""Percentage points of an interval's half from which on one ± would hide which of its sides is longer."""
AS_LONG = 1.1
"""How many times as long one side may be as the other then."""
VERDICT_STYLES = {"faster": "green", "slower": "yellow", "same": "dim", "inconclusive": "dim", "baseline": ""}


def interval_text(interval: Interval) -> str:
    """`−0.4 to +0.7`."""
    return f"{format_number(interval[0], 1, signed=True)} to {format_number(interval[1], 1, signed=True)}"


def verdict_text(difference: Difference | None) -> Text:
    """`13.8 % slower`, `+0.3 % same`, `baseline`; as precise as the interval supports, as in the answer.

    `faster` and `slower` carry the direction; the other verdicts don't, so their figure has its sign.
    """
    if difference is None:
        return Text("")
    style = VERDICT_STYLES[difference.verdict]
    if difference.verdict == "baseline" or difference.percent is None:
        return Text(difference.verdict, style)
    directed = difference.verdict in ("faster", "slower")
    percent = abs(difference.percent) if directed else difference.percent
    if difference.verdict == "slower" and percent >= TWICE:
        return Text(f"{format_factor(percent, difference.ci)} as long", style)
    shown = format_percent(percent, _directed(difference), signed=not directed)
    return Text(f"{shown} {difference.verdict}", style)


def uncertainty_text(difference: Difference | None) -> Text:
    """`0.8`, in percentage points, or `13 to 57`, as in the answer; nothing for the baseline itself."""
    if difference is None or difference.verdict == "baseline":
        return Text("")
    if difference.ci is None or difference.percent is None:
        return Text("")
    if difference.verdict == "slower" and difference.percent >= TWICE:
        return Text(format_factor_interval(difference.ci), "dim")
    half = half_width(difference.percent, difference.ci)
    if is_lopsided(difference.percent, difference.ci, AS_LONG if half > WIDE else LOPSIDED):
        sign = -1 if difference.verdict == "faster" else 1
        ends = sorted(sign * end for end in difference.ci)
        return Text(format_percent_interval(sign * difference.percent, (ends[0], ends[1])), "dim")
    return Text(format_number(round_up(half, 1), 1), "dim")


def _directed(difference: Difference) -> Interval | None:
    """The interval of how much faster a faster variant is; of others as it is."""
    if difference.ci is None or difference.verdict != "faster":
        return difference.ci
    low, high = difference.ci
    return -high, -low


def factor_text(difference: Difference | None) -> Text:
    """`1.83×`: how many steps fit into one of the baseline's; only where a difference is established."""
    if difference is None or difference.percent is None or difference.verdict not in ("faster", "slower"):
        return Text("")
    return Text(f"{format_number(100 / (100 + difference.percent), 2)}×", "dim")
