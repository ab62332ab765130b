"""Finds the runs and traces that paths on the command line mean."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gpurun.launcher.errors import SpecError
from gpurun.launcher.run.open import find_run, is_job_file, run_directory
from gpurun.launcher.rundir.opening import places_of
from gpurun.launcher.rundir.paths import LATEST
from gpurun.launcher.rundir.store import source_of


def is_run(path: Path) -> bool:
    """Whether `path` means a run directory."""
    return run_directory(path) is not None


def are_runs(a: Path, b: Path) -> bool:
    """Whether both are runs; if neither is, they must be traces.

    Raises:
        SpecError: only one is a run, or a path that isn't one doesn't exist or is a job file.
    """
    runs = [is_run(path) for path in (a, b)]
    for path, found in zip((a, b), runs, strict=True):
        if not found and (is_job_file(path) or not through_latest(path).exists()):
            find_run(path)
    if runs[0] != runs[1]:
        run, other = (a, b) if runs[0] else (b, a)
        raise SpecError(
            f"{run} is a run and {other} is not; pass two runs, "
            f"or two directories of traces ({run}/variants/ID)"
        )
    return all(runs)


def through_latest(path: Path) -> Path:
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
    if not is_run(path) and not is_job_file(path):
        meant = through_latest(path)
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
