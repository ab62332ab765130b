"""What `gpurun improve` prints: the answer in three lines, then the remedies."""

from gpurun.launcher.report.terminal.grid import grid
from gpurun.launcher.rundir.improvement import Improvement, RemedyResult
from gpurun.launcher.units import (
    format_number,
    format_percent,
    format_percent_interval,
    half_width,
    is_lopsided,
    percent_decimals,
    round_up,
)

LABEL = "{:<8} {}"


def improve_lines(found: Improvement, name: str) -> list[str]:
    """The answer, the table, and what limits it.

    Args:
        name: of the search, as commands take it.
    """
    lines = [LABEL.format(label, text) for label, text in answer(found, name) if text]
    rows = [(each.code, time_text(each), each.verdict, each.place, each.why) for each in found.remedies]
    if rows:
        lines += ["", *grid(("remedy", "time", "verdict", "", ""), rows)]
    if found.diff:
        lines += ["", *found.diff.splitlines()]
    if found.notes:
        lines += ["", *found.notes]
    return lines


def answer(found: Improvement, name: str) -> list[tuple[str, str]]:
    """The three lines by their labels."""
    kept, tried = found.kept, found.tried
    how_many = f"{len(kept)} of {plural_remedies(len(found.remedies))} kept"
    if found.gain is not None and found.gain.percent < 0:
        percent, ci = -found.gain.percent, found.gain.ci
        interval = None if ci is None else (-ci[1], -ci[0])
        less = format_percent(percent, interval)
        within = f" ({format_percent_interval(percent, interval)})" if interval else ""
        first = ("Faster", f"{less} less time per step than {found.name} as it is{within}: {how_many}")
        start = " ".join(f"{key}={value}" for key, value in found.env.items())
        parts = [f"gpurun improve --resume {name} --write applies the change" if found.diff else ""]
        parts += [f"start it with {start}" if start else ""]
        parts += [
            f"{each.code} draws other random numbers ({time_text(each)}): --allow-other-random-numbers"
            for each in found.remedies
            if each.verdict == "other random numbers" and (each.percent or 0.0) < 0
        ][:1]
        return [first, ("Why", found.why), ("Next", "; ".join(filter(None, parts)))]
    if not found.complete:
        text = f"nothing is known yet: {plural_remedies(len(tried))} tried"
        return [("Answer", text), ("Next", f"gpurun improve --resume {name} goes on")]
    if not found.remedies:
        text = f"there is nothing to try in {found.name}: no call that a remedy changes was seen in its files"
        return [("Answer", text), ("Why", found.why)]
    text = f"no remedy makes {found.name} faster beyond doubt: {len(tried)} of {len(found.remedies)} tried"
    undecided = [each for each in tried if each.verdict == "undecided"]
    longer = "a longer --budget may decide what is undecided" if undecided else ""
    return [("Answer", text), ("Why", found.why), ("Next", longer)]


def plural_remedies(number: int) -> str:
    """`1 remedy`, `9 remedies`."""
    return "1 remedy" if number == 1 else f"{number} remedies"


def time_text(result: RemedyResult) -> str:
    """`−27.1 ± 2.0 %`: the change of a step's time."""
    if result.percent is None:
        return ""
    if result.ci is None:
        return f"{format_percent(result.percent, signed=True)}"
    if is_lopsided(result.percent, result.ci):
        return f"{format_percent_interval(result.percent, result.ci)} %"
    decimals = percent_decimals(result.percent, result.ci)
    half = round_up(half_width(result.percent, result.ci), decimals)
    return f"{format_number(result.percent, decimals, signed=True)} ± {format_number(half, decimals)} %"
