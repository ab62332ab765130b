"""Which kernels, operators and modules took the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from launcher.trace.classify import GpuKind, HostKind
from launcher.trace.columns import Spans, Trace
from launcher.trace.intervals import Int64
from launcher.trace.nesting import Nesting, nest
from launcher.trace.steps import Launched

MAX_NAMES = 500
"""Names beyond it, by time, aren't kept; real traces have 50 to 300."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class NameTime:
    """Time under one name, in ns."""

    name: str
    kind: str
    """For GPU work compute, comm or memcpy; op, module."""
    count: int
    device_ns: int
    """Of GPU work with this name, or launched from within it but from nothing further inside."""
    host_ns: int
    """On the CPU, without operators further inside."""


def kernel_times(trace: Trace, chosen: Mask) -> list[NameTime]:
    """GPU work by name, longest first."""
    gpu = trace.gpu
    counts, device_ns = _sums(gpu.name[chosen], gpu.duration[chosen], len(trace.gpu_names))
    kinds = np.zeros(len(trace.gpu_names), dtype=np.int8)
    kinds[gpu.name] = gpu.kind
    words = {
        GpuKind.COMPUTE: "compute",
        GpuKind.COMM: "comm",
        GpuKind.MEMCPY: "memcpy",
        GpuKind.MEMSET: "memcpy",
    }
    return _longest(
        NameTime(trace.gpu_names[i], words[GpuKind(int(kinds[i]))], int(counts[i]), int(device_ns[i]), 0)
        for i in np.flatnonzero(counts).tolist()
    )


def op_times(
    trace: Trace, work: Launched, chosen_gpu: Mask, chosen_ops: Mask
) -> tuple[list[NameTime], list[NameTime]]:
    """Times by operator and by `nn.Module`, longest first.

    Calls that issue collectives count with the GPU work that they launch; their time on the CPU is no
    computing, and no operator's.
    """
    nesting, modules = nest(trace.ops), nest(trace.modules)
    own = nesting.self_ns() if nesting else np.zeros(len(trace.ops), dtype=np.int64)
    own[~compute_ops(trace)] = 0
    calls = _calls(trace, work, chosen_gpu)
    ops = _under(trace.ops, trace.op_names, "op", nesting, calls, (chosen_ops, own))
    if modules is None:
        return ops, []
    by_op = modules.innermost(trace.ops.thread, trace.ops.start)
    shown = chosen_ops & (by_op >= 0)
    host_ns = np.bincount(by_op[shown], weights=own[shown], minlength=len(trace.modules)).astype(np.int64)
    inside = np.ones(len(trace.modules), dtype=bool)
    return ops, _under(trace.modules, trace.module_names, "module", modules, calls, (inside, host_ns))


@dataclass(frozen=True, eq=False)
class _Calls:
    """Where and when work was launched, and how long it ran."""

    threads: NDArray[np.int32]
    times: Int64
    durations: Int64


def _calls(trace: Trace, work: Launched, chosen: Mask) -> _Calls:
    known = chosen & (work.launch >= 0)
    launch = work.launch[known]
    return _Calls(trace.launches.thread[launch], work.start[known], trace.gpu.duration[known])


def _under(
    spans: Spans,
    names: Sequence[str],
    kind: str,
    nesting: Nesting | None,
    calls: _Calls,
    host: tuple[Mask, Int64],
) -> list[NameTime]:
    """Sums by name: host time of the chosen spans, device time of the work launched from within."""
    chosen, own = host
    counts, host_ns = _sums(spans.name[chosen], own[chosen], len(names))
    device_ns = np.zeros(len(names), dtype=np.int64)
    if nesting is not None:
        span = nesting.innermost(calls.threads, calls.times)
        held = span >= 0
        _, device_ns = _sums(spans.name[span[held]], calls.durations[held], len(names))
    shown = np.flatnonzero(counts + device_ns).tolist()
    return _longest(
        NameTime(names[i], kind, int(counts[i]), int(device_ns[i]), int(host_ns[i])) for i in shown
    )


def _sums(names: NDArray[np.int32], ns: Int64, num_names: int) -> tuple[Int64, Int64]:
    """Number and total time by name. Sums of doubles are exact here: a trace is shorter than 2^53 ns."""
    counts = np.bincount(names, minlength=num_names)
    return counts, np.bincount(names, weights=ns, minlength=num_names).astype(np.int64)


def _longest(rows: Iterable[NameTime]) -> list[NameTime]:
    merged: dict[tuple[str, str], NameTime] = {}
    for row in rows:
        before = merged.get((row.name, row.kind))
        merged[row.name, row.kind] = _add(before, row) if before else row
    longest = sorted(merged.values(), key=lambda row: (-row.device_ns, -row.host_ns, row.name))
    return longest[:MAX_NAMES]


def _add(one: NameTime, other: NameTime) -> NameTime:
    return NameTime(
        one.name,
        one.kind,
        one.count + other.count,
        one.device_ns + other.device_ns,
        one.host_ns + other.host_ns,
    )


def compute_ops(trace: Trace) -> Mask:
    """Operators that compute: no communication calls, and none on the threads that carry out collectives."""
    kinds = trace.op_kinds[trace.ops.name] if len(trace.ops) else np.empty(0, dtype=np.int8)
    comm_threads = sorted({each.thread for each in trace.of_kind(HostKind.COMM)})
    return np.asarray((kinds == HostKind.OP) & ~np.isin(trace.ops.thread, comm_threads), dtype=np.bool_)
