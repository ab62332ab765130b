"""Work that CUDA graphs replay: which captured call, and so which operator, each piece of it belongs to.

A graph's launch says nothing about operators, but the calls between `cudaStreamBeginCapture` and
`cudaStreamEndCapture` do, if the trace has them. The k-th node of a graph is what the k-th of these calls
captured: nodes are numbered as they are captured, and the graph that is launched keeps their numbers in the
lower half of its own. Source: `cudaGraphNodeGetToolsId` of CUDA's runtime API, and torch's
`cuda/_graph_annotations.py`. ROCm doesn't number nodes, but names the kernel of each call.

A capture is only taken for a graph's if it is the only one that fits: in the number and sorts of its calls,
in the names of kernels where those are known, and in time. Where as many graphs as captures fit, they are
taken in the order in which they were made.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.classify import GpuKind
from gpurun.launcher.trace.kineto.columns import NO_NAME, Trace

UNKNOWN = -1
GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")
_BEGIN = re.compile(r"(cuda|hip)StreamBeginCapture")
_END = re.compile(r"(cuda|hip)StreamEndCapture")
_SORTS = (
    ("kernel", re.compile(r"(cuda|cu|hip)\w*Launch\w*Kernel")),
    ("copy", re.compile(r"(cuda|cu|hip)Memcpy")),
    ("set", re.compile(r"(cuda|cu|hip)Memset")),
)
_SORT_OF_KIND = {
    GpuKind.COMPUTE: "kernel",
    GpuKind.COMM: "kernel",
    GpuKind.MEMCPY: "copy",
    GpuKind.MEMSET: "set",
}


@dataclass(frozen=True)
class _Capture:
    """The calls of a capture, in order of time."""

    begin: int
    end: int
    calls: tuple[int, ...]
    """Positions in `trace.launches`."""
    sorts: tuple[str, ...]
    names: tuple[str | None, ...]
    """The names of kernels, where the trace has them."""


@dataclass(frozen=True)
class _Graph:
    """A graph, as its launches show it."""

    nodes: tuple[int, ...]
    """Numbers of its nodes; empty if the trace doesn't have them."""
    sorts: tuple[str, ...]
    names: tuple[str, ...]
    first_launch: int = 0

    def fits(self, capture: _Capture) -> bool:
        """Whether it may be what this capture made."""
        if self.sorts != capture.sorts or capture.end > self.first_launch:
            return False
        pairs = zip(self.sorts, self.names, capture.names, strict=True)
        named = [(own, captured) for sort, own, captured in pairs if sort == "kernel"]
        return all(own == captured or (captured is None and self.nodes) for own, captured in named)


def replayed_work(trace: Trace, launch: Int64) -> NDArray[np.bool_]:
    """Which GPU work was launched by a graph, from the position of each piece's launch."""
    launches_graph = np.array([bool(GRAPH_LAUNCH.match(name)) for name in trace.launch_names], dtype=bool)
    found = np.zeros(len(launch), dtype=bool)
    known = launch >= 0
    if launches_graph.any():
        found[known] = launches_graph[trace.launches.name[launch[known]]]
    return found


def captured_calls(trace: Trace, launch: Int64, replayed: NDArray[np.bool_]) -> Int64:
    """The position in `trace.launches` of the call that captured each piece of work; −1 where not known."""
    found = np.full(len(launch), UNKNOWN, dtype=np.int64)
    captures = list(_captures(trace, launch)) if replayed.any() else []
    if not captures:
        return found
    graphs: defaultdict[_Graph, list[Int64]] = defaultdict(list)
    for pieces in _launched_together(trace, launch, replayed):
        graphs[_graph(trace, pieces)].append(pieces)
    started = trace.launches.start
    launched = {
        replace(graph, first_launch=int(min(started[launch[pieces[0]]] for pieces in same))): same
        for graph, same in graphs.items()
    }
    for graph, capture in _matched(list(launched), captures):
        for pieces in launched[graph]:
            found[pieces] = capture.calls
    return found


