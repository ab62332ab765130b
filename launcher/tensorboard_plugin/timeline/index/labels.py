"""Labels of threads and streams, by what they do if the trace shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import Trace

AUTOGRAD = "autograd::engine"


def thread_labels(trace: Trace) -> dict[int, str]:
    """Label by number of the thread: the training loop first, then autograd, then the busiest."""
    counts: Counter[int] = Counter()
    for spans in (trace.launches, trace.ops, trace.modules, trace.annotations):
        counts.update(_count(spans.thread))
    counts.update(each.thread for each in trace.ranges if each.kind in (HostKind.DATA, HostKind.COMM))
    collective = {each.thread for each in trace.of_kind(HostKind.COMM)}
    main, autograd = _main_thread(trace, counts), _autograd_threads(trace)
    roles: dict[str, list[int]] = {"main": [], "autograd": [], "collectives": [], "thread": []}
    for thread, _ in counts.most_common():
        is_any = (thread == main, thread in autograd, thread in collective, True)
        roles[next(role for role, is_it in zip(roles, is_any, strict=True) if is_it)].append(thread)
    others = roles.pop("thread")
    found = {thread: label for role, threads in roles.items() for thread, label in _numbered(role, threads)}
    return found | {thread: f"CPU thread {trace.threads[thread][1]}" for thread in others}


def _numbered(role: str, threads: Sequence[int]) -> list[tuple[int, str]]:
    """Label of each thread: no two lanes may have the same one."""
    if len(threads) == 1:
        return [(threads[0], f"CPU {role}")]
    return [(thread, f"CPU {role} {number}") for number, thread in enumerate(sorted(threads), 1)]


def stream_labels(trace: Trace) -> dict[int, str]:
    """Label by number of the stream, those that compute before those that communicate."""
    several = len({device for device, _ in trace.streams}) > 1
    comm = set(np.unique(trace.gpu.thread[trace.gpu.kind == GpuKind.COMM]).tolist())
    compute = set(np.unique(trace.gpu.thread[trace.gpu.kind == GpuKind.COMPUTE]).tolist())
    found = {}
    for number, (device, stream) in enumerate(trace.streams):
        place = f"device {device} " if several else ""
        does = " comm" if number in comm - compute else " compute" if number in compute else ""
        found[number] = f"{place}stream {stream}{does}"
    order = sorted(
        found, key=lambda n: (trace.streams[n][0], n not in compute, n in comm, _natural(found[n]))
    )
    return {number: found[number] for number in order}


def _count(threads: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> dict[int, int]:
    numbers, counts = np.unique(threads, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _main_thread(trace: Trace, counts: Counter[int]) -> int | None:
    """The thread of the steps; without steps the busiest one."""
    steps = Counter(each.thread for each in trace.of_kind(HostKind.STEP))
    ranked = steps.most_common(1) or counts.most_common(1)
    return ranked[0][0] if ranked else None


def _autograd_threads(trace: Trace) -> set[int]:
    names = np.array([name.startswith(AUTOGRAD) for name in trace.op_names], dtype=bool)
    return set(np.unique(trace.ops.thread[names[trace.ops.name]]).tolist()) if len(trace.ops) else set()


def _natural(label: str) -> tuple[int, str]:
    """`stream 7` before `stream 20`."""
    digits = "".join(character for character in label if character.isdecimal())
    return int(digits[:18] or 0), label
