"""Values that built-in workloads refuse for their parameters, known without loading torch."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpurun.launcher.jobfile.checks.signature import Param
from gpurun.workloads.gpt_shape import shape_of

_RANGES: Mapping[str, tuple[int, int]] = {"num_workers": (0, 256)}
"""Counts that may be 0, or have a limit: more processes per device than that take minutes to start."""
_CHOICES: Mapping[str, tuple[float, ...]] = {"version": (1, 1.5)}
_POSITIVE = frozenset({"learning_rate"})
_GPT_SIZES = ("layers", "width", "heads", "context", "vocabulary")
_FOLDERS: Mapping[str, str] = {"text": "text", "images": "image folder"}
"""Parameters that name a file or folder, and what to call it."""


def why_refused(param: Param, value: Any) -> str | None:
    """What a value of the right type must be instead, in words; `None` where nothing speaks against it."""
    if type(value) not in (int, float):
        return None
    least, most = _RANGES.get(param.name, (1 if "int" in param.types else -math.inf, math.inf))
    if value < least:
        return f"must be at least {least}"
    if value > most:
        return f"must be at most {most}"
    if param.name in _CHOICES and value not in _CHOICES[param.name]:
        return f"must be {' or '.join(f'{choice:g}' for choice in _CHOICES[param.name])}"
    if param.name in _POSITIVE and not 0 < value < math.inf:
        return "must be positive"
    return None


def why_refused_together(workload: str, params: Mapping[str, Any]) -> str | None:
    """Why no model can have these sizes, though each may be right by itself."""
    if workload != "gpt":
        return None
    own = {name: params.get(name) for name in _GPT_SIZES}
    if any(type(number) not in (int, type(None)) for number in own.values()):
        return None  # which is said of that one
    try:
        shape_of(str(params.get("preset", "tiny")), **own)
    except ValueError as error:
        return str(error)
    return None


def missing_files(given: Mapping[str, Any], job_dir: Path) -> Iterator[tuple[str, str]]:
    """Parameters that name a file or folder that is not there, each with what to say of it."""
    for name, what in _FOLDERS.items():
        place = given.get(name)
        if not isinstance(place, str) or not place:
            continue
        path = Path(os.path.expanduser(place))
        if not os.path.exists(job_dir / path):
            where = "" if path.is_absolute() else "; relative names are looked for beside the job file"
            yield name, f"the {what} {path} does not exist{where}"
