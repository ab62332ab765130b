"""A rank's share of the tables that are shown on request.

Among them how it feeds its GPU: delays of launches, the length of the queue, short kernels; and its copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.on_request.call_tree import CallNode, call_trees
from gpurun.launcher.trace.analysis.on_request.shapes import (
    KernelShape,
    OpShape,
    kernel_shapes,
    launching_ops,
    op_shapes,
)
from gpurun.launcher.trace.analysis.steps import Launched
from gpurun.launcher.trace.analysis.tables import Mask, Selection
from gpurun.launcher.trace.intervals import Int64, union
from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.columns import Trace
from gpurun.launcher.trace.model import Table

SHORT_NS = 10_000
"""Kernels below that are hardly longer than launching them takes."""
MAX_POINTS = 200
_DIRECTION = "Memcpy "


@dataclass(frozen=True)
class Copies:
    """Copies or memsets of one direction."""

    direction: str
    count: int
    num_bytes: int | None
    """`None` if the trace lacks the size of some."""
    device_ns: int
    exposed_ns: int


@dataclass(frozen=True, eq=False)
class LaunchStatistics:
    """Launches of one rank, and the GPU's queue."""

    delay_percentiles: tuple[int, int, int, int]
    """50 %, 90 %, 99 %, largest; ns."""
    queue_times: Int64
    """When the queue's length changes, in ns since the trace's base."""
    queue_lengths: Int64
    """Lengths of the queue from each of these times on; as given to `thinned`."""
    queue_mean: float
    queue_max: int
    queue_empty: float
    """Share of the time."""
    short: int
    short_ns: int
    slow_launches: int


def copies(trace: Trace, chosen: Mask) -> list[Copies]:
    """The copies by direction, those with most time first."""
    assert trace.details is not None
    gpu, sizes = trace.gpu, trace.details.copy_bytes
    found: defaultdict[str, list[int]] = defaultdict(list)
    for i in np.flatnonzero(chosen & (gpu.kind >= GpuKind.MEMCPY)).tolist():
        is_set = gpu.kind[i] == GpuKind.MEMSET
        found["Memset" if is_set else trace.gpu_names[gpu.name[i]].removeprefix(_DIRECTION)].append(i)
    working = chosen & (gpu.kind <= GpuKind.COMM)
    devices = np.array([device for device, _ in trace.streams])[gpu.thread] if len(gpu) else gpu.thread
    rows = []
    for direction, places in found.items():
        exposed = 0
        for device in sorted(set(devices[places].tolist())):
            mine = np.array([i for i in places if devices[i] == device], dtype=np.int64)
            busy = working & (devices == device)
            others = union(gpu.start[busy], gpu.end[busy])
            exposed += union(gpu.start[mine], gpu.end[mine]).subtract(others).length_ns
        known = [sizes[i] for i in places if i in sizes]
        total = sum(known) if len(known) == len(places) else None
        rows.append(Copies(direction, len(places), total, int(gpu.duration[places].sum()), exposed))
    return sorted(rows, key=lambda row: -row.device_ns)


def launches(trace: Trace, work: Launched, chosen: Mask) -> LaunchStatistics | None:
    """The launches of the chosen work, and all of its kernels; `None` if no launch is known."""
    known = np.flatnonzero(chosen & (work.launch >= 0))
    if not len(known):
        return None
    gpu = trace.gpu
    delays = gpu.start[known] - work.done[known]
    is_kernel = gpu.kind <= GpuKind.COMM
    ns = gpu.duration[chosen & is_kernel]
    launched_alone = known[is_kernel[known] & ~work.replayed[known]]
    calls = trace.launches.duration[work.launch[launched_alone]]
    times, lengths = _queue(work.done[known], gpu.end[known])
    spans = np.diff(times)
    span = max(int(spans.sum()), 1)
    percentiles = np.percentile(delays, (50, 90, 99, 100), method="higher").astype(np.int64).tolist()
    return LaunchStatistics(
        delay_percentiles=(percentiles[0], percentiles[1], percentiles[2], percentiles[3]),
        queue_times=times,
        queue_lengths=lengths,
        queue_mean=float((lengths[:-1] * spans).sum() / span),
        queue_max=int(lengths.max()),
        queue_empty=float(spans[lengths[:-1] == 0].sum() / span),
        short=int((ns < SHORT_NS).sum()),
        short_ns=int(ns[ns < SHORT_NS].sum()),
        slow_launches=int((calls > gpu.duration[launched_alone]).sum()),
    )


