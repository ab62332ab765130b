"""Parallel ranks on gloo: captures of gpurun know between which ranks a collective runs."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.integration.parallel import parallel_worker as worker
from tests.integration.ranks import run_ranks
from tests.said import trace_notes

pytestmark = [pytest.mark.slow, pytest.mark.alone]

WAKE_S = 0.004
"""What a loaded machine may take to wake a thread."""
GROUPS: dict[str, list[tuple[int, ...]]] = {
    "tp": [(0, 1), (2, 3)],
    "dp": [(0, 2), (1, 3)],
    "world": [(0, 1, 2, 3)],
}
Timed = dict[int, dict[str, list[float]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the traces and what the ranks timed, by capture."""
    directory = tmp_path_factory.mktemp("parallel")
    run_ranks(worker.__name__, worker.RANKS, directory)
    return directory


def timed(directory: Path) -> Timed:
    """Seconds by rank and name."""
    return {rank: json.loads((directory / f"rank{rank}.timed").read_text()) for rank in range(worker.RANKS)}


def test_waits_in_overlapping_groups_are_those_that_the_ranks_timed(directory: Path) -> None:
    assert min(largest_error(directory / name) for name in worker.MESHES) <= 1


def largest_error(capture: Path) -> float:
    """Of all waits, in what each may be off by: 2 %, or as long as a thread takes to wake."""
    report, took_s = analyse_paths([capture]), timed(capture)
    assert not trace_notes(report)
    assert set(report.clock_offsets_us.values()) == {0}
    kinds = {
        report.groups[each.group]: each.parallelism
        for each in report.collectives
        if each.kind == "all_reduce"
    }
    assert kinds[0, 1] == kinds[2, 3] == "tensor"
    assert kinds[0, 2] == kinds[1, 3] == "data"
    sent_s, asked_s = took_s[0]["message came"][-1], took_s[3]["message came"][-1]
    pairs = [(waits_s(report, None)[3], sent_s - asked_s)]
    for name, groups in GROUPS.items():
        for ranks in groups:
            waits, came_s = waits_s(report, ranks), {rank: took_s[rank][f"{name} came"][-1] for rank in ranks}
            pairs += [(waits[rank], max(came_s.values()) - came_s[rank]) for rank in ranks]
    return max(abs(wait - expected) / max(0.02 * expected, WAKE_S) for wait, expected in pairs)


def waits_s(report: TraceReport, ranks: tuple[int, ...] | None) -> dict[int, float]:
    """Seconds that each rank waited in the all-reduces among these ranks; without ranks, in messages."""
    found = dict.fromkeys(range(worker.RANKS), 0.0)
    asked = ("send", (0, 1, 2, 3)) if ranks is None else ("all_reduce", ranks)
    for each in report.collectives:
        for part in each.ranks if (each.kind, report.groups[each.group]) == asked else ():
            assert part.wait_us is not None
            found[part.rank] += part.wait_us / 1e6
    return found


def test_of_a_foreign_capture_waits_in_overlapping_groups_are_unknown(directory: Path) -> None:
    report = analyse_paths([directory / "foreign"])
    assert {each.group for each in report.collectives if each.kind == "all_reduce"} == {"unknown"}
    assert any("isn't recorded" in text for text in trace_notes(report))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_is_that_of_the_schedule(directory: Path, name: str, chunks: int) -> None:
    """(stages − 1) forward and backward passes, give or take what the step took beyond the schedule's time.

    And however loaded the machine is: no more than the part of the step in which the rank didn't sleep.
    """
    report = analyse_paths([directory / name])
    took_s = timed(directory / name)
    naps_s = [fmean(took_s[rank]["nap"]) for rank in range(worker.RANKS)]
    formula_s = (worker.RANKS - 1) * 2 * fmean(naps_s)
    ideal_s = worker.MICRO_BATCHES * chunks * 2 * fmean(naps_s) + formula_s
    assert [stage.ranks for stage in report.pipeline] == [(0,), (1,), (2,), (3,)]
    for stage in report.pipeline:
        beyond_s = fmean(took_s[stage.stage]["step"]) - ideal_s
        bubble_s = stage.bubble_us / 1e6
        slept_s = sum(took_s[stage.stage]["nap"][-2 * worker.MICRO_BATCHES * chunks :])
        assert abs(bubble_s - formula_s) < 0.03 * formula_s + abs(beyond_s)
        assert bubble_s < 1.03 * (took_s[stage.stage]["step"][-1] - slept_s)
