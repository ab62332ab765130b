"""Groups of ranks, messages between two, and the clocks that they link: all known by construction."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpurun.launcher.report.terminal.trace import render_tables, render_trace
from gpurun.launcher.trace.added_by_ranks import CALLS_KEY, CallRecord
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.collectives.local_collectives import call_records, records_of_ranges
from gpurun.launcher.trace.explain import last_rank
from gpurun.launcher.trace.kineto.classify import HostKind
from gpurun.launcher.trace.kineto.columns import HostRange
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.several_ranks.generated_job import SENDS, Job
from tests.unit.trace.trace_files import REAL, Event, kernel, launch, load, rank_info, span, step, write
from tests.wording import Wording


def disjoint(chance: random.Random, skews_us: list[float], calls: bool) -> tuple[Job, dict[int, float]]:
    """Groups [0, 1] and [2, 3] of one name, each at its own pace, and one of all ranks now and then."""
    job, waits = Job(4, skews_us), dict.fromkeys(range(4), 0.0)
    for turn in range(12):
        for group in ([0, 1], [2, 3]):
            end = 20_000.0 * turn + chance.randrange(5_000, 9_000)
            late = [0, chance.randrange(1, 4_000)]
            chance.shuffle(late)
            job.all_reduce("1", group, [end - 100 - each for each in late], end, calls)
            for rank, each in zip(group, late, strict=True):
                waits[rank] += each
        if turn % 4 == 3:
            job.all_reduce("0", [0, 1, 2, 3], [20_000.0 * turn + 15_000] * 4, 20_000.0 * turn + 15_100, calls)
    return job, waits


@pytest.mark.parametrize("calls", [False, True], ids=["NCCL", "RCCL"])
@pytest.mark.parametrize("seed", range(4))
def test_disjoint_groups_of_one_name_are_two(tmp_path: Path, seed: int, calls: bool) -> None:
    chance = random.Random(seed)
    skews_us = [0.0, *(float(chance.randrange(-30_000_000, 30_000_000)) for _ in range(3))]
    job, waits = disjoint(chance, skews_us, calls)
    report = job.report(tmp_path)
    assert {rank.rank: rank.total.wait_us for rank in report.ranks} == waits
    assert {int(rank): us for rank, us in report.clock_offsets_us.items()} == dict(enumerate(skews_us))
    assert report.groups == {"1 of ranks 0, 1": (0, 1), "1 of ranks 2, 3": (2, 3), "0": (0, 1, 2, 3)}
    assert not trace_notes(report)


def test_groups_from_the_header_and_from_first_rank_and_stride(tmp_path: Path) -> None:
    job = Job(4)
    # Of long lists torch leaves out the middle.
    listed = {"Process Group Ranks": "[0, ..., 2]", "Global rank start": 0, "Global rank stride": 2}
    job.all_reduce("a", [0, 2], [10, 15], 20, args=listed)
    job.all_reduce("b", [1, 3], [10, 15], 20, args={"Process Group Ranks": None})
    config = [{"pg_name": "b", "pg_desc": "x", "pg_size": 2, "ranks": [1, 3]}]
    report = job.report(tmp_path, pg_config=config)
    assert report.groups == {"a": (0, 2), "b": (1, 3)}
    assert [rank.total.wait_us for rank in report.ranks] == [5, 5, 0, 0]


def test_of_several_groups_an_unnamed_collective_is_of_none(tmp_path: Path, wording: Wording) -> None:
    """Real gloo: ranges carry no group, and each rank is in two."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1, 2, 3]}]
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        info = rank_info(rank, 4)["distributedInfo"] | {
            "pg_config": [*groups, {"pg_name": "1", "pg_desc": "undefined", "ranks": pair}]
        }
        events = [span("cpu_op", "aten::mm", 0, 10), span("user_annotation", "gloo:all_reduce", 20, 9, 2)]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo=info)
    report = analyse_paths([tmp_path])
    assert [rank.total.wait_us for rank in report.ranks] == [None] * 4
    assert report.stragglers == ()
    wording(trace_notes(report))
    assert {each.group for each in report.collectives} == {"unknown"}


