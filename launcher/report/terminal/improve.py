"""What `gpurun improve` prints: the answer in three lines, then the remedies."""

import math
import shlex
from collections.abc import Sequence

from gpurun.launcher.report.terminal.grid import cut, grid
from gpurun.launcher.rundir.improvement import (
    BEFORE_EPOCH_ENDS,
    BEGIN_ALIKE,
    BEGINS_OTHERWISE,
    CHANGES_NUMERICS,
    NO_TIME,
    YOURS,
    Improvement,
    RemedyResult,
)
from gpurun.launcher.units import (
    format_percent,
    format_percent_interval,
    plural,
)

LABEL = "{:<8} {}"
MAX_PLACE, MAX_WHY = 60, 110
"""Columns of a place and of a reason, which may be a message of another program; JSON has all of it."""


def improve_lines(found: Improvement, name: str, writes: bool = False) -> list[str]:
    """The answer, the table, and what limits it.

    Args:
        name: of the search's directory.
        writes: whether the command then applies the change.
    """
    lines = [LABEL.format(label, text) for label, text in answer(found, name, writes) if text]
    rows = [
        (each.code, time_text(each), each.verdict, cut(each.place, MAX_PLACE), cut(each.why, MAX_WHY))
        for each in found.tried
    ]
    if rows:
        lines += ["", *grid(("remedy", "time", "verdict", "", ""), rows)]
    if found.untried:
        lines += ["", *(untried_line(why, some) for why, some in found.untried.items())]
    if found.advice:
        lines += ["", *(f"{each.place}: {each.text}" for each in found.advice)]
    if found.diff:
        lines += ["", *found.diff.removesuffix("\n").split("\n")]
    if found.notes:
        lines += ["", *found.notes]
    return lines


def untried_line(why: str, remedies: Sequence[RemedyResult]) -> str:
    """The line with the remedies that were not tried for the same reason."""
    reason = f" ({cut(why, MAX_WHY)})" if why else " yet"
    return f"not tried{reason}: {', '.join(each.code for each in remedies)}"


def answer(found: Improvement, name: str, writes: bool = False) -> list[tuple[str, str]]:
    """The three lines by their labels."""
    resume = f"gpurun improve --resume {shlex.quote(name)}"
    drawing = (each for each in found.remedies if each.verdict == "other random numbers")
    first = [
        f"{each.code} may take {format_percent(-each.percent)} less time per step, with other random "
        "numbers: begin again with --allow-other-random-numbers"
        for each in drawing
        if each.percent is not None and each.percent < 0
    ]
    minutes = math.ceil((found.needs_s or 2 * found.budget_s) / 60)
    others = [f"begin again with --budget {minutes}m"] if found.is_open and found.gain is None else []
    if late := sum(NO_TIME in each.why for each in found.remedies) if found.gain else 0:
        others = [f"--budget {minutes}m has time for {plural(late, 'more remedy')}"]
    if any(each.why == BEGINS_OTHERWISE for each in found.remedies):
        others.append(BEGIN_ALIKE.format(found.name))
    if not found.numerics and any(each.why == CHANGES_NUMERICS for each in found.remedies):
        others.append("--numerics also tries what changes numerics")
    if found.gain is not None and found.gain.percent < 0:
        percent, ci = -found.gain.percent, found.gain.ci
        interval = None if ci is None else (-ci[1], -ci[0])
        within = f" ({format_percent_interval(percent, interval)})" if interval else ""
        less = f"{format_percent(percent, interval)} less time per step than {found.name} as it is{within}"
        if found.first_steps is not None:
            less += f", {BEFORE_EPOCH_ENDS.format(found.first_steps)}"
        variables = (f"{name}={value}" for name, value in found.env.items())
        start = " ".join((*variables, *(f"--{name} {value}" for name, value in found.options.items())))
        write = f"{resume} --write applies the change" if found.diff and not writes else ""
        if found.written:
            write = f"improve {found.name} again"
        then = f"then {found.then}" if found.then else ""
        num_yours = sum(note.startswith(YOURS) for note in found.notes)
        yours = f"make {plural(num_yours, 'change')} yourself, see the last lines" if num_yours else ""
        parts = (write, yours, f"start with {start}" if start else "", *first, then, *others)
        kept = f"{len(found.kept)} of {plural(len(found.tried), 'remedy')} kept"
        return [("Faster", f"{less}: {kept}"), ("Why", found.why), ("Next", "; ".join(filter(None, parts)))]
    yet = "" if found.complete else " yet"
    num = len(found.tried) + sum(len(found.untried.get(why, ())) for why in ("", NO_TIME))
    tried = f": {len(found.tried)} of {plural(num, 'remedy')} tried" if num else ""
    text = f"nothing is proven to make {found.name} faster{yet}{tried}"
    then = "; ".join((*first, *others))
    return [("Answer", text), ("Why", found.why), ("Next", then if found.complete else resume)]


def time_text(result: RemedyResult) -> str:
    """`−27 % (−29 to −25)`: the change of a step's time, with its interval; empty where it has none."""
    if result.percent is None or result.ci is None:
        return ""
    interval = format_percent_interval(result.percent, result.ci, signed=True)
    return f"{format_percent(result.percent, result.ci, signed=True)} ({interval})"
