"""What can't be applied from outside: calls that cost time in each step, by file and line."""

from collections.abc import Iterator
from pathlib import Path

from gpurun.launcher.rundir.improvement import Advice
from gpurun.launcher.rundir.records import Observed, Place
from gpurun.launcher.units import format_number

IN_MOST = 0.8
"""Of the steps: a call that is made in fewer of them is of something rare, as a log line is."""
AT_LEAST_TWO = 1.8
"""Backward passes per step from which gradients are accumulated; a pass in validation adds little."""


def advice_on(seen: Observed, directory: Path) -> Iterator[Advice]:
    """Advice on a program, by what a rank of it was seen to do.

    Args:
        directory: of the job, to which names of files are relative.
    """
    for place in sorted(seen.places, key=lambda each: (each.file, each.line)):
        if seen.steps and (text := _text(place, place.count / seen.steps)):
            file = Path(place.file)
            inside = file.is_relative_to(directory)
            yield Advice(f"{file.relative_to(directory) if inside else file}:{place.line}", text)


def _text(place: Place, per_step: float) -> str:
    if place.kind == "gradients":
        passes = format_number(per_step, 0)
        return (
            f"{passes} backward passes for each step send gradients: `with model.no_sync():` around all but "
            "the last of them, and their forward passes"
            if per_step >= AT_LEAST_TWO
            else ""
        )
    if per_step < IN_MOST:
        return ""
    if place.kind == "copy":
        return (
            f"{place.name}() waits for a copy in each step: `pin_memory=True` of the DataLoader and "
            "`non_blocking=True` here let it go on"
        )
    call = _SHOWN.get(place.name, f"{place.name}()")
    return f"{call} waits for the GPU in each step: read the value in fewer steps, or keep it on the GPU"


_SHOWN = {"__bool__": "a condition", "__float__": "float()", "__int__": "int()"}