def test_a_group_of_one_waits_for_no_other(tmp_path: Path) -> None:
    job = Job(2)
    for rank in (0, 1):
        job.all_reduce("own", [rank], [10.0 * rank], 10.0 * rank + 5)
        job.all_reduce("0", [0, 1], [50, 52], 60) if rank else None
    report = job.report(tmp_path)
    assert [rank.total.wait_us for rank in report.ranks] == [2, 0]
    assert not trace_notes(report)


def pipeline(skews_us: list[float], turns: int = 4) -> tuple[Job, float]:
    """Stage 1 waits for stage 0's output and stage 0 for stage 1's gradient, as in a pipeline of two."""
    job, waited_us = Job(2, skews_us), 0.0
    for turn in range(turns):
        begin = 70_000.0 * turn
        # Stage 1 asks at once; stage 0 sends when it is done computing.
        job.message(0, 1, (begin + 25_000, begin), (begin + 25_100, begin + 25_100))
        job.message(1, 0, (begin + 60_000, begin + 40_000), (begin + 60_100, begin + 60_100))
        waited_us += 25_000
    return job, waited_us


@pytest.mark.parametrize("skew_us", [0.0, 30_000_000.0, -12_345_678.25])
def test_messages_in_both_directions_align_clocks_and_show_waits(tmp_path: Path, skew_us: float) -> None:
    job, waited_us = pipeline([0.0, skew_us])
    report = job.report(tmp_path)
    assert report.clock_offsets_us["1"] == pytest.approx(skew_us, abs=1)
    first, second = (rank.total for rank in report.ranks)
    assert second.wait_us == second.exposed_wait_us == waited_us
    assert first.wait_us == 4 * 20_000
    assert {each.kind for each in report.collectives} == {"send"}
    assert [(row.rank, row.last_arrivals) for row in report.stragglers] == [(0, 4), (1, 4)]
    assert not trace_notes(report)


def test_a_rank_is_last_of_the_collectives_that_it_takes_part_in(tmp_path: Path) -> None:
    """Rank 3 takes part in 6 of 16, and the others wait for it in 4 of them."""
    job = Job(4)
    for number in range(10):
        job.all_reduce("a", [0, 1], [1e4 * number, 1e4 * number + 30], 1e4 * number + 100)
    for number in range(6):
        late_us = 500 if number < 4 else -5
        job.all_reduce("b", [2, 3], [1e4 * number, 1e4 * number + late_us], 1e4 * number + 1000)
    found = last_rank(job.report(tmp_path))
    assert found is not None
    assert (found.rank, found.last_arrivals, found.collectives) == (3, 4, 6)


def test_messages_in_one_direction_bound_the_clock(tmp_path: Path, wording: Wording) -> None:
    job = Job(2, [0.0, 5_000.0])
    for turn in range(3):
        job.message(0, 1, (100.0 * turn, 100.0 * turn), (100.0 * turn + 10, 100.0 * turn + 12))
    report = job.report(tmp_path)
    assert report.clock_offsets_us["1"] == pytest.approx(5_002)
    assert report.clock_offset_bounds_us == {"0": (0, 0), "1": (None, pytest.approx(5_002))}
    wording(trace_notes(report))


def test_how_well_a_clock_is_known(tmp_path: Path) -> None:
    """Messages that take 300 µs there and 100 µs back leave ±200 µs, and over two such links ±400 µs."""
    job = Job(4, [0.0, 5_000.0, 9_000.0, 1_000.0])
    for rank in (0, 1):
        job.message(rank, rank + 1, (0, 0), (10, 310))
        job.message(rank + 1, rank, (1_000, 1_000), (1_010, 1_110))
    job.kernel(3, "gemm", 0, 10, False)
    report = job.report(tmp_path)
    assert report.clock_offsets_us == pytest.approx({"0": 0, "1": 5_100, "2": 9_200, "3": 0})
    known = {rank: report.clock_offset_bounds_us[rank] for rank in ("0", "1", "2")}
    assert known == {"0": (0, 0), "1": pytest.approx((4_900, 5_300)), "2": pytest.approx((8_800, 9_600))}
    assert report.clock_offset_bounds_us["3"] == (None, None)
    assert any("known to ±400 µs" in text for text in trace_notes(report))