def _queue(launched: Int64, done: Int64) -> tuple[Int64, Int64]:
    """When the number of pieces that are launched and not done changes, and what it is then; thinned out."""
    times = np.concatenate((launched, np.maximum(done, launched)))
    change = np.repeat(np.array([1, -1]), len(launched))
    order = np.lexsort((-change, times))
    lengths = np.cumsum(change[order])
    times = times[order]
    last = np.append(times[1:] != times[:-1], True)
    return times[last], lengths[last]


def thinned(times: Int64, lengths: Int64) -> list[tuple[int, int]]:
    """Time and length at as many points as are shown: the longest of each stretch of time."""
    if len(times) <= MAX_POINTS:
        return list(zip(times.tolist(), lengths.tolist(), strict=True))
    edges = np.linspace(times[0], times[-1], MAX_POINTS + 1)
    stretch: NDArray[np.int64] = np.minimum(np.searchsorted(edges, times, "right") - 1, MAX_POINTS - 1)
    longest = np.full(MAX_POINTS, -1, dtype=np.int64)
    np.maximum.at(longest, stretch, lengths)
    before = 0
    found = []
    last = {int(each): int(length) for each, length in zip(stretch, lengths, strict=True)}
    for i in range(MAX_POINTS):
        found.append((int(edges[i]), max(int(longest[i]), before)))
        before = last.get(i, before)
    return found


@dataclass(frozen=True, eq=False)
class RankTables:
    """The tables of one file; `None` for those that weren't asked for."""

    kernels: tuple[KernelShape, ...] | None
    shapes: tuple[OpShape, ...] | None
    step_shapes: tuple[OpShape, ...] | None
    """The shapes of what steps launched; `None` without steps, or if they were chosen."""
    operators: tuple[CallNode, ...] | None
    step_operators: tuple[CallNode, ...] | None
    """The operators of what steps launched, as `step_shapes`."""
    copies: tuple[Copies, ...] | None
    launches: LaunchStatistics | None


def rank_tables(
    trace: Trace,
    work: Launched,
    kept: Sequence[int],
    shown: Selection,
    in_steps: Selection,
    device: str,
    show: Set[Table],
) -> RankTables | None:
    """The parts of this trace that the tables in `show` need.

    Args:
        trace: read with details.
        work: its GPU work.
        kept: positions of the chosen steps.
        shown: the work that the tables are about.
        in_steps: what the chosen steps launched.
        device: its name.
        show: the tables.
    """
    if not show:
        return None
    by_op = show & {"kernels", "shapes", "operators"}
    ops_of = launching_ops(trace, work) if by_op else np.empty(0, dtype=np.int64)
    has_own = bool(kept) and in_steps is not shown
    choices = [shown, in_steps] if has_own and not in_steps.is_all else [shown]
    shapes = [tuple(op_shapes(trace, work, ops_of, each, device)) for each in choices if "shapes" in show]
    trees = call_trees(trace, work, ops_of, choices) if "operators" in show else []
    return RankTables(
        kernels=tuple(kernel_shapes(trace, work, ops_of, shown)) if "kernels" in show else None,
        shapes=shapes[0] if shapes else None,
        step_shapes=shapes[-1] if shapes and has_own else None,
        operators=trees[0] if trees else None,
        step_operators=trees[-1] if trees and has_own else None,
        copies=tuple(copies(trace, shown.gpu)) if "copies" in show else None,
        launches=launches(trace, work, shown.gpu) if "launches" in show else None,
    )
