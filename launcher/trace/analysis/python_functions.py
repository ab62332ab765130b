"""Python's functions around what a device waits for, where the trace has stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.analysis.steps import LONG_LAUNCH_NS, NEARLY_ALL, Launched
from gpurun.launcher.trace.intervals import EMPTY, Intervals, union
from gpurun.launcher.trace.kineto.classify import GpuKind, HostKind
from gpurun.launcher.trace.kineto.columns import HostRange, Spans, Trace

MOST = 0.5
"""Share of a time: a function around most of it is named, unless it is around nearly all other time, too."""
_WAITS = re.compile(
    r"(.*/)?(queue|threading|selectors|concurrent/futures/_base|multiprocessing/(queues|connection|pool))"
    r"\.py\(\d+\): (get|wait|wait_for|join|result|recv|poll|select|next|result_iterator)$"
)
"""Functions of Python's library that wait for another thread or process."""
_WRAPPERS = re.compile(r".*: (_call_impl|_wrapped_call_impl|wrapper|decorate_context|inner|_fn|__call__)$")
"""Functions that only call another."""
_OF_LIBRARY = re.compile(
    r"torch/|(.*/)?(threading|queue|contextlib|functools|runpy|selectors)\.py|<(frozen|string|eval_with_key)"
)
_BUILT_IN = re.compile(r"<(built-in\s(function|method)|method|class)\s'?(?P<function>[\w.]+)'?.*")
_NAME = re.compile(r"(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)")


def with_awaited_data(trace: Trace, work: Launched) -> Trace:
    """The trace without what other threads prepare, unless the loop's thread waits for that meanwhile.

    The loop's threads are those of steps, and those that launch computing kernels. Where it isn't known which
    these are, all threads count.
    """
    loop = _loop_threads(trace, work)
    data = trace.of_kind(HostKind.DATA)
    if not loop or all(each.thread in loop for each in data):
        return trace
    waits = _waits(trace.functions, trace.function_names, loop)
    kept = list[HostRange]()
    for each in trace.ranges:
        is_other = each.kind is HostKind.DATA and each.thread not in loop
        kept += _inside(each, waits) if is_other else [each]
    return replace(trace, ranges=tuple(kept))


def _loop_threads(trace: Trace, work: Launched) -> set[int]:
    marked = {each.thread for each in trace.of_kind(HostKind.STEP)}
    launching = set(launching_threads(trace, work).tolist())
    working = marked.union(*(np.unique(each.thread).tolist() for each in (trace.ops, trace.annotations)))
    return marked | launching if not launching or launching & working else set()


def launching_threads(trace: Trace, work: Launched) -> NDArray[np.int32]:
    """The thread of each launch of a computing kernel."""
    computes = work.is_known & (trace.gpu.kind == GpuKind.COMPUTE)
    threads: NDArray[np.int32] = trace.launches.thread[work.launch[computes]]
    return threads


def _waits(functions: Spans, names: tuple[str, ...], loop: set[int]) -> Intervals:
    waits = np.array([bool(_WAITS.match(name)) for name in names], dtype=bool)
    if not waits.any():
        return EMPTY
    return functions.where(waits[functions.name] & np.isin(functions.thread, list(loop))).covered


def _inside(each: HostRange, times: Intervals) -> Iterator[HostRange]:
    inside = times.clip(each.start, each.end)
    for start, end in zip(inside.starts.tolist(), inside.ends.tolist(), strict=True):
        yield replace(each, start=start, end=end)


@dataclass(frozen=True, eq=False)
class LoopFunctions:
    """The functions of the thread that runs the loop."""

    calls: Spans
    names: tuple[str, ...]

    @staticmethod
    def of(trace: Trace, work: Launched) -> LoopFunctions:
        """Functions of the thread that launches most kernels; without any, of that with most time in ops."""
        threads = np.unique(trace.functions.thread)
        by, weights = launching_threads(trace, work), None
        if not len(trace.gpu):
            by, weights = trace.ops.thread, trace.ops.duration
        amounts = np.bincount(by, weights, minlength=len(trace.threads))[threads]
        mine = (trace.functions.thread == threads[amounts.argmax()]) & amounts.any()
        return LoopFunctions(trace.functions.where(mine), trace.function_names)

    def around(self, parts: Mapping[str, Intervals], window: Intervals) -> dict[str, int]:
        """The number of the innermost function around most of each part of a window, where there is one."""
        calls = self.calls.near(window)
        found = {name: self._around(calls, part, window.subtract(part)) for name, part in parts.items()}
        return {name: function for name, function in found.items() if function is not None}

    def _around(self, calls: Spans, part: Intervals, rest: Intervals) -> int | None:
        inside_ns = np.bincount(calls.name, part.inside_ns(calls.start, calls.end), len(self.names))
        best: tuple[tuple[int, int, str], int] | None = None
        for name in np.flatnonzero(inside_ns >= MOST * max(part.length_ns, 1)).tolist():
            mine = calls.name == name
            covered = union(calls.start[mine], calls.end[mine])
            is_of_all = covered.intersect(rest).length_ns >= NEARLY_ALL * max(rest.length_ns, 1)
            is_most = covered.intersect(part).length_ns >= MOST * part.length_ns
            text = self.names[name]
            if is_most and not is_of_all and not _WRAPPERS.match(text):
                key = (_order(text), covered.length_ns, text), name
                best = key if best is None else min(best, key)
        return None if best is None else best[1]

    def holds(self, function: int, waited: Intervals, calling: Intervals) -> bool:
        """Whether it launches nothing, for long each time, in most of the waited time."""
        calls = self.calls.near(waited)
        covered = calls.where(calls.name == function).covered
        held = covered.subtract(calling).longer_than(LONG_LAUNCH_NS).intersect(waited)
        return held.length_ns > MOST * waited.length_ns


def _order(name: str) -> int:
    """Functions of the program come first, then those of Python and torch, then built-in ones."""
    return 2 if _BUILT_IN.match(name) else int(bool(_OF_LIBRARY.match(name)))


def readable_function(name: str) -> str:
    """`preprocess (data.py:41)` for `data.py(41): preprocess`; `sleep` for a built-in function."""
    if built_in := _BUILT_IN.fullmatch(name):
        return built_in["function"]
    found = _NAME.fullmatch(name)
    return name if found is None else "{function} ({file}:{line})".format(**found.groupdict())
