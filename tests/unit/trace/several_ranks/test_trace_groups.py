"""Groups of ranks, messages between two, and the clocks that they link: all known by construction."""

import random
from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.explain import last_rank
from tests.said import trace_notes
from tests.unit.trace.several_ranks.generated_job import SENDS, Job
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, write
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
