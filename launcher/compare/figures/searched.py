"""What a search has tried, and what it has come to, from the files of its run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gpurun.launcher.compare.label import value_text
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import SearchRecord, TrialRecord, Unmeasured
from gpurun.launcher.units import format_count, format_number


@dataclass(frozen=True)
class Tried:
    """A combination that `gpurun tune` has tried."""

    variant: str
    settings: Mapping[str, Any]
    trials: int
    step_ms: float | None
    """The mean over its trials; `None`: one failed."""
    peak_gib: float | None
    """Where the job states `memory`."""


@dataclass(frozen=True)
class SearchResult:
    """What `gpurun tune` has searched."""

    space: int
    """Combinations of what the job compares."""
    distinct: int
    """Of those that can be, the ones that differ, with the job's own setting."""
    tried: int
    left_out: tuple[Unmeasured, ...]
    """Combinations that can't be, and those that weren't tried."""
    failed: tuple[Unmeasured, ...]
    best: str | None
    """The variant that leads the comparison at the end; before it, the fastest by its trials."""
    against_own: float | None
    """How many percent slower the best is than the job's own setting, negative where it is faster; interval
    and verdict are that variant's. `None` while that isn't known, or where it is that setting."""
    at_most_missed_percent: float | None
    """By the model, with 95 % confidence: no other combination is faster than the best of those compared at
    the end by more."""
    combinations: tuple[Tried, ...]
    """In the order in which they were tried."""
    is_over: bool
    """Whether the comparison of the best has begun."""
    summary: str


def search_result(run: RunDir, best: str | None, percent: float | None) -> SearchResult | None:
    """What a search has come to so far; `None` of a run that is none.

    Args:
        run: whose directory has the records of the search.
        best: the leader of those that are compared at its end; `None` before any is measured.
        percent: how much slower that is than their baseline.
    """
    record = run.read_search()
    if record is None:
        return None
    tried = _tried(run.read_trials())
    return SearchResult(
        space=record.space,
        distinct=record.distinct,
        tried=len(tried),
        left_out=record.left_out,
        failed=record.failed,
        best=best or record.best,
        against_own=percent if best != record.own else None,
        at_most_missed_percent=record.at_most_missed_percent,
        combinations=tried,
        is_over=bool(record.finalists),
        summary=_summary(record, tried),
    )


def _tried(trials: Sequence[TrialRecord]) -> tuple[Tried, ...]:
    """Each combination with all of its trials."""
    by_variant: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        by_variant.setdefault(trial.variant, []).append(trial)
    return tuple(_together(variant, own) for variant, own in by_variant.items())


def _together(variant: str, trials: Sequence[TrialRecord]) -> Tried:
    times = [trial.step_ms for trial in trials if trial.step_ms is not None]
    peaks = [trial.peak_gib for trial in trials if trial.peak_gib is not None]
    step_ms = fmean(times) if len(times) == len(trials) else None
    return Tried(variant, trials[0].settings, len(trials), step_ms, max(peaks, default=None))


def _summary(record: SearchRecord, tried: Sequence[Tried]) -> str:
    """How many combinations were tried, and how much better others may be."""
    failed = f", of which {len(record.failed)} failed" if record.failed else ""
    counts = f"{len(tried)} of {format_count(record.distinct)} different combinations"
    if not record.finalists:
        best = next((one for one in tried if one.variant == record.best), None)
        fastest = f"; the fastest is {value_text(best.settings)}" if best else ""
        return f"The search is not over: {counts} have been tried{failed}{fastest}."
    said = f"The search tried {counts}{failed}"
    missed = record.at_most_missed_percent
    if len(tried) == record.distinct:
        return f"{said}."
    if missed is None:
        return f"{said}, too few to say how much faster others may be: give it a larger budget."
    most = "faster" if missed < 0.05 else f"more than {format_number(missed, 1)} % faster"
    return f"{said}; by a model of their times no other is {most} than the best of these (95 % confidence)."
