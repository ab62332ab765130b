"""A difference to the baseline in the cells of tables: verdict, uncertainty and factor."""

from rich.text import Text

from gpurun.launcher.compare.model import Difference
from gpurun.launcher.units import Interval, format_number, half_width, is_lopsided, round_up

VERDICT_STYLES = {"faster": "green", "slower": "yellow", "same": "dim", "inconclusive": "dim", "baseline": ""}


def interval_text(interval: Interval) -> str:
    """`−0.4 to +0.7`."""
    return f"{format_number(interval[0], 1, signed=True)} to {format_number(interval[1], 1, signed=True)}"


def verdict_text(difference: Difference | None) -> Text:
    """`13.8 % slower`, `+0.3 % same`, `baseline`.

    `faster` and `slower` carry the direction; the other verdicts don't, so their figure has its sign.
    """
    if difference is None:
        return Text("")
    style = VERDICT_STYLES[difference.verdict]
    if difference.verdict == "baseline" or difference.percent is None:
        return Text(difference.verdict, style)
    directed = difference.verdict in ("faster", "slower")
    percent = abs(difference.percent) if directed else difference.percent
    return Text(f"{format_number(percent, 1, signed=not directed):>5} % {difference.verdict}", style)


def uncertainty_text(difference: Difference | None) -> Text:
    """`0.8`, in percentage points, or `+29.1 to +181.6`; nothing for the baseline itself."""
    if difference is None or difference.verdict == "baseline":
        return Text("")
    if difference.ci is None or difference.percent is None:
        return Text("")
    if is_lopsided(difference.percent, difference.ci):
        return Text(interval_text(difference.ci), "dim")
    half = round_up(half_width(difference.percent, difference.ci), 1)
    return Text(format_number(half, 1), "dim")


def factor_text(difference: Difference | None) -> Text:
    """`1.83×`: how many steps fit into one of the baseline's; only where a difference is established."""
    if difference is None or difference.percent is None or difference.verdict not in ("faster", "slower"):
        return Text("")
    return Text(f"{format_number(100 / (100 + difference.percent), 2)}×", "dim")
