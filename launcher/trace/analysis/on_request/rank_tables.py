"""A rank's share of the tables that are shown on request."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.trace.analysis.critical.gpu_tasks import gpu_tasks
from gpurun.launcher.trace.analysis.critical.tasks import Tasks, cpu_tasks
from gpurun.launcher.trace.analysis.on_request.call_tree import CallNode, call_trees
from gpurun.launcher.trace.analysis.on_request.feeding import Copies, LaunchStatistics, copies, launches
from gpurun.launcher.trace.analysis.on_request.shapes import (
    KernelShape,
    OpShape,
    kernel_shapes,
    launching_ops,
    op_shapes,
)
from gpurun.launcher.trace.analysis.steps import HostStep, Launched
from gpurun.launcher.trace.analysis.tables import Selection
from gpurun.launcher.trace.kineto.columns import Timed, Trace
from gpurun.launcher.trace.requested_tables import Table


@dataclass(frozen=True, eq=False)
class RankTables:
    """The tables of one file; `None` for those that weren't asked for."""

    num_steps: int
    kernels: tuple[KernelShape, ...] | None
    shapes: tuple[OpShape, ...] | None
    step_shapes: tuple[OpShape, ...] | None
    """The shapes of what steps launched; `None` without steps, or if they were chosen."""
    operators: tuple[CallNode, ...] | None
    step_operators: tuple[CallNode, ...] | None
    """The operators of what steps launched, as `step_shapes`."""
    copies: tuple[Copies, ...] | None
    launches: LaunchStatistics | None
    tasks: Tasks | None


def rank_tables(
    trace: Trace,
    work: Launched,
    steps: Sequence[HostStep],
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
        steps: of the host.
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
        num_steps=len(kept),
        kernels=tuple(kernel_shapes(trace, work, ops_of, shown)) if "kernels" in show else None,
        shapes=shapes[0] if shapes else None,
        step_shapes=shapes[-1] if shapes and has_own else None,
        operators=trees[0] if trees else None,
        step_operators=trees[-1] if trees and has_own else None,
        copies=tuple(copies(trace, shown.gpu)) if "copies" in show else None,
        launches=launches(trace, work, shown.gpu) if "launches" in show else None,
        tasks=_tasks(trace, work, [steps[i] for i in kept]) if "critical-path" in show else None,
    )


def _tasks(trace: Trace, work: Launched, steps: Sequence[HostStep]) -> Tasks:
    """Tasks from the first step's start to the last one's end; of all of the trace where it has no steps."""
    window = _window(trace, steps)
    return gpu_tasks(trace, work, window) if len(trace.gpu) else cpu_tasks(trace, window)


def _window(trace: Trace, steps: Sequence[HostStep]) -> tuple[int, int]:
    if steps:
        return min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    columns: list[Timed] = [each for each in (trace.launches, trace.ops) if len(each)]
    first = min((int(each.start.min()) for each in columns), default=0)
    return first, max((int(each.end.max()) for each in columns), default=first)