def capture_begun(trace: Trace, calls: Int64) -> Int64:
    """When the last capture began before each of these calls; before all time where none had."""
    names = [i for i, name in enumerate(trace.launch_names) if _BEGIN.match(name)]
    begins = np.append(np.iinfo(np.int64).min, trace.launches.start[_positions(trace, names)])
    found: Int64 = begins[np.searchsorted(begins, trace.launches.start[calls], "right") - 1]
    return found


def _captures(trace: Trace, launch: Int64) -> Iterator[_Capture]:
    """The captures that the trace has from begin to end."""
    calls, names = trace.launches, trace.launch_names
    begins = _positions(trace, [i for i, name in enumerate(names) if _BEGIN.match(name)])
    ends = _positions(trace, [i for i, name in enumerate(names) if _END.match(name)])
    spans = []
    for i in begins:
        own = [j for j in ends if calls.thread[j] == calls.thread[i] and calls.start[j] >= calls.start[i]]
        if own:
            spans.append((int(calls.start[i]), int(calls.start[own[0]]), int(calls.thread[i])))
    sort_of = [next((sort for sort, what in _SORTS if what.match(name)), None) for name in names]
    launching = _positions(trace, [i for i, sort in enumerate(sort_of) if sort is not None])
    launching = launching[~np.isin(launching, launch)]  # these launched work at once, on another stream
    for begin, end, thread in spans:
        inside = launching[(calls.start[launching] >= begin) & (calls.start[launching] < end)]
        if sum(first < end and begin < last for first, last, _ in spans) > 1:
            inside = inside[calls.thread[inside] == thread]
        kernels = [int(each) for each in calls.kernel[inside]]
        yield _Capture(
            begin,
            end,
            tuple(inside.tolist()),
            tuple(str(sort_of[name]) for name in calls.name[inside]),
            tuple(None if each == NO_NAME else trace.launched_kernels[each] for each in kernels),
        )


def _positions(trace: Trace, names: Sequence[int]) -> Int64:
    """The calls with these names, in order of time."""
    found = np.flatnonzero(np.isin(trace.launches.name, names))
    ordered: Int64 = found[np.argsort(trace.launches.start[found], kind="stable")]
    return ordered


def _launched_together(trace: Trace, launch: Int64, replayed: NDArray[np.bool_]) -> Iterator[Int64]:
    """The work of each launch of a graph, in the order of its nodes; of unnumbered nodes in that of time."""
    pieces = np.flatnonzero(replayed)
    order = np.lexsort((trace.gpu.start[pieces], trace.gpu.node[pieces], launch[pieces]))
    pieces = pieces[order]
    yield from np.split(pieces, np.flatnonzero(np.diff(launch[pieces])) + 1)


def _graph(trace: Trace, pieces: Int64) -> _Graph:
    gpu = trace.gpu
    nodes = gpu.node[pieces]
    return _Graph(
        nodes=tuple(nodes.tolist()) if nodes.any() else (),
        sorts=tuple(_SORT_OF_KIND[GpuKind(kind)] for kind in gpu.kind[pieces].tolist()),
        names=tuple(trace.gpu_names[name] for name in gpu.name[pieces].tolist()),
    )


def _matched(graphs: Sequence[_Graph], captures: Sequence[_Capture]) -> Iterator[tuple[_Graph, _Capture]]:
    """Graphs with the captures that they were made by, as far as that is certain."""
    alike: defaultdict[tuple[_Capture, ...], list[_Graph]] = defaultdict(list)
    for graph in graphs:
        if len(set(graph.nodes)) == len(graph.nodes):
            alike[tuple(capture for capture in captures if graph.fits(capture))].append(graph)
    taken: set[_Capture] = set()
    for fitting, same in sorted(alike.items(), key=lambda item: len(item[0])):
        free = [capture for capture in fitting if capture not in taken]
        if len(free) == len(same):
            yield from zip(sorted(same, key=lambda graph: graph.nodes), free, strict=True)
            taken.update(free)
