"""A rank's device activity as sets of moments, for sums over a window and the overview."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.tensorboard_plugin.timeline.blocks import BlockKind, Int8
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.tables import compute_ops
from gpurun.launcher.trace.intervals import EMPTY, Int64, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import Trace


@dataclass(frozen=True, eq=False)
class Activities:
    """Moments of each class; they may overlap."""

    compute: Intervals
    comm: Intervals
    copies: Intervals
    data: Intervals
    """The training loop waits for its next batch."""


def activities(trace: Trace) -> Activities:
    """Activity of the GPU if there is GPU work, else of the CPU, where operators count as compute."""
    data = trace.union_of(HostKind.DATA)
    if len(trace.gpu):
        return Activities(
            _of_gpu(trace, GpuKind.COMPUTE),
            _of_gpu(trace, GpuKind.COMM),
            _of_gpu(trace, GpuKind.MEMCPY, GpuKind.MEMSET),
            data,
        )
    ops = compute_ops(trace)
    compute = union(trace.ops.start[ops], trace.ops.end[ops]).subtract(data)
    return Activities(compute, trace.union_of(HostKind.COMM), EMPTY, data)


def _of_gpu(trace: Trace, *kinds: GpuKind) -> Intervals:
    chosen = np.isin(trace.gpu.kind, kinds)
    return union(trace.gpu.start[chosen], trace.gpu.end[chosen])


def exclusive(found: Activities, transfers: Intervals) -> dict[BlockKind, Intervals]:
    """The same moments without overlap: each counts for the first of compute, communication, copy and input.

    Args:
        found: what the device did.
        transfers: when collectives moved data; other communication is waiting.
    """
    comm = found.comm.subtract(found.compute)
    busy = found.compute.join(found.comm)
    return {
        BlockKind.COMPUTE: found.compute,
        BlockKind.TRANSFER: comm.intersect(transfers),
        BlockKind.WAIT: comm.subtract(transfers),
        BlockKind.COPY: found.copies.subtract(busy),
        BlockKind.INPUT: found.data.subtract(busy.join(found.copies)),
    }


def split_transfers(
    parts: Mapping[BlockKind, Intervals], kinds: Mapping[BlockKind, Intervals]
) -> dict[BlockKind, Intervals]:
    """The same moments with transfers by kind: each moment counts for the first that has it."""
    found = dict(parts)
    rest = found.pop(BlockKind.TRANSFER)
    for kind, moments in kinds.items():
        found[kind] = rest.intersect(moments)
        rest = rest.subtract(moments)
    return {**found, BlockKind.OTHER_COMM: rest}


def shifted(moments: Intervals, realigned: Realigned) -> Intervals:
    """The same moments on another clock."""
    return Intervals(realigned.each(moments.starts), realigned.each(moments.ends))


def ordered(parts: dict[BlockKind, Intervals]) -> tuple[Int64, Int64, Int8]:
    """Starts, ends and kinds of disjoint moments, by time."""
    starts = np.concatenate([each.starts for each in parts.values()])
    ends = np.concatenate([each.ends for each in parts.values()])
    kinds = np.concatenate([np.full(len(each.starts), kind, dtype=np.int8) for kind, each in parts.items()])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order], kinds[order]
