"""The files of a run that the tab reads, checked and bounded; what is damaged counts as not there.

Recorded steps are thinned out to what a page can show.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from gpurun.launcher.compare.figures.recorded import step_numbers
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.claim import Running
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.tensorboard_plugin.logdir.listing import Listed, inside, read_end, read_inside

T = TypeVar("T")
Stamp = tuple[int, int]
"""Size and time of a file."""
Status = Literal["running", "done", "stopped"]
MAX_BYTES = 64 << 20
LIVE_S = 120.0
"""Rounds are written every second or so; building a model and its first step may take a minute."""


class Outline(msgspec.Struct, frozen=True):
    """The part of a comparison that the list of runs needs."""

    name: str = ""
    complete: bool = False


class Name(msgspec.Struct, frozen=True):
    """The part of a plan that the list of runs needs."""

    name: str = ""


def read_comparison(listed: Listed) -> Comparison | None:
    """Reads the run's comparison; no figures of another gpurun, of which the terminal may show others now."""
    found = _read(listed, listed.run.comparison, Comparison)
    return found if found is None or found.is_current else found.without_figures()


def read_plan(listed: Listed) -> Plan | None:
    return _read(listed, listed.run.plan, Plan)


def read_host(listed: Listed) -> dict[str, Any]:
    return _read(listed, listed.run.host, dict[str, Any]) or {}


def outline(listed: Listed) -> Outline:
    """Name and whether all is measured; from the plan while there is no comparison."""
    found = _read(listed, listed.run.comparison, Outline)
    if found is not None:
        return found
    plan = _read(listed, listed.run.plan, Name)
    return Outline(plan.name if plan else "")


def status(listed: Listed) -> Status:
    """Whether a command works on it: here its process lives; elsewhere something was written a moment ago."""
    if listed.kind == "traces" or outline(listed).complete:
        return "done"
    claim = _read(listed, listed.run.running, Running)
    if claim is None or not claim.may_live:
        return "stopped"
    if claim.is_here:
        return "running"
    return "running" if time.time() - changed_s(listed) < LIVE_S else "stopped"


def changed_s(listed: Listed) -> float:
    """When something was last written, in unix time."""
    if listed.kind == "traces":
        return max(_mtime_s(listed, listed.path / name) for name in listed.trace_names)
    run = listed.run
    if outline(listed).complete:
        return _mtime_s(listed, run.comparison)
    events = (run.path / "launches").glob("*/events.jsonl")
    return max(_mtime_s(listed, path) for path in (run.plan, run.comparison, *events))


def version(*facts: Any, files: Iterable[Path] = ()) -> str:
    """Another one whenever the facts or the files are others."""
    stamps = [(os.fsencode(file).hex(), stamp_of(file)) for file in files]  # a name may be any bytes
    return hashlib.sha256(msgspec.json.encode((facts, stamps))).hexdigest()[:16]


def _read(listed: Listed, path: Path, kind: type[T]) -> T | None:
    if listed.kind == "traces" or inside(listed.root, path) is None:
        return None
    found: T | None = _DOCUMENTS.get(
        (listed.root, path, kind), stamp_of(path), lambda: _decoded(listed.root, path, kind)
    )
    return found


class Kept:
    """Results made of files, each as it is now; of all together, those of so many bytes of files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, tuple[Stamp, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, stamp: Stamp, make: Callable[[], Any]) -> Any:
        """Returns the result made when the file had this stamp, or makes it now."""
        with self._lock:
            before, value = self._kept.get(key, (None, None))
            if before == stamp:
                self._kept.move_to_end(key)
                return value
        value = make()
        with self._lock:
            self._kept[key] = stamp, value
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and self.num_bytes > self._max_bytes:
                self._kept.popitem(last=False)
        return value

    @property
    def num_bytes(self) -> int:
        """Size of the files."""
        return sum(max(stamp[0], _LEAST_BYTES) for stamp, _ in self._kept.values())


_LEAST_BYTES = 1 << 12
_DOCUMENTS = Kept(MAX_BYTES)


def _decoded(root: Path, path: Path, kind: Any) -> Any:
    content = read_inside(root, path, MAX_BYTES)
    try:
        return None if content is None else msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def stamp_of(path: Path) -> Stamp:
    """Size and time of a file, which change with its content; -1 where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (-1, -1)
    return found.st_size, found.st_mtime_ns


def _mtime_s(listed: Listed, path: Path) -> float:
    return path.stat().st_mtime if inside(listed.root, path) else 0.0


MAX_STEPS_BYTES = 64 << 20
"""The limit of one rank's file, from its end; 300,000 steps."""
MAX_VARIANT_BYTES = 256 << 20
"""The limit of the files of all ranks together; each may give the same share of it."""
MAX_RANKS = 256
MAX_VALUES = 2000
"""The limit of one variant, over all ranks."""
NUM_SLOWEST = 10
"""Steps that stay in any case."""

Key = tuple[str, int, int, int]
_DECODER = msgspec.json.Decoder(StepRecord)


def variant_steps(listed: Listed, variant: str) -> dict[str, Any]:
    """Every timed step, or evenly chosen ones, on every rank; see README.md."""
    by_rank, first = _timed_by_rank(listed, variant)
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    found = {key: step for step in first if (key := key_of(step)) in common}
    ordered, numbers = list(found), step_numbers(list(found.values()))
    slowest = [max(steps[key] for steps in by_rank.values()) for key in ordered]
    chosen = choose(slowest, max(MAX_VALUES // max(len(by_rank), 1), 2 * NUM_SLOWEST))
    keys = [ordered[i] for i in chosen]
    return {
        "total": len(ordered),
        "ranks": list(by_rank),
        "number": [numbers[i] for i in chosen],
        "round": [key[1] for key in keys],
        "launch": [key[0] for key in keys],
        "step_ms": [slowest[i] for i in chosen],
        "by_rank_ms": [[steps[key] for key in keys] for steps in by_rank.values()],
    }


def _timed_by_rank(listed: Listed, variant: str) -> tuple[dict[int, Mapping[Key, float]], list[StepRecord]]:
    """The result of `timed` for each rank, and all records of the first; those of all would fill memory."""
    files = list(rank_files(listed.run.variant(variant), ".jsonl").items())[:MAX_RANKS]
    share = min(MAX_STEPS_BYTES, MAX_VARIANT_BYTES // max(len(files), 1))
    found: dict[int, Mapping[Key, float]] = {}
    first: list[StepRecord] = []
    for rank, path in files:
        records = decode(read_end(listed.root, path, share))
        first = records if not found else first
        found[rank] = timed(records)
    return found, first


def decode(lines: bytes) -> list[StepRecord]:
    """The records; lines that are damaged are left out."""
    found = []
    for line in lines.splitlines():
        try:
            found.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue
    return found


def timed(records: Sequence[StepRecord]) -> Mapping[Key, float]:
    """Milliseconds of the timed steps, in their order."""
    return {key_of(record): record.step_ns / 1e6 for record in records if record.kind == "timed"}


def key_of(record: StepRecord) -> Key:
    """Which step this is, on all ranks."""
    return record.launch, record.round, record.order, record.step


def choose(values: Sequence[float], number: int) -> list[int]:
    """Positions of `number` values, evenly chosen, the largest ones always among them; in order."""
    if len(values) <= number:
        return list(range(len(values)))
    largest = sorted(range(len(values)), key=values.__getitem__)[-NUM_SLOWEST:]
    even = [i * len(values) // (number - NUM_SLOWEST) for i in range(number - NUM_SLOWEST)]
    return sorted({*largest, *even})
