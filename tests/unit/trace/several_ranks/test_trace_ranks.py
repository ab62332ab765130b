"""Several ranks: who is who, which collectives belong together, and clocks that differ."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, load, rank_info, span, step, write
from tests.wording import Wording

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SENDS = "ncclDevKernel_SendRecv"


def collective(name: str, start_us: float, length_us: float, correlation: int, **args: Any) -> list[Event]:
    return [
        launch(start_us - 1, 0.5, correlation),
        kernel(name, start_us, length_us, correlation, stream=20, **args),
    ]


def sized(count: int) -> dict[str, object]:
    return {"Collective name": "allreduce", "In msg nelems": count, "Out msg nelems": count, "dtype": "Float"}


def write_rank(directory: Path, rank: int, events: list[Event], world_size: int = 2) -> None:
    write(directory / f"trace{rank}.json.gz", events, **rank_info(rank, world_size))


def test_transfer_is_the_shortest_stay_and_the_rest_is_waiting(tmp_path: Path) -> None:
    # Rank 1 comes 6 µs late; both leave after 4 µs of transfer. Rank 0 computes during 3 µs of its wait.
    write_rank(tmp_path, 0, [kernel("gemm", 0, 13), *collective(RING, 10, 10, 1, **sized(1000))])
    write_rank(tmp_path, 1, [kernel("gemm", 0, 16), *collective(RING, 16, 4, 1, **sized(1000))])
    report = analyse_paths([tmp_path])
    first, second = (rank.total for rank in report.ranks)
    assert (first.wait_us, first.transfer_us, second.wait_us, second.transfer_us) == (6, 4, 0, 4)
    assert (first.exposed_wait_us, first.exposed_transfer_us) == (3, 4)
    (found,) = report.collectives
    assert (found.kind, found.bytes, found.last_rank) == ("all_reduce", 4000, 1)
    assert found.algorithm_gb_per_s == pytest.approx(1.0)
    assert found.bus_gb_per_s == pytest.approx(1.0)  # 2·(2 − 1)/2 of it
    assert [(row.rank, row.last_arrivals, row.wait_caused_us) for row in report.stragglers] == [
        (1, 1, 6),
        (0, 0, 0),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_random_captures_with_known_waits(tmp_path: Path, seed: int) -> None:
    """Clocks differ by up to seconds, one rank is late by a known time, some ranks begin a step later."""
    chance = random.Random(seed)
    ranks, late = chance.choice((2, 3, 8)), chance.randrange(2)
    expected = dict.fromkeys(range(ranks), 0)
    events: dict[int, list[Event]] = {rank: [] for rank in range(ranks)}
    skews = [chance.randrange(5_000_000) for _ in range(ranks)]
    skipped = chance.randrange(1, ranks)
    for number in range(4):
        begin = 10_000 * number
        for rank in range(ranks):
            if not (rank == skipped and number == 0):
                events[rank].append(step(number, begin + skews[rank], 9_000))
        for index in range(3):
            end, transfer = begin + 2_000 * (index + 1), 100
            for rank in range(ranks):
                wait = 0 if rank == late else chance.randrange(50, 900)
                if rank == skipped and number == 0:
                    continue
                expected[rank] += wait
                start = end - transfer - wait + skews[rank]
                size = sized(10 + index % 2)
                events[rank] += collective(RING, start, transfer + wait, 10 * number + index + 1, **size)
    for rank in range(ranks):
        write_rank(tmp_path, rank, events[rank], ranks)
    report = analyse_paths([tmp_path])
    if (
        late == skipped
    ):  # In the first step the late rank isn't seen, so waiting is computed from the shortest seen.
        report = analyse_paths([tmp_path], slice(1, None))
        assert [row.rank for row in report.stragglers if row.wait_caused_us] == [late]
        return
    assert {rank.rank: rank.total.wait_us for rank in report.ranks} == expected
    assert report.stragglers[0].rank == late
    assert report.stragglers[0].wait_caused_us == sum(expected.values())
    offsets = {rank: report.clock_offsets_us[str(rank)] for rank in range(ranks)}
    assert offsets == {rank: skews[rank] - skews[0] for rank in range(ranks)}
    assert any("different steps" in warning for warning in trace_notes(report))


def test_sequence_numbers_decide_where_the_trace_has_them(tmp_path: Path) -> None:
    def numbered(first: int) -> list[Event]:
        pairs = [collective(RING, 100 * n, 10, n, Seq=n, **sized(8)) for n in range(first, 5)]
        return [event for pair in pairs for event in pair]

    write_rank(tmp_path, 0, numbered(1))
    write_rank(tmp_path, 1, numbered(2))
    report = analyse_paths([tmp_path])
    assert [(each.seq, len(each.ranks)) for each in report.collectives] == [(1, 1), (2, 2), (3, 2), (4, 2)]


def test_collectives_that_do_not_end_together_are_not_matched(tmp_path: Path, wording: Wording) -> None:
    for rank, first_us in ((0, 0), (1, 50_000)):
        events = collective(RING, first_us + 10, 20_000 + rank, 1, **sized(4))
        events += collective(RING, 200_000, 10, 2, **sized(5)) + collective(RING, 300_000, 10, 3, **sized(6))
        write_rank(tmp_path, rank, events)
    report = analyse_paths([tmp_path])
    assert [len(each.ranks) for each in report.collectives] == [1, 1, 2, 2]
    wording(trace_notes(report))


def test_where_no_clocks_could_have_the_ends_it_is_not_one_group(tmp_path: Path) -> None:
    """Two stages: the second one's come 4 ms later in forward passes, and 4 ms sooner in backward ones."""
    for rank, moved_us in ((0, 0), (1, 4_000)):
        events: list[Event] = []
        for number in range(12):
            back = -1 if number % 6 >= 3 else 1
            events += collective(RING, 50_000 + 10_000 * number + back * moved_us, 100, number + 1)
        write_rank(tmp_path, rank, events, world_size=4)
    report = analyse_paths([tmp_path])
    assert [len(each.ranks) for each in report.collectives] == [1] * 24
    assert report.clock_offset_bounds_us["1"] == (None, None)
    assert report.clock_drift_ppm["1"] is None
    assert report.clock_drift_bounds_ppm["1"] is None


