"""Figures from earlier runs on this machine: how much launches scatter, and how long one takes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gpurun.launcher.errors import MachineError
from gpurun.launcher.jobfile.yaml.describe import nearest
from gpurun.launcher.plan.estimate import Earlier
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.paths import LATEST
from gpurun.launcher.rundir.records import between_s, elapsed_s
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.rundir.url import Url
from gpurun.launcher.units import first_of

MOST_RUNS = 20
"""Earlier runs that are looked at, the newest ones of a job; then as many of others."""


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
            launch_s = _launch_s(RunDir(path)) if name == job else None
            return Earlier(path, shared, apart, launch_s)
    return None


def _newest_first(job: str, runs: Path) -> Iterator[tuple[str, Path]]:
    """Runs of the job, then those of others; their directories are named by the time."""
    found = sorted(runs.glob("*/*/comparison.json"), key=lambda path: path.parent.name, reverse=True)
    own = [path.parent for path in found if path.parent.parent.name == job]
    others = [path.parent for path in found if path.parent.parent.name != job]
    yield from ((path.parent.name, path) for path in (*own[:MOST_RUNS], *others[:MOST_RUNS]))


def _launch_s(run: RunDir) -> float | None:
    """Seconds from one launch to the next: the median of the second half, in which only close rivals run."""
    logs = [log for log in run.read_all_events().values() if log and log[-1].stage == "done"]
    seconds = [*map(elapsed_s, logs)]
    gaps = between_s(logs, run.read_commands()) or [0.0]
    return median(seconds[len(seconds) // 2 :]) + median(gaps) if seconds else None


_MOST_NAMED = 5


def runs_near(path: Path) -> str:
    """The newest runs near a path that means none, the latest first, or the one called alike; of a URL, those
    below it.
    """
    if isinstance(source_of(path), Url):
        return _runs_below(path)
    near = path if path.is_dir() else path.parent
    places = dict.fromkeys((near, near.parent, Path("runs")))
    try:
        found = [place / LATEST for place in places if (place / LATEST).is_file()]
        found += [each for place in places for each in sorted(place.glob(f"*/{LATEST}")) if each.is_file()]
        found.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    except OSError:
        found = []
    runs = list(dict.fromkeys(map(str, found)))
    if not runs:
        return "runs are in runs/NAME/TIME, the newest is runs/NAME/latest"
    named = (path, path / LATEST, "runs" / path, "runs" / path / LATEST)
    if meant := next((run for each in named for run in runs if _is_near(Path(run), each)), None):
        return f"did you mean {meant}?"
    if not runs[1:]:
        return f"the newest run is {runs[0]}"
    return f"the newest runs are {first_of(runs, _MOST_NAMED)}"


def _runs_below(copy: Path) -> str:
    """The text with the URLs of the runs in the copy of a store."""
    runs = sorted(str(source_of(plan.parent)) for plan in copy.rglob(RunDir(copy).plan.name))
    return f"the runs below it are {first_of(runs, _MOST_NAMED)}" if runs else "name the URL of a run"


def _is_near(run: Path, path: Path) -> bool:
    """Whether the paths differ in one name at most, and those two are alike."""
    if len(run.parts) != len(path.parts):
        return False
    others = [pair for pair in zip(run.parts, path.parts, strict=True) if pair[0] != pair[1]]
    return not others or (len(others) == 1 and nearest(others[0][1], [others[0][0]]) is not None)