def test_a_message_without_the_other_rank_is_no_transfer_to_overlap(tmp_path: Path, wording: Wording) -> None:
    job = Job(2)
    facts = {"In msg nelems": 5, "Out msg nelems": 5, "dtype": "Float", "Collective name": "recv"}
    for rank in (0, 1):
        job.kernel(rank, SENDS, 10, 50, False, **facts)
    report = job.report(tmp_path)
    assert [rank.total.wait_us for rank in report.ranks] == [None, None]
    wording(trace_notes(report))
    assert not any("seen on one rank only" in text for text in trace_notes(report))
    assert "in communication or waiting for it; who waited isn't known." in report.conclusion


def test_gloo_messages_take_their_peer_from_the_call(tmp_path: Path) -> None:
    def call(name: str, start_us: float, length_us: float, peer: int) -> Event:
        return span("cpu_op", name, start_us, length_us, **{"Concrete Inputs": ["", "", str(peer), "0"]})

    group = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}
    sides = (
        [call("c10d::send", 100, 5, 1), span("user_annotation", "gloo:send", 104, 20)],
        [call("c10d::recv_", 10, 3, 0), span("user_annotation", "gloo:recv", 12, 110)],
    )
    for rank, events in enumerate(sides):
        info = rank_info(rank, 2)["distributedInfo"] | {"pg_config": [group]}
        write(
            tmp_path / f"rank{rank}.json", [*events, span("cpu_op", "aten::mm", 0, 9)], distributedInfo=info
        )
    report = analyse_paths([tmp_path])
    assert [rank.total.wait_us for rank in report.ranks] == [0, 90]


def test_recorded_calls_separate_overlapping_groups(tmp_path: Path) -> None:
    """Ranges of gloo in two groups per rank, as captures of gpurun have them."""
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        config = [
            {"pg_name": "0", "ranks": [0, 1, 2, 3]},
            {"pg_name": "1", "pg_desc": "mesh_tp", "ranks": pair},
        ]
        info = rank_info(rank, 4)["distributedInfo"] | {"pg_config": config}
        late = 10_000.0 * (rank % 2)
        events = [
            span("user_annotation", "gloo:all_reduce", 20_000 + late, 30_000 - late, 2),
            span("user_annotation", "gloo:all_reduce", 60_000 + rank, 5_000 - rank, 2),
            span("cpu_op", "aten::mm", 0, 10),
        ]
        calls = [
            [19_000_000 + int(late) * 1000, "gloo:all_reduce", "1", 7, None],
            [59_000_000, "gloo:all_reduce", "0", 9, None],
        ]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo=info, gpurunCalls=calls)
    report = analyse_paths([tmp_path])
    assert not trace_notes(report)
    assert [rank.total.wait_us for rank in report.ranks] == [10_003, 2, 10_001, 0]
    assert {each.parallelism for each in report.collectives if each.group.startswith("1")} == {"tensor"}


def test_a_peer_is_known_if_it_is_the_same_in_all_groups_of_its_rank(tmp_path: Path) -> None:
    """Rank 3's number 2 is rank 2 in the group of all; its number 1 may be rank 1 or, in [2, 3], rank 3."""
    every = [0, 1, 2, 3]
    names = {rank: [every, [0, 1] if rank < 2 else [2, 3]] for rank in every}
    for rank, groups in names.items():
        config = [{"pg_name": str(i), "ranks": ranks} for i, ranks in enumerate(groups)]
        events = [span("cpu_op", "aten::mm", 0, 1)]
        if rank == 3:
            for start_us, peer in ((10, 2), (50, 1)):
                events.append(
                    span("cpu_op", "c10d::send", start_us, 5, **{"Concrete Inputs": ["", "", peer, 0]})
                )
                events.append(span("user_annotation", "gloo:send", start_us + 4, 20))
        if rank == 2:
            events.append(span("cpu_op", "c10d::recv_", 0, 5, **{"Concrete Inputs": ["", "", "3", "0"]}))
            events.append(span("user_annotation", "gloo:recv", 4, 30))
        info = rank_info(rank, 4)["distributedInfo"] | {"pg_config": config}
        write(tmp_path / f"rank{rank}.json", events, distributedInfo=info)
    report = analyse_paths([tmp_path])
    assert [[part.rank for part in each.ranks] for each in report.collectives] == [[2, 3], [3]]


