"""An index of traces made by hand, asked for what the same traces say when they are read slowly."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurun.launcher.tensorboard_plugin.answers.operators import operators_answer
from gpurun.launcher.tensorboard_plugin.timeline.answers import (
    Window,
    breakdown_answer,
    entry_of,
    event_answer,
    meta_answer,
    search_answer,
    selection_answer,
    window_answer,
    window_blocks,
)
from gpurun.launcher.tensorboard_plugin.timeline.format import (
    MERGED,
    BlockKind,
    Blocks,
    DamagedIndex,
    Index,
    join,
    merge,
    open_index,
    single,
)
from gpurun.launcher.tensorboard_plugin.timeline.index import build as build_module
from gpurun.launcher.tensorboard_plugin.timeline.index.build import (
    BrokenTraces,
    build,
    coarser,
    recorded_apart,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import order_and_rows
from gpurun.launcher.trace.analysis.collectives.local_collectives import LocalCollective, RankPart
from gpurun.launcher.trace.analysis.collectives.match import Collective
from tests.unit.trace.several_ranks.test_trace_parallelism import DESCRIBED, mesh, skews
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write
from tests.wording import Wording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
COMPUTE, TRANSFER, WAIT = 0, 1, 2


def no_news(file: int, position: int, unpacked: int) -> None:
    """Ignores the progress; at the top level, so that workers can have it."""


def index_of(directory: Path, ranks: list[list[Event]]) -> Index:
    """The index of one trace per rank."""
    files = [
        write(directory / f"rank{rank}.pt.trace.json", events, **rank_info(rank, len(ranks)))
        for rank, events in enumerate(ranks)
    ]
    return index_from(files)


def index_from(files: list[Path]) -> Index:
    """The index of these traces, next to the first."""
    target = files[0].parent / "index"
    target.mkdir()
    build(files, target.parent, target, no_news)
    return open_index(target)


def two_ranks() -> list[list[Event]]:
    """A step on two ranks; rank 0 comes 30 µs later to the collective, in which data move for 20 µs."""
    ranks = []
    for delay_us in (30, 0):
        ranks.append(
            [
                step(1, 0, 120),
                span("cpu_op", "aten::mm", 5, 20),
                span("cpu_op", "aten::empty", 6, 3),
                launch(10, 2, 1),
                launch(40, 2, 2),
                kernel("gemm", 20, 30 + delay_us, 1),
                kernel(ALL_REDUCE, 50 + delay_us, 50 - delay_us, 2, stream=20),
            ]
        )
    return ranks


def test_no_two_threads_are_called_the_same(tmp_path: Path) -> None:
    events = [step(1, 0, 50), span("cpu_op", "aten::mm", 1, 5)]
    events += [span("cpu_op", "gloo:all_reduce", 10, 5, tid=tid) for tid in (7, 8)]
    lanes = index_of(tmp_path, [events]).header.lanes
    labels = [lane.label for lane in lanes if lane.kind == "thread"]
    assert labels == ["CPU main", "CPU collectives 1", "CPU collectives 2"]


def test_traces_of_different_times_begin_together(tmp_path: Path) -> None:
    day_us = 86_400e6
    ranks = [[span("cpu_op", "aten::mm", start_us, 20)] for start_us in (5, day_us)]
    meta = meta_answer(index_of(tmp_path, ranks))
    assert meta["end_ns"] == 20_000
    assert meta["apart"]
    assert "no moment in common" in meta["warnings"][-1]


def test_traces_that_share_a_collective_stay_on_one_clock() -> None:
    local = LocalCollective.__new__(LocalCollective)  # when it was is of no interest here
    parts = tuple(RankPart(rank, local, 0) for rank in (0, 1))
    meets = [Collective("0", None, 1, "all_reduce", 4, 2, parts, True, None, {}, 0)]
    assert recorded_apart([(0, 5), (6, 9)], [])
    assert not recorded_apart([(0, 5), (6, 9)], meets)
    assert not recorded_apart([(0, 5), (4, 9)], [])
    assert not recorded_apart([(0, 5)], [])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return index_of(tmp_path_factory.mktemp("two"), two_ranks())


def lane(index: Index, rank: int, label: str) -> int:
    found = [n for n, each in enumerate(index.header.lanes) if each.rank == rank and each.label == label]
    assert len(found) == 1, [each.label for each in index.header.lanes]
    return found[0]


def shown(index: Index, number: int, width_px: int = 1200) -> list[tuple[Any, ...]]:
    """What a lane shows over the whole time: class, start, end, name in µs."""
    answer = window_answer(index, Window(0, index.header.end_ns, width_px, (number,)))
    (found,) = answer["lanes"]
    columns = [found[key] for key in ("class", "start_ns", "end_ns", "name")]
    return [
        (kind, start // 1000, end // 1000, answer["names"][name] if name >= 0 else None)
        for kind, start, end, name in zip(*columns, strict=True)
    ]


def test_a_collective_is_a_wait_and_then_a_transfer(index: Index) -> None:
    assert shown(index, lane(index, 1, "stream 20 comm")) == [
        (WAIT, 50, 80, ALL_REDUCE),
        (TRANSFER, 80, 100, ALL_REDUCE),
    ]
    assert shown(index, lane(index, 0, "stream 20 comm")) == [(TRANSFER, 80, 100, ALL_REDUCE)]


def test_the_overview_shows_each_moment_once(index: Index) -> None:
    assert shown(index, lane(index, 1, "rank 1")) == [
        (COMPUTE, 20, 50, None),
        (WAIT, 50, 80, None),
        (TRANSFER, 80, 100, None),
    ]


def test_an_operator_lies_below_the_one_around_it(index: Index) -> None:
    number = lane(index, 0, "CPU main")
    answer = window_answer(index, Window(0, 30_000, 1200, (number,)))
    rows = {
        answer["names"][name]: row
        for name, row in zip(answer["lanes"][0]["name"], answer["lanes"][0]["row"], strict=True)
    }
    assert rows == {"aten::mm": 0, "aten::empty": 1, "cudaLaunchKernel": 1}


def test_meta_names_ranks_lanes_and_steps(index: Index) -> None:
    answer = meta_answer(index)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert [each["kind"] for each in answer["ranks"][0]["lanes"]] == [
        "overview",
        "operation",
        "thread",
        "stream",
        "stream",
    ]
    assert [(each.rank, each.step, each.start_ns, each.end_ns) for each in answer["steps"]] == [
        (0, 1, 0, 120_000),
        (1, 1, 0, 120_000),
    ]


def test_links_join_the_ranks_of_a_collective(index: Index) -> None:
    (link,) = window_answer(index, Window(0, 120_000, 1200, (0,)))["links"]
    assert [(part[0], *part[4:]) for part in link["parts"]] == [
        (0, 80_000, 80_000, 100_000),
        (1, 50_000, 80_000, 100_000),
    ]
    assert [index.lane(part[1]).label for part in link["parts"]] == ["stream 20 comm"] * 2
    assert link["group"] == index.header.collectives[0].group


@pytest.mark.parametrize("part", [0, 1])
def test_an_event_knows_its_launch_and_its_collective(index: Index, part: int) -> None:
    entry = entry_of(index, 0, 1)
    assert entry is not None
    answer = event_answer(index, entry + part)
    assert answer["id"] == entry
    assert (answer["name"], answer["class"], answer["rank"], answer["step"]) == (ALL_REDUCE, "transfer", 1, 1)
    assert (answer["start_ns"], answer["end_ns"], answer["exposed_ns"]) == (50_000, 100_000, 50_000)
    assert answer["launched_by"]["name"] == "cudaLaunchKernel"
    assert answer["launch_to_start_ns"] == 10_000
    ranks = [(each["rank"], each["wait_ns"], each["transfer_ns"]) for each in answer["collective"]["ranks"]]
    assert ranks == [(0, 0, 20_000), (1, 30_000, 20_000)]
    assert answer["collective"]["last_rank"] == 0


def test_an_operator_knows_its_own_time_and_what_it_launched(index: Index) -> None:
    (found,) = search_answer(index, "aten::MM", -1)["events"][:1]
    answer = event_answer(index, found["id"])
    assert (answer["duration_ns"], answer["self_ns"]) == (20_000, 15_000)
    called = [each for each in search_answer(index, "cudaLaunch", -1)["events"] if each["rank"] == 0]
    launched = event_answer(index, called[0]["id"])
    assert launched["parent"] == {"id": found["id"], "name": "aten::mm"}
    assert launched["launches"]["count"] == 1
    assert index.name_of(launched["launches"]["first_id"]) == "gemm"


def test_search_counts_a_collective_once(index: Index) -> None:
    answer = search_answer(index, "allreduce", -1)
    assert answer["total"] == 2
    assert answer["names"] == [{"name": ALL_REDUCE, "count": 2, "total_ns": 70_000}]
    assert [(each["rank"], each["start_ns"]) for each in answer["events"]] == [(1, 50_000), (0, 80_000)]
    assert search_answer(index, "allreduce", 60_000)["events"][0]["rank"] == 0
    assert search_answer(index, "stream 20", -1)["total"] == 2


def test_sums_of_a_stretch_add_up_to_it(index: Index) -> None:
    answer = selection_answer(index, 30_000, 90_000, range(len(index.header.lanes)))
    assert answer["ranks"][1] == {
        "rank": 1,
        "compute_ns": 20_000,
        "transfer_ns": 10_000,
        "wait_ns": 30_000,
        "copy_ns": 0,
        "input_ns": 0,
        "idle_ns": 0,
    }
    assert {(each["name"], each["class"]): each["total_ns"] for each in answer["names"]} == {
        ("gemm", "compute"): 70_000,
        (ALL_REDUCE, "wait"): 30_000,
        (ALL_REDUCE, "transfer"): 20_000,
        ("cudaLaunchKernel", "cpu"): 4_000,
    }


def test_of_anybodys_traces_all_steps_count_and_the_straggler_is_named(
    tmp_path: Path, wording: Wording
) -> None:
    """Rank 0 comes last to all collectives and so is the straggler, though its own steps are shorter."""
    ranks = []
    for compute_us, rest_us in ((60, 0), (20, 60)):
        events: list[Event] = []
        for number, begin in enumerate((0, 1000, 2000)):
            longer_us = 100 * number
            events += [
                step(number, begin, 120 + rest_us + longer_us),
                launch(begin + 1, 1, 4 * number + 3),
                launch(begin + 3, 1, 4 * number + 1),
                launch(begin + 5, 1, 4 * number + 2),
                kernel("gemm", begin + 10, compute_us, 4 * number + 3),
                kernel(ALL_REDUCE, begin + 10 + compute_us, 90 - compute_us, 4 * number + 1, stream=20),
                kernel("gemm", begin + 110, rest_us + longer_us + 10, 4 * number + 2),
            ]
        ranks.append(events)
    header = index_of(tmp_path, ranks).header
    theirs = breakdown_answer(header, ours=False)
    assert [rank["typical"]["span_ms"] for rank in theirs["ranks"]] == pytest.approx([0.22, 0.28])
    assert theirs["mean"]["span_ms"] == pytest.approx(0.25)
    assert theirs["mean"]["compute_ms"] == pytest.approx(0.72 * 0.25, rel=0.01)
    wording(theirs["sentence"])
    assert operators_answer(header, None, "kernels", slowest=0)["slowest_rank"] == 0
    assert operators_answer(header, None, "kernels")["slowest_rank"] == 1
    ours = breakdown_answer(header)
    assert [rank["typical"]["span_ms"] for rank in ours["ranks"]] == pytest.approx([0.17, 0.23])


def test_breakdown_and_operators_add_up_to_the_step(index: Index) -> None:
    for rank in breakdown_answer(index.header)["ranks"]:
        (found,) = rank["steps"]
        parts = ("compute", "exposed_transfer", "exposed_wait", "exposed_memcpy", "idle")
        assert sum(found[f"{part}_ms"] for part in parts) == pytest.approx(found["span_ms"])
    answer = operators_answer(index.header, index.header, "kernels")
    assert answer["slowest_rank"] == 0
    for place, step_ms in enumerate(answer["step_by_rank_ms"]):
        total = sum(row["by_rank_ms"][place] for row in answer["rows"]) + answer["rest_by_rank_ms"][place]
        total -= answer["overlap_by_rank_ms"][place]
        assert total == pytest.approx(step_ms)
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows[ALL_REDUCE]["wait_by_rank_ms"] == pytest.approx([0.0, 0.03])
    assert rows[ALL_REDUCE]["class"] == "transfer"
    assert all(row["difference_ms"] == 0 for row in answer["rows"])


events = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 400), st.integers(1, 3), st.sampled_from(["a", "b", "c"])),
    min_size=1,
    max_size=60,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events, st.integers(0, 3000), st.integers(1, 3000), st.integers(16, 400))
def test_a_window_shows_what_the_trace_holds(
    tmp_path_factory: pytest.TempPathFactory,
    found: list[tuple[int, int, int, str]],
    from_us: int,
    length_us: int,
    width_px: int,
) -> None:
    """Every event of half a pixel or more by itself, the others within blocks that count them."""
    trace = [span("cpu_op", name, start, length, tid) for start, length, tid, name in found]
    index = index_of(tmp_path_factory.mktemp("window"), [trace])
    first_us = min(start for start, _, _, _ in found)
    lanes = tuple(n for n, each in enumerate(index.header.lanes) if each.kind == "thread")
    start_ns, end_ns = (from_us - first_us) * 1000, (from_us - first_us + length_us) * 1000
    window = Window(start_ns, end_ns, width_px, lanes)
    blocks = window_blocks(index, window)
    inside = sorted(
        ((start - first_us) * 1000, length * 1000)
        for start, length, _, _ in found
        if (start - first_us) * 1000 <= end_ns and (start - first_us + length) * 1000 >= start_ns
    )
    assert int(blocks.count.sum()) == len(inside)
    assert int(blocks.busy.sum()) == sum(length for _, length in inside)
    alone = blocks.entry != MERGED
    visible = sorted(
        (s, e - s) for s, e in zip(blocks.start[alone].tolist(), blocks.end[alone].tolist(), strict=True)
    )
    for each in inside:
        if each[1] >= window.shortest_ns:
            assert each in visible


def test_levels_show_the_same_as_the_entries_themselves(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    at, trace = 0, []
    for gap, length in generator.integers(1, 40, (6000, 2)).tolist():
        trace.append(span("cpu_op", f"op{length}", at + gap, length))
        at += gap + length
    index = index_of(tmp_path, [trace])
    (number,) = [n for n, each in enumerate(index.header.lanes) if each.kind == "thread"]
    assert index.lane(number).rows[0].levels
    for width_px in (16, 100, 1000, 8192):
        window = Window(at * 300, at * 700, width_px, (number,))
        blocks = window_blocks(index, window)
        inside = [
            event
            for event in trace
            if (event["ts"] - trace[0]["ts"]) * 1000 <= window.to_ns
            and (event["ts"] - trace[0]["ts"] + event["dur"]) * 1000 >= window.from_ns
        ]
        # At its two ends a window shows all of a block that it only touches.
        assert len(inside) <= int(blocks.count.sum())
        assert len(blocks) <= 4 * width_px + 8
        wanted = sum(event["dur"] * 1000 >= window.shortest_ns for event in inside)
        assert int(((blocks.entry != MERGED) & (blocks.busy >= window.shortest_ns)).sum()) == wanted


def test_a_damaged_trace_leaves_the_others(tmp_path: Path) -> None:
    good = write(tmp_path / "rank0.pt.trace.json", two_ranks()[0], **rank_info(0, 2))
    bad = tmp_path / "rank1.pt.trace.json"
    bad.write_bytes(good.read_bytes().replace(b'"ts":', b'"ts"', 1))
    header = index_from([good, bad]).header
    assert [rank.rank for rank in header.ranks] == [0]
    (problem,) = header.problems
    assert problem.file == "rank1.pt.trace.json"
    assert problem.byte is not None
    assert str(tmp_path) not in problem.message


def test_without_any_good_trace_there_is_no_index(tmp_path: Path) -> None:
    bad = tmp_path / "rank0.pt.trace.json"
    bad.write_bytes(b'{"traceEvents": [{"ph"')
    with pytest.raises(BrokenTraces) as caught:
        index_from([bad])
    assert [problem.file for problem in caught.value.problems] == ["rank0.pt.trace.json"]


def test_an_index_that_could_not_be_opened_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """It would be removed as damaged and made again with every request."""
    monkeypatch.setattr(build_module, "MAX_HEADER_BYTES", 10_000)
    events = [span("cpu_op", "aten::mm", i, 1, tid=i) for i in range(200)]
    with pytest.raises(BrokenTraces) as caught:
        index_of(tmp_path, [events])
    wording(re.sub(r"[\d,]+ bytes", "N bytes", caught.value.problems[0].message))
    assert not (tmp_path / "index" / "index.json").exists()


@pytest.mark.parametrize("harm", ["short", "format", "json"])
def test_a_damaged_index_is_noticed(tmp_path: Path, harm: str) -> None:
    index_of(tmp_path, two_ranks())
    target = tmp_path / "index"
    if harm == "short":
        (target / "start").write_bytes((target / "start").read_bytes()[:-8])
    elif harm == "format":
        header = (target / "index.json").read_bytes()
        (target / "index.json").write_bytes(header.replace(b'"format":', b'"format":9', 1))
    else:
        (target / "index.json").write_bytes(b"{")
    with pytest.raises(DamagedIndex):
        open_index(target)


def test_names_stay_text_and_no_event_is_lost_on_another_thread(tmp_path: Path) -> None:
    hostile = '<img src=x onerror="alert(1)">'
    trace = [span("cpu_op", hostile, 0, 10), span("cpu_op", hostile, 5, 10, tid=2)]
    index = index_of(tmp_path, [trace])
    answer = search_answer(index, "onerror", -1)
    assert [each["name"] for each in answer["events"]] == [hostile] * 2


# The bands of a compact timeline: one row for what a rank does, its colours, and the order of the ranks


BANDS = ("", " by operation", " by parallelism")


def test_a_row_a_rank_has_the_moments_of_the_overview_by_operation_and_parallelism(tmp_path: Path) -> None:
    chance = random.Random(2)
    job = mesh(chance, skews(chance), DESCRIBED, False, steps=2).job
    index = index_of(tmp_path, [job.events[rank] for rank in range(8)])
    compact = meta_answer(index)["compact"]
    legends = [[each["class"] for each in colour["legend"]] for colour in compact["colours"]]
    assert legends == [
        ["compute", "all_reduce", "send_recv", "wait", "idle"],
        ["compute", "data", "tensor", "pipeline", "wait", "idle"],
    ]
    for rank in range(8):
        plain, *split = (shown(index, lane(index, rank, f"rank {rank}{by}")) for by in BANDS)
        for band in split:
            assert [(min(kind, WAIT), *rest) if kind < 8 else (TRANSFER, *rest) for kind, *rest in band] == [
                (kind, *rest) for kind, *rest in plain
            ]
    orders = {order["key"]: order for order in compact["orders"]}
    assert list(orders) == ["rank", "wait", "stage", "group-data", "group-tensor"]
    assert orders["group-data"]["ranks"] == [0, 2, 1, 3, 4, 6, 5, 7]
    assert orders["group-data"]["begins_group"] == [True, False] * 4
    assert orders["stage"]["notes"] == ["stage 0"] * 4 + ["stage 1"] * 4
    waits = [float(note.removesuffix(" ms")) for note in orders["wait"]["notes"]]
    assert waits == sorted(waits, reverse=True)
    assert sorted(orders["wait"]["ranks"]) == list(range(8))


def test_one_kind_of_parallelism_is_no_choice(tmp_path: Path) -> None:
    compact = meta_answer(index_of(tmp_path, two_ranks()))["compact"]
    assert [colour["key"] for colour in compact["colours"]] == ["operation"]
    assert [order["key"] for order in compact["orders"]] == ["rank", "wait"]


# Rows, merging and levels of the timeline, against the same done slowly


Range = tuple[int, int]
ranges = st.lists(st.tuples(st.integers(-50, 200), st.integers(0, 60)), max_size=60)
pieces = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40), st.integers(0, 7)), max_size=120)


def row_of(found: Sequence[tuple[int, int, int]], row: int = 0) -> Blocks:
    """Blocks that follow each other: gap, length, kind of each."""
    starts, ends, at = [], [], 0
    for gap, length, _ in found:
        starts.append(at + gap)
        at += gap + length
        ends.append(at)
    return single(
        np.array(starts, dtype=np.int64),
        np.array(ends, dtype=np.int64),
        np.array([kind for _, _, kind in found], dtype=np.int8),
        np.arange(len(found), dtype=np.int32),
        np.full(len(found), row, dtype=np.int32),
    )


@given(ranges)
def test_inside_a_row_nothing_overlaps(found: list[Range]) -> None:
    start = np.array([begin for begin, _ in found], dtype=np.int64)
    end = np.array([begin + length for begin, length in found], dtype=np.int64)
    order, rows = order_and_rows(start, end)
    assert sorted(order.tolist()) == list(range(len(found)))
    for row in set(rows.tolist()):
        mine = order[rows == row]
        assert (start[mine][1:] >= end[mine][:-1]).all()
        assert (start[mine][1:] >= start[mine][:-1]).all()


@given(st.integers(1, 6), st.integers(0, 5))
def test_ranges_that_nest_lie_at_their_depth(depth: int, repeats: int) -> None:
    spans = [(100 * k + n, 100 * k + 90 - n) for k in range(repeats) for n in range(depth)]
    start = np.array([begin for begin, _ in spans], dtype=np.int64)
    end = np.array([stop for _, stop in spans], dtype=np.int64)
    _, rows = order_and_rows(start, end)
    assert rows.tolist() == list(range(depth)) * repeats


@given(pieces, st.integers(1, 50))
def test_merging_keeps_what_can_be_seen(found: list[tuple[int, int, int]], shortest_ns: int) -> None:
    """What is short lies in one block, and there are no more of them than half pixels."""
    before = row_of(found)
    after = merge(before, shortest_ns)
    assert after.count.sum() == len(before)
    assert after.busy.sum() == before.busy.sum()
    assert (after.start[1:] >= after.end[:-1]).all()
    long_enough = np.flatnonzero(before.end - before.start >= shortest_ns)
    assert set(before.entry[long_enough].tolist()) <= set(after.entry.tolist())
    alone = after.entry != MERGED
    assert (after.start[alone] == before.start[np.searchsorted(before.entry, after.entry[alone])]).all()
    assert ((after.count > 1) == ~alone).all()
    home = np.searchsorted(after.start, before.start, "right") - 1
    for i in range(len(before)):
        inside = (after.start <= before.start[i]) & (before.end[i] <= after.end)
        assert inside.any(), "a block has vanished"
    assert len(before) == 0 or home.min() >= 0
    if len(after):
        span = int(after.end[-1] - after.start[0])
        assert len(after) <= 2 * (span // shortest_ns + 2)


def test_a_merged_block_is_of_the_kind_with_most_time() -> None:
    after = merge(row_of([(0, 2, BlockKind.COPY), (0, 5, BlockKind.COMPUTE), (0, 2, BlockKind.COPY)]), 100)
    assert after.kind.tolist() == [BlockKind.COMPUTE]
    assert after.count.tolist() == [3]
    assert (after.start.tolist(), after.end.tolist(), after.busy.tolist()) == ([0], [9], [9])


def test_rows_are_never_merged_with_each_other() -> None:
    many = row_of([(0, 1, 0)] * 5, row=0)
    other = row_of([(0, 1, 0)] * 5, row=1)
    after = merge(join([many, other]), 100)
    assert after.row.tolist() == [0, 1]
    assert after.count.tolist() == [5, 5]


def test_panning_moves_no_border() -> None:
    generator = np.random.default_rng(3)
    found = [(int(gap), int(length), 0) for gap, length in generator.integers(0, 30, (400, 2))]
    blocks = row_of(found)
    whole = merge(blocks, 64)
    later = blocks.pick(slice(100, None))
    first_ns = int(later.start[0]) + 200
    shifted = merge(later, 64)
    wanted = [(s, e) for s, e in zip(whole.start.tolist(), whole.end.tolist(), strict=True) if s > first_ns]
    assert wanted == [
        (s, e) for s, e in zip(shifted.start.tolist(), shifted.end.tolist(), strict=True) if s > first_ns
    ]


def test_a_collective_without_waiting_shows_no_wait() -> None:
    found = row_of([(0, 0, BlockKind.WAIT), (0, 9, BlockKind.TRANSFER)])
    assert found.kind.tolist() == [BlockKind.TRANSFER]


def test_levels_get_coarser_and_lose_nothing() -> None:
    generator = np.random.default_rng(5)
    found = [
        (int(gap), int(length), int(length) % 2) for gap, length in generator.integers(1, 900, (9000, 2))
    ]
    blocks = row_of(found)
    levels = list(coarser(blocks))
    assert len(levels) >= 2
    lengths = [len(blocks), *(len(level) for _, level in levels)]
    assert lengths == sorted(lengths, reverse=True)
    for shortest_ns, level in levels:
        assert level.count.sum() == len(blocks)
        assert level.busy.sum() == blocks.busy.sum()
        long_enough = blocks.entry[blocks.end - blocks.start >= shortest_ns]
        assert set(long_enough.tolist()) <= set(level.entry.tolist())
