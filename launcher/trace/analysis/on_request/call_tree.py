"""Modules and operators by which called which, with the time of the work that each launched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpurun.launcher.trace.analysis.on_request.shapes import own_host_ns, shapes_and_types
from gpurun.launcher.trace.analysis.steps import Launched, capture_begun
from gpurun.launcher.trace.analysis.tables import Nesting, Selection, nest, stretches, timed_ops, work_ns
from gpurun.launcher.trace.diff import MAX_ROWS, Path, RowName, in_order
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.columns import NO_SHAPES, Spans, Trace
from gpurun.launcher.trace.model import OperatorTotal

MAX_DEPTH = 64
"""The depth limit: what is nested deeper counts for the range at that depth."""
ROOT = -1
OUTSIDE: Path = (("outside", "outside of all operators and modules"),)


@dataclass(frozen=True)
class CallNode:
    """Calls along one path, on one rank."""

    path: Path
    count: int
    self_ns: int


@dataclass(eq=False)
class _Tree:
    """The node of every range and every piece of GPU work; −1 where it has none."""

    of_module: Int64
    of_op: Int64
    of_work: Int64
    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Numbers of nodes, by the number of the node around each and of its name: modules', then operators'.

    A node comes after the one around it.
    """
    captured: list[tuple[Int64, Int64]] = field(default_factory=list)
    """Ranges that a CUDA graph captured, modules before operators, and calls within them that it replays."""

    def number(self, outer: Int64, names: Int64) -> Int64:
        """The nodes of ranges with these names, from the nodes around them."""
        pairs, place = np.unique(np.stack([outer, names]), axis=1, return_inverse=True)
        known = [self.nodes.setdefault(pair, len(self.nodes)) for pair in zip(*pairs.tolist(), strict=True)]
        return np.array(known, dtype=np.int64)[place.reshape(-1)]


def call_trees(
    trace: Trace, work: Launched, ops_of: Int64, choices: Sequence[Selection]
) -> list[tuple[CallNode, ...]]:
    """The nodes that have any time, for each of the choices.

    Args:
        trace: read with details, which have the shapes.
        work: its GPU work.
        ops_of: the operator that launched each piece, as `launching_ops` gives it.
        choices: what to count.
    """
    tree = _tree(trace, work)
    own_ns = None if len(trace.gpu) else np.where(timed_ops(trace), own_host_ns(trace), 0)
    runs = [_runs(trace, tree, work, chosen) for chosen in choices]
    return [
        _nodes(trace, tree, ops_of, own_ns, chosen, ran) for chosen, ran in zip(choices, runs, strict=True)
    ]


def _runs(trace: Trace, tree: _Tree, work: Launched, chosen: Selection) -> Int64:
    """How often each module, and then each operator, ran: as it was called, or captured and replayed."""
    runs = np.concatenate([chosen.modules, chosen.ops]).astype(np.int64)
    replays = np.bincount(work.captured[chosen.gpu & (work.captured >= 0)], minlength=len(trace.launches))
    for ranges, _ in tree.captured:
        runs[ranges] = 0
    for ranges, calls in tree.captured:
        np.maximum.at(runs, ranges, replays[calls])
    return runs


def _tree(trace: Trace, work: Launched) -> _Tree:
    sizes = (len(trace.modules), len(trace.ops), len(trace.gpu))
    of_module, of_op, of_work = (np.full(size, ROOT, dtype=np.int64) for size in sizes)
    tree = _Tree(of_module, of_op, of_work)
    known = np.flatnonzero(work.is_known)
    calls = work.call[known]
    threads, times = trace.launches.thread[calls], trace.launches.start[calls]
    for stretch in stretches(trace.ops, trace.modules):
        modules = np.flatnonzero(stretch.holds(trace.modules.start))
        ops = np.flatnonzero(stretch.holds(trace.ops.start))
        spans = _together(trace, modules, ops)
        nesting = nest(spans)
        if nesting is None:
            continue
        found = _numbered(tree, nesting, spans.name.astype(np.int64))
        tree.of_module[modules], tree.of_op[ops] = found[: len(modules)], found[len(modules) :]
        asked = stretch.holds(times)
        place = nesting.innermost(threads[asked], times[asked])
        tree.of_work[known[asked]] = np.where(place >= 0, found[place], ROOT)
        ranges = np.concatenate([modules, len(trace.modules) + ops])
        replayed = np.flatnonzero((work.captured[known[asked]] >= 0) & (place >= 0))
        first = replayed[np.unique(calls[asked][replayed], return_index=True)[1]]
        for inside, held in _captured(trace, nesting, spans, place[first], calls[asked][first]):
            tree.captured.append((ranges[inside], held))
    return tree


def _captured(
    trace: Trace, nesting: Nesting, spans: Spans, place: Int64, calls: Int64
) -> Iterator[tuple[Int64, Int64]]:
    """The ranges around these calls that began in the same capture, the innermost first, with the calls."""
    on_line = np.empty_like(nesting.order)
    on_line[nesting.order] = np.arange(len(on_line))
    place, begun = on_line[place], capture_begun(trace, calls)
    while len(place):
        inside = (place >= 0) & (spans.start[nesting.order[place]] >= begun)
        place, calls, begun = place[inside], calls[inside], begun[inside]
        yield nesting.order[place], calls
        place = nesting.outer[place]


def _together(trace: Trace, modules: Int64, ops: Int64) -> Spans:
    """Modules first, so that one is around an operator that begins and ends with it."""
    first, then = trace.modules, trace.ops
    return Spans(
        np.concatenate([first.start[modules], then.start[ops]]),
        np.concatenate([first.duration[modules], then.duration[ops]]),
        np.concatenate([first.name[modules], then.name[ops] + len(trace.module_names)]),
        np.concatenate([first.thread[modules], then.thread[ops]]),
    )