@pytest.mark.parametrize("calls", [False, True], ids=["NCCL", "RCCL"])
def test_data_times_tensor_times_pipeline(tmp_path: Path, calls: bool) -> None:
    """2 × 2 × 2 ranks: groups of a dimension share a name, clocks differ by seconds, stages wait."""
    chance = random.Random(7)
    skews_us = [0.0, *(float(chance.randrange(-30_000_000, 30_000_000)) for _ in range(7))]
    job, waits = Job(8, skews_us), dict.fromkeys(range(8), 0.0)
    for turn in range(6):
        begin = 100_000.0 * turn
        for rank in range(4):  # stage 0 to stage 1, and back
            sent = begin + 20_000 + 10 * rank
            job.message(rank, rank + 4, (sent, begin + 15_000), (sent + 50, sent + 50))
            waits[rank + 4] += sent - begin - 15_000
            back = begin + 60_000 + 10 * rank
            job.message(rank + 4, rank, (back, begin + 58_000), (back + 50, back + 50))
            waits[rank] += back - begin - 58_000
        for name, groups in (
            ("tp", [[0, 1], [2, 3], [4, 5], [6, 7]]),
            ("dp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ):
            offset = 70_000 if name == "tp" else 80_000
            for group in groups:
                late = [0.0, float(chance.randrange(1, 3_000))]
                chance.shuffle(late)
                end = begin + offset + chance.randrange(4_000, 8_000)
                job.all_reduce(name, group, [end - 200 - each for each in late], end, calls)
                for rank, each in zip(group, late, strict=True):
                    waits[rank] += each
    report = job.report(tmp_path)
    assert {rank.rank: rank.total.wait_us for rank in report.ranks} == waits
    assert {int(rank): us for rank, us in report.clock_offsets_us.items()} == pytest.approx(
        dict(enumerate(skews_us)), abs=1
    )
    assert not trace_notes(report)


def grouped(
    job: Job, rank: int, messages: list[tuple[str, int]], start_us: float, end_us: float, launches: int = 1
) -> None:
    """Sends and receives of `batch_isend_irecv`: calls that launch nothing, then a kernel of all of them."""
    issued, number = start_us - 60, len(job.events[rank]) + 1
    group = {"Process Group Name": "pp", "Process Group Ranks": str(list(range(job.num_ranks)))}
    for kind, peer in messages:
        facts = {"Collective name": kind, "Dst Rank" if kind == "send" else "Src Rank": peer}
        sizes = {"In msg nelems": 500, "Out msg nelems": 500, "dtype": "Float"}
        job.events[rank].append(
            span("cpu_op", "record_param_comms", job.at(rank, issued), 3, **facts | sizes | group)
        )
        issued += 5
    for i in range(launches):
        begin = job.at(rank, issued)
        job.events[rank] += [
            span("user_annotation", "nccl:coalesced", begin, 4),
            launch(begin + 1, 1, number + i),
            kernel(SENDS, job.at(rank, start_us + i), end_us - start_us, number + i, stream=20),
        ]
        issued += 5


@pytest.mark.parametrize("skew_us", [0.0, 5_000_000.0])
def test_grouped_messages_of_two_ranks_are_one_exchange(tmp_path: Path, skew_us: float) -> None:
    job = Job(2, [0.0, skew_us])
    for turn in range(4):
        begin = 10_000.0 * turn + 1_000
        grouped(job, 0, [("send", 1), ("recv", 1)], begin, begin + 130)
        grouped(job, 1, [("send", 0), ("recv", 0)], begin + 100, begin + 130)
    report = job.report(tmp_path)
    assert [rank.total.wait_us for rank in report.ranks] == [400, 0]
    assert [rank.total.transfer_us for rank in report.ranks] == [120, 120]
    assert {(each.kind, each.bytes, each.parallelism) for each in report.collectives} == {
        ("send_recv", 4000, "pipeline")
    }
    assert float(report.clock_offsets_us["1"]) == pytest.approx(skew_us, abs=65)
    assert not any("rank only" in text or "don't name" in text for text in trace_notes(report))


@pytest.mark.parametrize("aligned", [True, False])
def test_grouped_messages_of_neighbours_wait_for_their_own(
    tmp_path: Path, aligned: bool, wording: Wording
) -> None:
    """Stage 1 of 3 exchanges with both others in one kernel; rank 0 doesn't wait for rank 2."""
    job = Job(3, [0.0, 4_000.0, -70_000.0])
    if aligned:
        job.all_reduce("0", [0, 1, 2], [90_000] * 3, 90_010)
    for turn in range(3):
        begin = 10_000.0 * turn + 1_000
        grouped(job, 0, [("send", 1), ("recv", 1)], begin, begin + 120)
        grouped(job, 1, [("recv", 0), ("send", 0), ("send", 2), ("recv", 2)], begin + 100, begin + 220)
        grouped(job, 2, [("recv", 1), ("send", 1)], begin + 200, begin + 220)
    report = job.report(tmp_path)
    if not aligned:  # the messages alone leave the clocks open by as much as they wait
        assert [rank.total.wait_us for rank in report.ranks] == [None] * 3
        wording(trace_notes(report))
        assert not any("one rank only" in each for each in trace_notes(report))
        return
    assert [rank.total.wait_us for rank in report.ranks] == [300, 300, 0]
    assert [rank.total.transfer_us for rank in report.ranks] == [70, 70, 70]
    assert [each.last_rank for each in report.collectives] == [None] * 4
    assert [stage.bubble_us for stage in report.pipeline] == [300, 300, 0]


def test_a_send_that_is_done_before_its_peer_comes_has_not_waited(tmp_path: Path) -> None:
    job = Job(3, [0.0, 4_000.0, -70_000.0])
    job.all_reduce("0", [0, 1, 2], [90_000] * 3, 90_010)
    for turn in range(3):
        begin = 10_000.0 * turn + 1_000
        grouped(job, 0, [("send", 1), ("send", 1)], begin, begin + 20)
        grouped(job, 1, [("recv", 0), ("recv", 0), ("send", 2), ("recv", 2)], begin + 100, begin + 220)
        grouped(job, 2, [("recv", 1), ("send", 1)], begin + 200, begin + 220)
    assert [rank.total.wait_us for rank in job.report(tmp_path).ranks] == [0, 300, 0]


UNKNOWN_MESSAGES: dict[str, tuple[list[tuple[str, int]], int]] = {
    "no calls": ([], 1),
    "more kernels than calls separate": ([("send", 1), ("recv", 1)], 2),
}


@pytest.mark.parametrize(("messages", "launches"), UNKNOWN_MESSAGES.values(), ids=UNKNOWN_MESSAGES)
def test_which_messages_are_in_a_kernel_is_never_guessed(
    tmp_path: Path, messages: list[tuple[str, int]], launches: int, wording: Wording
) -> None:
    job = Job(2)
    for rank, late in ((0, 0), (1, 40)):
        own = [(kind, 1 - rank) for kind, _ in messages]
        grouped(job, rank, own, 1_000 + late, 1_100, launches)
    report = job.report(tmp_path)
    assert [rank.total.wait_us for rank in report.ranks] == [None, None]
    wording(trace_notes(report))


def test_grouped_collectives_have_the_group_of_their_calls(tmp_path: Path) -> None:
    job = Job(2)
    group = {"Process Group Name": "fsdp", "Process Group Ranks": "[0, 1]", "Group size": 2}
    for rank, late in ((0, 0.0), (1, 30.0)):
        for i in range(2):
            facts = {"Collective name": "_allgather_base", "In msg nelems": 50, "Out msg nelems": 100}
            args = facts | {"dtype": "Float"} | group
            job.events[rank].append(span("cpu_op", "record_param_comms", 10.0 * i, 3, **args))
        name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        job.events[rank] += [launch(50, 1, 9), kernel(name, 100 + late, 80 - late, 9, stream=20)]
    report = job.report(tmp_path)
    (each,) = report.collectives
    assert (each.group, each.kind, each.bytes) == ("fsdp", "all_gather", 800)
    assert [rank.total.wait_us for rank in report.ranks] == [30, 0]


@pytest.mark.parametrize("seed", range(3))
def test_a_capture_that_begins_late_lacks_the_first_of_each_sort(tmp_path: Path, seed: int) -> None:
    """Without steps: groups [0, 1] and [2, 3], linked by messages of ranks 0 and 2; rank 0 begins late."""
    chance = random.Random(seed)
    skews_us = [0.0, *(float(chance.randrange(-30_000_000, 30_000_000)) for _ in range(3))]
    job, waits, first_us = Job(4, skews_us), dict.fromkeys(range(4), 0.0), 0.0
    for turn in range(14):
        begin = 20_000.0 * turn + chance.randrange(1, 2_000)
        first_us = begin - 10 if turn == 5 else first_us
        for pair, at in (((0, 1), 5_000), ((2, 3), 5_000), ((0, 2), 9_000), ((2, 0), 12_000)):
            end, starts = begin + at + 100, [begin + at - late for late in chance.sample(range(1, 3_000), 2)]
            if 1 in pair or 3 in pair:
                job.all_reduce("1", list(pair), starts, end)
            else:
                job.message(*pair, (starts[0], starts[1]), (end, end))
            if turn >= 5 or 3 in pair:
                for rank, start in zip(pair, starts, strict=True):
                    waits[rank] += max(starts) - start
    job.events[0] = [event for event in job.events[0] if event["ts"] >= first_us]
    report = job.report(tmp_path)
    assert {int(rank): us for rank, us in report.clock_offsets_us.items()} == dict(enumerate(skews_us))
    assert {rank.rank: rank.total.wait_us for rank in report.ranks} == pytest.approx(waits)


# Collectives whose group the trace doesn't name, and the calls that name it


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


# Several ranks: who is who, which collectives belong together, and clocks that differ


RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
SEND_RECV = "ncclDevKernel_SendRecv"


def collective(name: str, start_us: float, length_us: float, correlation: int, **args: Any) -> list[Event]:
    return [
        launch(start_us - 1, 0.5, correlation),
        kernel(name, start_us, length_us, correlation, stream=20, **args),
    ]


def sized(count: int) -> dict[str, object]:
    return {"Collective name": "allreduce", "In msg nelems": count, "Out msg nelems": count, "dtype": "Float"}


def write_rank(directory: Path, rank: int, events: list[Event], world_size: int = 2) -> None:
    write(directory / f"trace{rank}.json.gz", events, **rank_info(rank, world_size))


def test_the_last_rank_waits_for_none_though_its_end_is_recorded_later(tmp_path: Path) -> None:
    """The third time rank 1 comes last, and stays for 2 µs longer than rank 0."""
    for rank, ends in enumerate(((20, 120, 220), (20, 120, 223))):
        events: list[Event] = []
        for number, (begin, end) in enumerate(zip((10, 110, 210 + rank), ends, strict=True), 1):
            events += collective(RING, begin, end - begin, number, **sized(1000))
        write_rank(tmp_path, rank, events)
    report = analyse_paths([tmp_path])
    (found,) = (each for each in report.collectives if each.last_rank is not None)
    assert [(part.rank, part.wait_us, part.transfer_us) for part in found.ranks] == [(0, 0, 10), (1, 0, 12)]
    assert report.ranks[1].total.exposed_wait_us == 0


@pytest.mark.parametrize("ahead_us", [0, 10**6])
def test_clocks_that_nothing_links_do_not_show_who_came_last(tmp_path: Path, ahead_us: int) -> None:
    """A broadcast links no clocks; rank 1 is in each for 400 µs longer, whatever its clock shows."""
    for rank, (begin, length) in enumerate(((400, 100), (ahead_us, 500))):
        name = "ncclDevKernel_Broadcast_RING_LL"
        args = {"Collective name": "broadcast", "In msg nelems": 9, "Out msg nelems": 9, "dtype": "Float"}
        events = [kernel(name, begin + 1000 * number, length, **args) for number in range(3)]
        write_rank(tmp_path, rank, events)
    found = analyse_paths([tmp_path]).collectives
    assert [each.last_rank for each in found] == [None, None, None]
    assert {(part.rank, part.wait_us, part.transfer_us) for each in found for part in each.ranks} == {
        (0, 0, 100),
        (1, 400, 100),
    }


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


class Bucketed(NamedTuple):
    """A rank with two collectives in flight, in µs."""

    comes: int
    apart: int
    """From one call to the next."""
    woken: int
    """When it works on the first one's result."""
    ends: tuple[int, int]
    """As the collectives' threads note them."""
    resumes: int

    def events(self) -> Iterator[Event]:
        yield step(1, 0, 66_000)
        yield span("cpu_op", "aten::mm", self.comes - 1_000, 1_000)
        for number, end in enumerate(self.ends):
            issued = self.comes + self.apart * number
            yield span("cpu_op", "c10d::allreduce_", issued, 10)
            yield span("user_annotation", "gloo:all_reduce", issued + 50, end - issued - 50, f"gloo{number}")
        yield span("cpu_op", "aten::copy_", self.woken, 60)
        yield span("cpu_op", "aten::add_", self.resumes, 66_000 - self.resumes)


@pytest.mark.parametrize(
    "ranks",
    [
        (
            Bucketed(1_000, 100, 62_000, (63_800, 64_000), 64_100),
            Bucketed(61_000, 100, 62_000, (62_000, 64_000), 64_100),
        ),
        (
            Bucketed(1_000, 100, 61_450, (61_430, 61_840), 61_860),
            Bucketed(61_000, 600, 61_460, (61_440, 61_850), 61_870),
        ),
    ],
    ids=["the first end is noted in the second wait", "the second wait is short"],
)
def test_of_two_collectives_each_has_a_wait_of_its_own(
    tmp_path: Path, ranks: tuple[Bucketed, Bucketed]
) -> None:
    """Rank 1 comes 60 ms later, which is what it costs."""
    for number, rank in enumerate(ranks):
        write(tmp_path / f"{number}.json", [*rank.events()], **rank_info(number, 2), host_name="one")
    saved_us = {each.rank: each.saved_us for each in analyse_paths([tmp_path]).savings if each.part == "rank"}
    assert saved_us == {0: pytest.approx(0, abs=10), 1: pytest.approx(60_000, rel=0.01)}


LATE: dict[str, tuple[str, list[tuple[float, float]], list[float], float]] = {
    "a waiting rank sees the end late": ("all_reduce", [(10, 60), (40, 53), (0, 53)], [30, 0, 40], 13),
    "the last rank sees it late": ("all_reduce", [(10, 50), (40, 90), (0, 50)], [30, 0, 40], 10),
    "all do": ("barrier", [(10, 52), (40, 90), (0, 75)], [30, 0, 40], 12),
    "the root of a broadcast needn't wait": ("broadcast", [(0, 5), (40, 52), (20, 80)], [0, 0, 20], 5),
}


@pytest.mark.parametrize(
    "clock", [{"gpurunClock": "the same boot"}, {"host_name": "node1"}], ids=["boot", "host"]
)
@pytest.mark.parametrize(("kind", "spans", "waits", "transfer"), LATE.values(), ids=LATE)
def test_on_one_clock_no_rank_waits_after_the_last_has_come(
    tmp_path: Path,
    kind: str,
    spans: list[tuple[float, float]],
    waits: list[float],
    transfer: float,
    clock: dict[str, str],
) -> None:
    """Threads that wait for a core see the end late; that moves neither clocks nor waits."""
    for rank, (start, end) in enumerate(spans):
        events = [
            step(1, 0, 100),
            span("cpu_op", "aten::mm", 0, 1),
            span("user_annotation", f"gloo:{kind}", start, end - start, "gloo"),
        ]
        write(tmp_path / f"{rank}.json", events, **rank_info(rank, 3), **clock)
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


@pytest.mark.parametrize(
    ("hosts", "ahead_us", "offset_us", "bounds_us"),
    [
        (("node1", "node1"), 0, 0, (0, 0)),
        (("node1", "node2"), 0, -7, (-20, 43)),
        (("localhost", "localhost"), 0, -7, (-20, 43)),
        (("node1", "node1"), 5_000, 4_993, (4_980, 5_043)),
    ],
    ids=["one host", "two hosts", "a name of any host", "two hosts of one name"],
)
def test_on_cpus_ends_bound_how_far_clocks_are_apart(
    tmp_path: Path,
    hosts: tuple[str, str],
    ahead_us: float,
    offset_us: float,
    bounds_us: tuple[float, float],
) -> None:
    """Threads see the end when they get a core: the one of rank 1 does so sooner."""
    spans = ((10, 60), (40 + ahead_us, 53 + ahead_us))
    for rank, (start, end) in enumerate(spans):
        events = [
            step(1, rank * ahead_us, 100),
            span("user_annotation", "gloo:all_reduce", start, end - start, "gloo"),
        ]
        write(tmp_path / f"{rank}.json", events, **rank_info(rank, 2), host_name=hosts[rank])
    report = analyse_paths([tmp_path])
    assert report.clock_offsets_us["1"] == offset_us
    assert report.clock_offset_bounds_us["1"] == bounds_us


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
    (found,) = two_ranks(tmp_path, called(SEND_RECV, 20, calls), 128, **info).collectives
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


def test_the_collectives_of_a_step_that_one_rank_does_not_mark_are_those_of_the_other(tmp_path: Path) -> None:
    """Two of gloo in each of four steps, to which rank 1 comes 40 ms late, and marks the third step not."""
    for rank, late_us in ((0, 0), (1, 40_000)):
        events: list[Event] = []
        for number in range(4):
            begin = 100_000 * number
            events += [step(number, begin, 100_000)] if (rank, number) != (1, 2) else []
            events.append(span("cpu_op", "aten::mm", begin, 10))
            for end in (begin + 80_000, begin + 90_000 + 3_000 * rank):  # its thread gets a core late
                events.append(
                    span("user_annotation", "gloo:all_reduce", begin + late_us, end - begin - late_us, 2)
                )
        write(tmp_path / f"rank{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    assert {len(each.ranks) for each in report.collectives} == {2}
    assert len(report.collectives) == 8
    assert {row.rank: row.last_arrivals for row in report.stragglers} == {0: 0, 1: 8}
    (wait_us,) = {each.exposed_wait_us for each in report.ranks[0].steps}
    assert wait_us > 30_000


def test_what_a_trace_lacks_of_its_collectives_another_rank_shows(tmp_path: Path) -> None:
    """Without the CPU's events an all-to-all is a kernel of sends and receives, and nothing has a size."""
    names = {"all_to_allv": "ncclKernel_SendRecv_RING_SIMPLE", "all_reduce": "ncclKernel_AllReduce_RING_LL"}
    for rank in (0, 1):
        events: list[Event] = [step(1, 0, 5_000)]
        for number, name in enumerate(("all_to_allv", "all_reduce", "all_to_allv")):
            begin, end = 1_000 * number + 300 * rank, 1_000 * number + 500
            known = {"Collective name": name, "In msg nelems": 10 + number, "Out msg nelems": 10 + number}
            args = known | {"dtype": "Float"} if rank == 0 else {}
            events += [launch(begin - 5, 2, number), kernel("gemm", begin - 1, 1, number)]
            events.append(kernel(names[name], begin, end - begin, **args))
        write(tmp_path / f"{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    found = [(each.kind, len(each.ranks), each.bytes) for each in report.collectives]
    assert found == [("all_to_all", 2, 40), ("all_reduce", 2, 44), ("all_to_all", 2, 48)]
    assert {rank.rank: rank.total.exposed_wait_us for rank in report.ranks} == {0: 900, 1: 0}
    assert [(row.rank, row.last_arrivals) for row in report.stragglers] == [(1, 3), (0, 0)]


def test_of_a_group_that_lacks_a_rank_rates_are_bounds(tmp_path: Path) -> None:
    """Two of three ranks: what looks like transfer may be waiting for the third."""
    for rank in (0, 1):
        args = {"Collective name": "all_reduce", "In msg nelems": 10**6, "Out msg nelems": 10**6}
        ring = kernel("ncclKernel_AllReduce_RING_LL", 10 + rank, 90 - rank, **args, dtype="Float")
        write(tmp_path / f"{rank}.json", [kernel("gemm", 0, 10), ring], **rank_info(rank, 3))
    report = analyse_paths([tmp_path], show={"collectives"})
    text = render_trace(report, 100)
    assert "≥44.94" in text
    assert "transfer or unknown ▒" in text
    assert "came last of present" in text
    assert "µs are at most those shown, GB/s at least" in render_tables(report, ("collectives",), 200)


def test_what_may_be_one_collective_is_counted_as_at_most(tmp_path: Path) -> None:
    """Sends and receives that don't name the other rank: of two ranks, six may be three."""
    for rank in (0, 1):
        work = [kernel("ncclKernel_SendRecv_RING_SIMPLE", 100 * i, 50) for i in range(3)]
        write(tmp_path / f"{rank}.json", [kernel("gemm", 60, 10), *work], **rank_info(rank, 2))
    text = render_trace(analyse_paths([tmp_path]), 100)
    assert any(line.split()[:3] == ["default", "send_recv", "≤6"] for line in text.splitlines())
