"""One figure with its uncertainty, as the cell of a table."""

from rich.text import Text

from gpurun.launcher.compare.model import Difference, Interval, StepTime
from gpurun.launcher.units import format_number, round_up

VERDICT_STYLES = {"faster": "green", "slower": "yellow", "same": "dim", "inconclusive": "dim", "baseline": ""}


LOPSIDED = 1.5
"""From this ratio of its sides on, an interval is written out: one ± for both would claim too much of one."""


def half_width(middle: float, interval: Interval) -> float:
    """The larger side of a confidence interval: what stands behind ± covers the interval."""
    return max(middle - interval[0], interval[1] - middle)


def is_lopsided(middle: float, interval: Interval) -> bool:
    """Whether one side is so much longer than the other that ± would mislead."""
    shorter = min(middle - interval[0], interval[1] - middle)
    return half_width(middle, interval) > LOPSIDED * max(shorter, 0.0)


def step_text(step: StepTime | None, decimals: int) -> Text:
    """`42.1 ± 0.2`, or `42.1 (41.9 to 43.0)`; without an interval `42.1`."""
    if step is None:
        return Text("")
    text = format_number(step.median, decimals)
    if step.ci is None:
        return Text(text)
    if is_lopsided(step.median, step.ci):
        low, high = (format_number(end, decimals) for end in step.ci)
        return Text.assemble(text, (f" ({low} to {high})", "dim"))
    half = round_up(half_width(step.median, step.ci), decimals)
    return Text.assemble(text, (f" ± {format_number(half, decimals)}", "dim"))


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
    """`0.8`, in percentage points, or `+29.1 to +181.6`; nothing beside the baseline itself."""
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


def number_text(value: float | None, decimals: int) -> Text:
    """The number; nothing where it doesn't apply."""
    return Text("" if value is None else format_number(value, decimals))
