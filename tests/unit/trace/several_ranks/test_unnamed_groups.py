"""Collectives whose group the trace doesn't name, and the calls that name it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.collectives.local_collectives import (
    CALLS_KEY,
    CallRecord,
    call_records,
    records_of_ranges,
)
from gpurun.launcher.trace.kineto.classify import HostKind
from gpurun.launcher.trace.kineto.columns import HostRange
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import Event, rank_info, span, write

Op = tuple[list[int], int, Sequence[float]]


def unnamed(directory: Path, groups: list[list[int]], ops: Sequence[Op]) -> TraceReport:
    """Ranges of gloo: ranks, elements, and when each rank comes; all leave 100 µs after the turn's begin."""
    ranks = sorted({rank for each in groups for rank in each})
    events: dict[int, list[Event]] = {rank: [span("cpu_op", "aten::mm", 0, 10)] for rank in ranks}
    for turn, (members, size, late) in enumerate(ops):
        begin = 1_000.0 * (1 + turn)
        for rank, us in zip(members, late, strict=True):
            sizes = {"Input Dims": [[size]], "Input type": ["float"]}
            events[rank].append(span("user_annotation", "gloo:all_reduce", begin + us, 100 - us, 2, **sizes))
    for rank in ranks:
        config = [{"pg_name": str(i), "ranks": each} for i, each in enumerate(groups) if rank in each]
        info = rank_info(rank, len(ranks))["distributedInfo"] | {"pg_config": config}
        write(directory / f"rank{rank}.json", events[rank], distributedInfo=info)
    return analyse_paths([directory])


def test_unnamed_collectives_have_the_only_group_that_is_possible(tmp_path: Path) -> None:
    """Rank 1 is in both groups: 8 elements are on ranks 0 and 1 only, 9 on ranks 1 and 2 only."""
    ops: list[Op] = [([0, 1], 8, [0, 30]), ([1, 2], 9, [20, 0]), ([1, 2], 9, [0, 5]), ([0, 1], 8, [40, 0])]
    report = unnamed(tmp_path, [[0, 1], [1, 2]], ops)
    assert {*report.groups.values()} == {(0, 1), (1, 2)}
    assert [rank.total.wait_us for rank in report.ranks] == [30, 40 + 5, 20]
    assert not trace_notes(report)


AMBIGUOUS: dict[str, tuple[list[list[int]], Sequence[Op]]] = {
    "rows and columns of a mesh": (
        [[0, 1], [2, 3], [0, 2], [1, 3]],
        [([0, 1], 8, [0, 9]), ([2, 3], 8, [0, 9]), ([0, 2], 9, [0, 9]), ([1, 3], 9, [0, 9])],
    ),
    "all ranks, or both pairs": ([[0, 1, 2, 3], [0, 1], [2, 3]], [([0, 1, 2, 3], 8, [0, 1, 2, 3])]),
    "one size in two groups of a rank": ([[0, 1], [1, 2]], [([0, 1], 8, [0, 9]), ([1, 2], 8, [0, 9])]),
    "numbers that don't add up": ([[0, 1], [1, 2]], [([0, 1], 8, [0, 9]), ([0], 8, [0])]),
}


@pytest.mark.parametrize(("groups", "ops"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_of_unnamed_collectives_in_several_possible_groups_waits_are_unknown(
    tmp_path: Path, groups: list[list[int]], ops: Sequence[Op]
) -> None:
    report = unnamed(tmp_path, groups, ops)
    assert {part.wait_us for each in report.collectives for part in each.ranks} == {None}
    assert any("isn't recorded" in text for text in trace_notes(report))


def recorded(
    names_and_starts: list[tuple[str, int]], calls: list[tuple[int, str, str, int]]
) -> list[int | None]:
    """The number of the call of each range, by name and start."""
    ranges = [HostRange(HostKind.COMM, name, start, start + 10, 1, ()) for name, start in names_and_starts]
    records = records_of_ranges(ranges, [CallRecord(*call, None) for call in calls], 0)
    return [record.sequence if record else None for record in records]


def test_ranges_are_the_calls_in_their_order() -> None:
    ms = 1_000_000
    calls = [
        (ms, "gloo:all_reduce", "0", 1),
        (2 * ms, "gloo:all_reduce", "1", 2),
        (3 * ms, "gloo:barrier", "0", 3),
    ]
    names = ["gloo:all_reduce", "gloo:all_reduce", "gloo:barrier"]
    # Both were called before the first began: its thread was busy.
    assert recorded(list(zip(names, (4 * ms, 5 * ms, 6 * ms), strict=True)), calls) == [1, 2, 3]
    # The range of the first began before the trace.
    assert recorded([("gloo:all_reduce", 5 * ms)], calls) == [2]
    # The recorder has lost the first.
    assert recorded(list(zip(names[:2], (ms, 2 * ms), strict=True)), calls[1:]) == [None, 2]


@pytest.mark.parametrize("damaged", ["x", [[1, 2]], {"a": 1}, [[0, "gloo:all_reduce", "0", "first", None]]])
def test_damaged_records_of_calls_are_none(damaged: object) -> None:
    assert call_records({CALLS_KEY: damaged}) == []
