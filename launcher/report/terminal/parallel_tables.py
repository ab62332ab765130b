"""Parallelism in `gpurun trace`: a table of its kinds, and two of the pipeline's bubble."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import RenderableType

from gpurun.launcher.report.terminal.layout import ms_text, table_of
from gpurun.launcher.trace.model import MessageWaits, PipelineStage, TraceReport
from gpurun.launcher.units import format_percent

MESSAGE_WIDTH = 9
"""Of a column, with the space before it."""
LABEL_WIDTH = 20


def parallelism_tables(report: TraceReport, width: int) -> list[RenderableType]:
    """The tables; none for a single kind of parallelism, whose figures the ranks' table has already."""
    if len(report.parallelism) < 2 and not report.pipeline:
        return []
    table = table_of(())
    table.add_column("parallelism")
    for name in ("groups", "comm", "exposed", "wait"):
        table.add_column(name, justify="right")
    for each in report.parallelism:
        comm, exposed, wait = each.mean_us(len(report.ranks))
        waited = "-" if wait is None else ms_text(wait)
        table.add_row(each.kind, str(len(each.groups)), ms_text(comm), ms_text(exposed), waited)
    return ["", table, *_pipeline(report.pipeline, width)]


def _pipeline(stages: Sequence[PipelineStage], width: int) -> list[RenderableType]:
    if not stages:
        return []
    table = table_of(("stage", "ranks", "span", "bubble", "share"))
    table.add_column("waits for")
    for each in stages:
        share = format_percent(100 * each.bubble_us / each.span_us) if each.span_us else "-"
        awaited = ", ".join(f"stage {other}: {ms_text(us)}" for other, us in each.waits_us.items() if us)
        table.add_row(
            str(each.stage),
            ranges_text(each.ranks),
            ms_text(each.span_us),
            ms_text(each.bubble_us),
            share,
            awaited,
        )
    return ["", table, *_messages(stages, width)]


def _messages(stages: Sequence[PipelineStage], width: int) -> list[RenderableType]:
    """The bubble by message: what stages receive, and what they send if they wait there."""
    rows = [(each.stage, message) for each in stages for message in each.messages if _is_shown(message)]
    longest = max((len(message.wait_us) for _, message in rows), default=0)
    shown = min(longest, (width - LABEL_WIDTH) // MESSAGE_WIDTH)
    if not shown:
        return []
    table = table_of(())
    table.add_column("bubble by message")
    for number in range(1, shown + 1):
        table.add_column(str(number), justify="right")
    for stage, message in rows:
        waits = [ms_text(us) for us in message.wait_us[:shown]]
        label = f"stage {stage} {message.way} {message.stage}"
        table.add_row(label, *waits, *[""] * (shown - len(waits)))
    return ["", table, *([f"… and {longest - shown} more; --json has all"] if longest > shown else [])]


def _is_shown(message: MessageWaits) -> bool:
    return message.way == "from" or any(message.wait_us)


def ranges_text(ranks: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    ordered = sorted(ranks)
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1), len(ordered)]
    runs = [ordered[first:last] for first, last in pairwise(breaks)]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)