def _numbered(tree: _Tree, nesting: Nesting, names: Int64) -> Int64:
    """The node of each range, in the order of `names`."""
    on_line = np.full(len(names), ROOT, dtype=np.int64)
    names = names[nesting.order]
    for depth, level in enumerate(nesting.levels):
        around = nesting.outer[level]
        outer = np.where(around >= 0, on_line[around], ROOT)
        on_line[level] = tree.number(outer, names[level]) if depth < MAX_DEPTH else outer
    found = np.empty_like(on_line)
    found[nesting.order] = on_line
    return found


def _nodes(
    trace: Trace, tree: _Tree, ops_of: Int64, own_ns: Int64 | None, chosen: Selection, runs: Int64
) -> tuple[CallNode, ...]:
    """With `own_ns`, the time of each operator on the CPU; else the GPU's."""
    if own_ns is None:
        held = chosen.gpu & (tree.of_work >= 0)
        nodes, ns = tree.of_work[held], work_ns(trace)[held]
        ops = ops_of[held]
        ops = np.where((ops >= 0) & (np.append(tree.of_op, ROOT)[ops] == nodes), ops, ROOT)
    else:
        ops = np.flatnonzero(chosen.ops & (tree.of_op >= 0))
        nodes, ns = tree.of_op[ops], own_ns[ops]
    ranges, size = np.concatenate([tree.of_module, tree.of_op]), len(tree.nodes)
    known = ranges >= 0
    counts = np.bincount(ranges[known], weights=runs[known], minlength=size).astype(np.int64).tolist()
    own = np.bincount(nodes, weights=ns, minlength=size).astype(np.int64).tolist()
    kept = _longest(tree, own)
    paths = _paths(trace, tree, kept)
    found = [CallNode(paths[node], counts[node], own[node]) for node in kept]
    found += _by_shapes(trace, tree, (ops, ns), runs[len(trace.modules) :], paths)
    return (*found, *_outside(trace, tree, chosen))


def _longest(tree: _Tree, own: Sequence[int]) -> list[int]:
    """The nodes with most time in them, none without the one around it."""
    totals = list(own)
    outer = [above for above, _ in tree.nodes]
    for node in reversed(range(len(outer))):
        if outer[node] >= 0:
            totals[outer[node]] += totals[node]
    some = [node for node, total in enumerate(totals) if total > 0]
    return sorted(sorted(some, key=lambda node: (-totals[node], node))[:MAX_ROWS])


def _paths(trace: Trace, tree: _Tree, kept: Sequence[int]) -> dict[int, Path]:
    names: list[RowName] = [("module", name) for name in trace.module_names]
    names += [("op", name) for name in trace.op_names]
    edges = list(tree.nodes)
    found: dict[int, Path] = {ROOT: ()}
    for node in kept:
        outer, name = edges[node]
        found[node] = (*found[outer], names[name])
    return found


def _by_shapes(
    trace: Trace, tree: _Tree, launched: tuple[Int64, Int64], runs: Int64, paths: dict[int, Path]
) -> Iterator[CallNode]:
    """The operators' own time by the shapes and types of their arguments."""
    if trace.details is None:
        return
    ops, ns = launched
    arguments, width = np.append(trace.details.of_op, NO_SHAPES), len(trace.details.op_arguments) + 1

    def keys(ops: Int64) -> Int64:
        found: Int64 = tree.of_op[ops] * width + arguments[ops]
        return found

    known = (ops >= 0) & (arguments[ops] != NO_SHAPES)
    unique, place = np.unique(keys(ops[known]), return_inverse=True)
    own = np.bincount(place.reshape(-1), weights=ns[known], minlength=len(unique)).astype(np.int64)
    called = np.flatnonzero((tree.of_op >= 0) & np.isin(keys(np.arange(len(runs))), unique))
    place = np.searchsorted(unique, keys(called))
    counts = np.bincount(place, weights=runs[called], minlength=len(unique)).astype(np.int64)
    for key, count, self_ns in zip(unique.tolist(), counts.tolist(), own.tolist(), strict=True):
        node, number = divmod(key, width)
        text = shapes_and_types(trace.details.op_arguments[number])
        if self_ns and text and node in paths:
            yield CallNode((*paths[node], ("shapes", text)), count, self_ns)


def _outside(trace: Trace, tree: _Tree, chosen: Selection) -> Iterator[CallNode]:
    left = chosen.gpu & (tree.of_work < 0)
    if left.any():
        yield CallNode(OUTSIDE, int(left.sum()), int(work_ns(trace)[left].sum()))


def operator_totals(ranks: Iterable[Sequence[CallNode]]) -> tuple[OperatorTotal, ...]:
    """All ranks' nodes as rows of a tree: each below the one around it, those with most time first."""
    sums: defaultdict[Path, list[int]] = defaultdict(lambda: [0, 0])
    for node in (node for nodes in ranks for node in nodes):
        sums[node.path][0] += node.count
        sums[node.path][1] += node.self_ns
    totals: defaultdict[Path, int] = defaultdict(int)
    for path, (_, self_ns) in sums.items():
        first = len(path) if path[-1][0] == "shapes" else 1  # whose time is in the operator's own
        for end in range(first, len(path) + 1):
            totals[path[:end]] += self_ns
    kept = sorted(totals, key=lambda path: (-totals[path], len(path), path))[:MAX_ROWS]
    return tuple(
        OperatorTotal(len(path) - 1, *path[-1], sums[path][0], totals[path] / 1000, sums[path][1] / 1000)
        for path in in_order(kept)
    )
