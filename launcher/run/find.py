"""Finds the run, or the traces, that a path on the command line means."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gpurun.launcher.errors import SpecError, unreadable
from gpurun.launcher.jobfile.yaml.describe import nearest
from gpurun.launcher.rundir.files import RunDir, newest_name
from gpurun.launcher.rundir.paths import (
    IMPROVEMENT,
    LATEST,
    PLAN,
    SELFTEST,
    Url,
    is_name,
    places_of,
    real_path,
    refuse_links,
)
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.units import first_of

MAX_RECORDS_BYTES = 1 << 25


def checked_run(directory: Path) -> RunDir:
    """A run that may be anyone's, without links in it, and whose records fit into memory.

    Raises:
        SpecError: it has some, or can't be read.
    """
    place, status = real_path(directory), directory.stat()
    if refuse_links(directory) > MAX_RECORDS_BYTES:
        raise SpecError(f"{directory} has larger records than any run; gpurun has no memory for them")
    return RunDir(directory, (status.st_dev, status.st_ino), place)


def find_run(path: Path) -> RunDir:
    """The run directory that `path` means: itself, `…/latest`, or the newest run of `runs/NAME`.

    Raises:
        SpecError: there is no run.
    """
    if (directory := run_directory(path)) is not None:
        return checked_run(directory)
    if (begun := RunDir(path)).invocation.is_file() or begun.spec.is_file():
        raise SpecError(
            f"{path}: this run ended before its plan was written, so there is nothing to resume\n"
            "    start a new run, with another --out or after removing that directory: gpurun JOB.yaml"
        )
    from gpurun.launcher.trace.analysis.discover import begins_as_trace  # loads what few commands need

    if path.is_file() and begins_as_trace(path):
        trace = shlex.quote(str(source_of(path)))
        place = shlex.quote(str(source_of(path.parent)))
        ways = f"to view this trace: gpurun view {place}\n    to analyse it: gpurun trace {trace}"
        raise SpecError(f"{source_of(path)} is a trace, not a run\n    {ways}")
    if (search := search_directory(path)) is not None:
        shown = shlex.quote(str(source_of(search)))
        runs = sorted(plan.parent.name for plan in search.glob(f"*/{PLAN}"))
        named = f"; its runs are in it: {first_of(runs, _MOST_NAMED)}" if runs else ""
        raise SpecError(f"{shown} is a search, not a run: `gpurun report {shown}` shows what it found{named}")
    raise SpecError(f"{_found(path)}; {_runs_near(path)}")


def search_directory(path: Path) -> Path | None:
    """The directory of a search of `gpurun improve` that `path` means, if there is one."""
    return _first_meant(path, lambda each: (each / IMPROVEMENT).is_file())


def _found(path: Path) -> str:
    """The kind of thing that is there instead of a run, by the name that its user knows."""
    if _is_job_file(path):
        return f"{source_of(path)} is a job file"
    selftest = _first_meant(path, lambda each: (each / SELFTEST).is_file())
    if selftest is not None:
        return f"{source_of(path)} is a self-test, not a run: what it found is in {selftest / SELFTEST}"
    return f"{source_of(path)}: no run here" if path.exists() else f"there is no run `{path}`"


def run_directory(path: Path) -> Path | None:
    """The run directory that `path` means, if there is one: with anything that has a plan's name."""
    return _first_meant(path, lambda each: (each / PLAN).exists() or (each / PLAN).is_symlink())


def _first_meant(path: Path, is_it: Callable[[Path], bool]) -> Path | None:
    """The first of the directories that `path` may mean for which that holds.

    Raises:
        SpecError: they can't be read.
    """
    try:
        return next(filter(is_it, _meant(path)), None)
    except OSError as error:
        raise SpecError(unreadable(error.filename, error)) from error


def _meant(path: Path) -> Iterator[Path]:
    """The directories that `path` may mean: itself, and the newest in it or, for `…/latest`, next to it."""
    yield path
    for directory in (path, path.parent)[: 1 + (path.name == LATEST)]:
        name = newest_name(directory / LATEST)
        if is_name(name):
            yield directory / name


def _is_job_file(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def are_runs(a: Path, b: Path) -> bool:
    """Whether both are runs; if neither is, they must be traces.

    Raises:
        SpecError: only one is a run, or a path that isn't one doesn't exist or is a job file.
    """
    runs = [run_directory(path) is not None for path in (a, b)]
    for path, found in zip((a, b), runs, strict=True):
        if not found and (_is_job_file(path) or not _through_latest(path).exists()):
            find_run(path)
    if runs[0] != runs[1]:
        run, other = (a, b) if runs[0] else (b, a)
        raise SpecError(
            f"{run} is a run and {other} is not; pass two runs, "
            f"or two directories of traces ({run}/variants/ID)"
        )
    return all(runs)


def _through_latest(path: Path) -> Path:
    """`runs/NAME/latest/…` as the path that it means; `latest` is a file, which no system call follows."""
    for directory in path.parents:
        if directory.name == LATEST and directory.is_file():
            return find_run(directory).path / path.relative_to(directory)
    return path


@dataclass(frozen=True)
class NamedTraces:
    """The traces that the command line names."""

    paths: tuple[Path, ...]
    within: tuple[Path, ...]
    """The directories that their files have to be in when they are opened."""


def traces_of(*paths: Path) -> NamedTraces:
    """Each path itself, or, where it is a run, the directory of the one variant that has traces.

    Raises:
        SpecError: several variants of a run have traces: their ranks must not be mixed. Or a path is a job
            file.
        TraceError: a path doesn't exist.
    """
    found = [_traces_of(path) for path in paths]
    return NamedTraces(
        tuple(chain(*(traces.paths for traces in found))), tuple(chain(*(traces.within for traces in found)))
    )


def _traces_of(path: Path) -> NamedTraces:
    if run_directory(path) is None and not _is_job_file(path):
        meant = _through_latest(path)
        return NamedTraces((meant,), places_of((meant,)))
    run = find_run(path)
    directories = sorted({trace.parent for trace in run.path.glob("variants/*/*.pt.trace.json.gz")})
    if not directories:
        raise SpecError(
            f"{path}: this run took no traces (to take some, put `profile: {{steps: 3}}` into the job)"
        )
    if len(directories) > 1:
        named = "".join(f"\n    gpurun trace {source_of(directory)}" for directory in directories)
        text = (
            f"{source_of(path)} holds the traces of {len(directories)} variants; choose one of them:{named}"
        )
        raise SpecError(text)
    return NamedTraces(tuple(directories), run.within)


_MOST_NAMED = 5


def _runs_near(path: Path) -> str:
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
