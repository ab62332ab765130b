"""What earlier runs on this machine show: how much launches scatter, and how long they take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.files import RunDir, read_json

MOST_RUNS = 20
"""Directories that are looked at, the newest ones of a job; then as many of others."""


@dataclass(frozen=True)
class Earlier:
    """A run whose variants were launched several times."""

    path: Path
    shared_percent: float | None
    """Standard deviation of the difference of two variants over the launches that both are in."""
    apart_percent: float | None
    """Over launches that each has of its own."""
    launch_s: float | None
    """Of a launch after the first ones; `None` for another job's."""

    def scatter_percent(self, is_shared: bool) -> float | None:
        """For variants in the same launches, or in launches of their own; the other where it isn't known."""
        known = (self.shared_percent, self.apart_percent)
        wanted = known if is_shared else known[::-1]
        return next((percent for percent in wanted if percent is not None), None)


@dataclass(frozen=True)
class _Compared:
    """The part of `comparison.json` that is needed."""

    scatter: Mapping[str, float | None]
    host: Mapping[str, Any]


def find_earlier(job: str, hostname: str, runs: Path = Path("runs")) -> Earlier | None:
    """The newest run of this job on this machine that shows how much launches scatter, else of any job."""
    for name, path in _newest_first(job, runs):
        try:
            compared = read_json(path / "comparison.json", _Compared)
        except MachineError:
            continue
        shared, apart = compared.scatter.get("shared_percent"), compared.scatter.get("apart_percent")
        if compared.host.get("hostname") == hostname and (shared, apart) != (None, None):
            return Earlier(path, shared, apart, _launch_s(RunDir(path)) if name == job else None)
    return None


def _newest_first(job: str, runs: Path) -> Iterator[tuple[str, Path]]:
    """Runs of the job, then those of others; their directories are named by the time."""
    found = sorted(runs.glob("*/*/comparison.json"), key=lambda path: path.parent.name, reverse=True)
    own = [path.parent for path in found if path.parent.parent.name == job]
    others = [path.parent for path in found if path.parent.parent.name != job]
    yield from ((path.parent.name, path) for path in (*own[:MOST_RUNS], *others[:MOST_RUNS]))


def _launch_s(run: RunDir) -> float | None:
    """The median of the second half, in which only close rivals run, without interrupted ones."""
    logs = [run.read_events(path.parent.name) for path in sorted(run.path.glob("launches/*/events.jsonl"))]
    seconds = [(log[-1].time_ns - log[0].time_ns) / 1e9 for log in logs if log and log[-1].stage == "done"]
    return median(seconds[len(seconds) // 2 :]) if seconds else None