def test_where_the_drift_is_unknown_an_offset_may_be_what_any_collective_shows(tmp_path: Path) -> None:
    """50 ppm; five collectives are too few to show it."""
    for rank in (0, 1):
        times_us = [10_000.0 * number * (1 + rank * 5e-5) + rank * 700 for number in range(1, 6)]
        write_rank(
            tmp_path,
            rank,
            [event for i, at in enumerate(times_us) for event in collective(RING, at, 10, i + 1, **sized(8))],
        )
    report = analyse_paths([tmp_path])
    assert report.clock_drift_ppm["1"] is None
    assert report.clock_offset_bounds_us["1"] == pytest.approx((700.5, 702.5))
    assert report.clock_offset_bounds_us["0"] == (0, 0)


def gloo(report: TraceReport) -> list[tuple[float, ...]]:
    return [
        (each.span_us, each.compute_us, each.exposed_transfer_us, each.exposed_wait_us, each.idle_us)
        for each in (rank.steps[0] for rank in report.ranks)
    ]


def test_gloo_on_cpu(tmp_path: Path) -> None:
    shape = {"Input Dims": [[100]], "Input type": ["float"]}
    for rank, (start, length) in enumerate(((40, 40), (60, 20))):
        events = [
            step(3, 0, 100),
            span("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 10),
            span("cpu_op", "aten::stack", 2, 5),
            span("cpu_op", "aten::mm", 15, start + 5 - 15),
            span("cpu_op", "c10d::allreduce_", start + 10, 5),
            span("user_annotation", "gloo:all_reduce", start, length, "gloo", **shape),
            span("cpu_op", "aten::copy_", start, length, "gloo"),
        ]
        write_rank(tmp_path, rank, events)
    report = analyse_paths([tmp_path])
    # span, compute, transfer, wait, idle: compute covers the first 5 µs of each all-reduce.
    assert gloo(report) == [(100, 30, 20, 15, 35), (100, 50, 15, 0, 35)]
    assert report.ranks[0].steps[0].idle_by_cause_us.data == 10
    assert report.ranks[0].device == "CPU"
    assert (report.collectives[0].bytes, report.collectives[0].last_rank) == (400, 1)


LATE: dict[str, tuple[str, list[tuple[float, float]], list[float], float]] = {
    "a waiting rank sees the end late": ("all_reduce", [(10, 60), (40, 53), (0, 53)], [30, 0, 40], 13),
    "the last rank sees it late": ("all_reduce", [(10, 50), (40, 90), (0, 50)], [30, 0, 40], 10),
    "all do": ("barrier", [(10, 52), (40, 90), (0, 75)], [30, 0, 40], 12),
    "the root of a broadcast needn't wait": ("broadcast", [(0, 5), (40, 52), (20, 80)], [0, 0, 20], 5),
}


@pytest.mark.parametrize(("kind", "spans", "waits", "transfer"), LATE.values(), ids=LATE)
def test_on_one_clock_no_rank_waits_after_the_last_has_come(
    tmp_path: Path, kind: str, spans: list[tuple[float, float]], waits: list[float], transfer: float
) -> None:
    """Threads that wait for a core see the end late; that moves neither clocks nor waits."""
    for rank, (start, end) in enumerate(spans):
        events = [
            step(1, 0, 100),
            span("cpu_op", "aten::mm", 0, 1),
            span("user_annotation", f"gloo:{kind}", start, end - start, "gloo"),
        ]
        write(tmp_path / f"{rank}.json", events, **rank_info(rank, 3), gpurunClock="the same boot")
    report = analyse_paths([tmp_path], show=frozenset({"collectives"}))
    assert set(report.clock_offsets_us.values()) == {0}
    (found,) = report.collectives
    took = [end - start for start, end in spans]
    assert [part.wait_us for part in found.ranks] == waits
    assert [part.transfer_us for part in found.ranks] == [
        us - wait for us, wait in zip(took, waits, strict=True)
    ]
    (row,) = report.collective_totals or ()
    assert (row.transfer_us, row.wait_us) == (transfer, sum(waits))
    for mine, (start, end), wait in zip((rank.steps[0] for rank in report.ranks), spans, waits, strict=True):
        hidden = max(1 - start, 0)
        assert (mine.wait_us, mine.transfer_us) == (wait, end - start - wait)
        assert mine.exposed_wait_us == max(wait - hidden, 0)
        assert mine.exposed_wait_us + mine.exposed_transfer_us == end - start - hidden
    assert sum(row.wait_caused_us for row in report.stragglers) == sum(waits)


def test_a_step_owns_what_it_launched_wherever_that_ran(tmp_path: Path) -> None:
    events = [
        step(1, 0, 100),
        step(2, 100, 100),
        step(3, 200, 100),
        kernel("before", 5, 10, 900),
        launch(20, 1, 1),
        kernel("first", 90, 60, 1),
        launch(110, 1, 2),
        kernel("second", 160, 90, 2),
    ]
    (rank,) = analyse_paths([write(tmp_path / "t.json", events)]).ranks
    assert [
        (each.step, each.start_us, each.span_us, each.compute_us, each.idle_us) for each in rank.steps
    ] == [
        (1, 10, 135, 60, 75),  # from the end of what was launched before the capture
        (2, 145, 100, 90, 10),
        (3, 245, 50, 0, 50),
    ]
    # Step 2's work was launched before the gap: not the host's fault. Step 3 launched nothing.
    assert rank.steps[1].idle_by_cause_us.other == 10
    assert rank.steps[2].idle_by_cause_us.host == 50
    assert rank.total.span_us == 245
    (chosen,) = analyse_paths([tmp_path / "t.json"], slice(2, 3)).ranks
    assert (chosen.total.span_us, [each.step for each in chosen.steps]) == (90, [2])


def test_a_trace_without_steps_has_none(tmp_path: Path) -> None:
    (rank,) = analyse_paths([write(tmp_path / "t.json", [kernel("k", 5, 10)])]).ranks
    assert (rank.steps, rank.total.span_us, rank.total.compute_us) == ((), 10, 10)


def test_overlapping_and_repeated_steps_are_reported(tmp_path: Path) -> None:
    events = [step(1, 0, 100), step(1, 50, 100), launch(10, 1, 1), kernel("k", 20, 10, 1)]
    (rank,) = (report := analyse_paths([write(tmp_path / "t.json", events)])).ranks
    assert [each.span_us for each in rank.steps] == [100, 50]
    assert any("steps overlap" in warning for warning in trace_notes(report))
    assert any("same number" in warning for warning in trace_notes(report))


def test_work_launched_where_steps_overlap_belongs_to_the_earlier_one(
    tmp_path: Path, wording: Wording
) -> None:
    events = [step(1, 0, 100), step(2, 60, 90), step(3, 70, 20), step(4, 150, 50)]
    for number, start_us in enumerate((10, 65, 80, 110, 160), start=1):
        events += [launch(start_us, 1, number), kernel("k", start_us + 2, 10, number)]
    (rank,) = (report := analyse_paths([write(tmp_path / "t.json", events)])).ranks
    rows = {each.step: (each.span_us, each.compute_us) for each in rank.steps}
    assert rows == {1: (100, 30), 2: (50, 10), 3: (0, 0), 4: (50, 10)}
    assert sum(compute_us for _, compute_us in rows.values()) == rank.total.compute_us
    wording(trace_notes(report))


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the directory of real traces next to the repository")
def test_a_real_step_moved_into_the_one_before(tmp_path: Path) -> None:
    content = load(REAL / "nccl_args_A100" / "rank0of2.json.gz")
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    (before,) = analyse_paths([path]).ranks
    (fifth,) = (each for each in content["traceEvents"] if each.get("name") == "ProfilerStep#5")
    moved_us = round(0.4 * fifth["dur"])
    fifth["ts"] -= moved_us
    fifth["dur"] += moved_us
    path.write_text(json.dumps(content))
    (after,) = analyse_paths([path]).ranks
    computes = [[each.compute_us for each in rank.steps] for rank in (before, after)]
    assert computes[1][0] >= computes[0][0] > 0
    assert sum(computes[1]) == pytest.approx(sum(computes[0]))


def test_the_explanation_names_rank_and_size(tmp_path: Path, wording: Wording) -> None:
    for rank, start in ((0, 1_000), (1, 5_000)):
        events = [kernel("gemm", 0, start), *collective(RING, start, 6_000 - start, 1, **sized(9))]
        write_rank(tmp_path, rank, events)
    wording(analyse_paths([tmp_path]).conclusion)


def called(kernel_name: str, start_us: float, calls: Mapping[str, Mapping[str, object]]) -> list[Event]:
    """A kernel without arguments of 4 µs, launched within these calls, the outer ones first."""
    outside = [
        span("cpu_op", name, start_us - 9 + i, 8 - i, **args) for i, (name, args) in enumerate(calls.items())
    ]
    return [*outside, *collective(kernel_name, start_us, 4, 1)]


def two_ranks(directory: Path, events: list[Event], world_size: int, **info: Any) -> TraceReport:
    for rank in range(2):
        known = rank_info(rank, world_size)["distributedInfo"] | info
        write(directory / f"trace{rank}.json", events, distributedInfo=known)
    return analyse_paths([directory])


GROUP = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("world_size", "arguments", "info", "bus_share"),
    [
        (128, {}, {}, None),  # Two of 128, and the group is unknown.
        (2, {}, {}, 1.0),  # All of the world are here.
        (128, {"Group size": 8}, {"pg_config": [GROUP]}, 2 * 7 / 8),
        (128, {}, {"pg_config": [GROUP]}, 2 * 3 / 4),
        (128, {"Process Group Name": "0"}, {"pg_config": [GROUP, GROUP | {"pg_name": "1"}]}, 2 * 3 / 4),
        (128, {"Process Group Name": "7"}, {"pg_config": [GROUP]}, None),
        (128, {}, {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg"}]}, 2 * 127 / 128),
        (128, {}, {"pg_config": [{"pg_name": "0", "pg_desc": "mesh"}]}, None),
        (128, {}, {"pg_config": ["damaged", {"pg_size": "x", "ranks": 3}]}, None),
        (128, {"Group size": 1}, {}, None),  # Fewer than are seen: damaged.
    ],
)
def test_bus_bandwidth_never_takes_the_files_for_the_group(
    tmp_path: Path, world_size: int, arguments: dict[str, Any], info: dict[str, Any], bus_share: float | None
) -> None:
    report = two_ranks(tmp_path, collective(RING, 10, 4, 1, **sized(1000), **arguments), world_size, **info)
    (found,) = report.collectives
    assert found.algorithm_gb_per_s == pytest.approx(1.0)
    assert found.bus_gb_per_s == (None if bus_share is None else pytest.approx(bus_share))


@pytest.mark.parametrize(
    ("name", "outer", "inner", "info", "expected"),
    [
        ("all_gather", [[6400], [100], []], [[100]], {}, (6400, 63 / 64)),
        ("reduce_scatter", [[100], [6400], []], [[6400]], {}, (6400, 63 / 64)),
        ("all_gather", [[6401], [100], []], [[100]], {}, (6401, None)),
        ("all_gather", [[], [], []], [[100]], {"pg_config": [GROUP]}, (400, 3 / 4)),
        ("all_gather", [[], [], []], [[100]], {}, (None, None)),
        ("reduce_scatter", [[], [], []], [[400]], {}, (400, None)),
        ("all_reduce", [[], [], []], [[400]], {}, (400, None)),
    ],
)
def test_sizes_from_the_calls_that_issued_a_kernel(
    tmp_path: Path,
    name: str,
    outer: list[list[int]],
    inner: list[list[int]],
    info: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    types = {"Input type": ["signed char", "signed char", ""]}
    calls = {
        f"c10d::_{name}_base_": {"Input Dims": outer} | types,
        f"nccl:_{name}_base": {"Input Dims": inner} | types,
    }
    (found,) = two_ranks(tmp_path, called(SENDS, 20, calls), 128, **info).collectives
    num_bytes, share = expected
    assert (found.kind, found.bytes) == (name, num_bytes)
    assert found.bus_gb_per_s == (None if share is None else pytest.approx(num_bytes / 4000 * share))


def test_ranks_that_come_at_once_are_none_of_them_last(tmp_path: Path) -> None:
    report = two_ranks(tmp_path, collective(RING, 10, 4, 1, **sized(1000)), 2)
    assert [each.last_rank for each in report.collectives] == [None]
    assert [(row.last_arrivals, row.wait_caused_us) for row in report.stragglers] == [(0, 0), (0, 0)]


def test_many_files_are_read_by_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(5):
        write_rank(tmp_path, rank, collective(RING, 100 + rank, 50 - rank, 1, **sized(3)), 5)
    (tmp_path / "broken.json").write_text("[")
    here = analyse_paths([tmp_path])
    monkeypatch.setattr("gpurun.launcher.trace.parallel.PARALLEL_FROM_BYTES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert analyse_paths([tmp_path]) == here
    assert here.stragglers[0].rank == 4
