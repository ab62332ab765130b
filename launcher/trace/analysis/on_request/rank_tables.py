"""What a rank contributes to the tables that are shown on request."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.trace.analysis.critical.cpu_tasks import cpu_tasks
from gpurun.launcher.trace.analysis.critical.gpu_tasks import gpu_tasks
from gpurun.launcher.trace.analysis.critical.tasks import Tasks
from gpurun.launcher.trace.analysis.on_request.feeding import Copies, Launches, copies, launches
from gpurun.launcher.trace.analysis.on_request.shapes import (
    KernelShape,
    OpShape,
    kernel_shapes,
    launching_ops,
    op_shapes,
)
from gpurun.launcher.trace.analysis.steps import HostStep, Launched
from gpurun.launcher.trace.analysis.tables import Chosen
from gpurun.launcher.trace.kineto.columns import Timed, Trace
from gpurun.launcher.trace.requested_tables import Table


@dataclass(frozen=True, eq=False)
class RankTables:
    """Of one file; `None` for what wasn't asked for."""

    num_steps: int
    kernels: tuple[KernelShape, ...] | None
    shapes: tuple[OpShape, ...] | None
    step_shapes: tuple[OpShape, ...] | None
    """Of what steps launched; `None` without steps, or if they were chosen."""
    copies: tuple[Copies, ...] | None
    launches: Launches | None
    tasks: Tasks | None


def rank_tables(
    trace: Trace,
    work: Launched,
    steps: Sequence[HostStep],
    kept: Sequence[int],
    shown: Chosen,
    in_steps: Chosen,
    device: str,
    show: Set[Table],
) -> RankTables | None:
    """What the tables in `show` need of this trace.

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
    ops_of = launching_ops(trace, work) if show & {"kernels", "shapes"} else np.empty(0, dtype=np.int64)
    return RankTables(
        num_steps=len(kept),
        kernels=tuple(kernel_shapes(trace, work, ops_of, shown)) if "kernels" in show else None,
        shapes=tuple(op_shapes(trace, work, ops_of, shown, device)) if "shapes" in show else None,
        step_shapes=(
            tuple(op_shapes(trace, work, ops_of, in_steps, device))
            if "shapes" in show and kept and in_steps is not shown
            else None
        ),
        copies=tuple(copies(trace, shown.gpu)) if "copies" in show else None,
        launches=launches(trace, work, shown.gpu) if "launches" in show else None,
        tasks=_tasks(trace, work, [steps[i] for i in kept]) if "critical-path" in show else None,
    )


def _tasks(trace: Trace, work: Launched, steps: Sequence[HostStep]) -> Tasks:
    """From the first step's start to the last one's end; of all of the trace where it has no steps."""
    window = _window(trace, steps)
    return gpu_tasks(trace, work, window) if len(trace.gpu) else cpu_tasks(trace, window)


def _window(trace: Trace, steps: Sequence[HostStep]) -> tuple[int, int]:
    if steps:
        return min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    columns: list[Timed] = [each for each in (trace.launches, trace.ops) if len(each)]
    first = min((int(each.start.min()) for each in columns), default=0)
    return first, max((int(each.end.max()) for each in columns), default=first)
