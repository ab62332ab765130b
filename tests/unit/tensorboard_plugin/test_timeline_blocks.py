"""Rows, merging and levels of the timeline, against the same done slowly."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.tensorboard_plugin.timeline.format import MERGED, BlockKind, Blocks, join, merge, single
from gpurun.launcher.tensorboard_plugin.timeline.index.build import coarser
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import order_and_rows

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


@given(pieces, st.integers(1, 50))
def test_what_is_short_lies_in_exactly_one_block(found: list[tuple[int, int, int]], shortest_ns: int) -> None:
    before = row_of(found)
    after = merge(before, shortest_ns)
    home = np.searchsorted(after.start, before.start, "right") - 1
    for i in range(len(before)):
        inside = (after.start <= before.start[i]) & (before.end[i] <= after.end)
        assert inside.any(), "a block has vanished"
    assert len(before) == 0 or home.min() >= 0


@given(pieces, st.integers(1, 50))
def test_there_are_no_more_blocks_than_half_pixels(
    found: list[tuple[int, int, int]], shortest_ns: int
) -> None:
    after = merge(row_of(found), shortest_ns)
    if len(after):
        span = int(after.end[-1] - after.start[0])
        assert len(after) <= 2 * (span // shortest_ns + 2)


def test_a_merged_block_is_of_the_kind_with_most_time() -> None:
    after = merge(row_of([(0, 2, BlockKind.COPY), (0, 5, BlockKind.COMPUTE), (0, 2, BlockKind.COPY)]), 100)
    assert after.kind.tolist() == [BlockKind.COMPUTE]
    assert after.count.tolist() == [3]
    assert (after.start.tolist(), after.end.tolist(), after.busy.tolist()) == ([0], [9], [9])


def test_rows_are_never_merged_with_each_other() -> None:
    one = row_of([(0, 1, 0)] * 5, row=0)
    other = row_of([(0, 1, 0)] * 5, row=1)
    after = merge(join([one, other]), 100)
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
