"""The tables of `gpurun trace --show` by variant, rank and step, and two variants' trees of operators."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.report.tables_on_request import TITLES, shown_table
from gpurun.launcher.report.terminal.changes import shown_changes
from gpurun.launcher.report.terminal.trace import headline
from gpurun.launcher.tensorboard_plugin.answers.made import Made, order
from gpurun.launcher.tensorboard_plugin.timeline.format import Header
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.analysis.analyse import analyse
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.model import RankTrace, TraceReport
from gpurun.launcher.trace.requested_tables import TABLES, Table

PATH: Table = "critical-path"
"""Takes longer than all others together, so it is made by itself."""
OTHERS = tuple(each for each in TABLES if each != PATH)


@dataclass(frozen=True)
class Wanted:
    """What a request asks for."""

    table: Table
    rank: int | None
    """`None`: all ranks."""
    step: int | None
    """`None`: all of the trace, as `gpurun trace` without `--steps`."""

    @property
    def names(self) -> tuple[Table, ...]:
        """The tables that are made together."""
        return (PATH,) if self.table == PATH else OTHERS

    @property
    def file(self) -> str:
        group = "path" if self.table == PATH else "tables"
        return f"{group}-{'all' if self.step is None else self.step}.json"


class RequestedTables:
    """The tables of a server, each made when it is asked for first."""

    def __init__(self) -> None:
        entry = "gpurun.launcher.tensorboard_plugin.answers.requested:make"
        self._made = Made(entry, "the tables can't be made")

    def get(self, traces: Traces, index: Index, wanted: Wanted) -> TraceReport | str | None:
        """A report with the table, or why there is none, or `None` while it is being made."""
        step = "" if wanted.step is None else str(wanted.step)
        found = self._made.get(traces, index, wanted.file, ",".join(wanted.names), step)
        if not isinstance(found, Path):
            return found
        path = found if wanted.rank is None or wanted.table == PATH else of_rank(found, wanted.rank)
        return msgspec.json.decode(path.read_bytes(), type=TraceReport)


def of_rank(path: Path, rank: int) -> Path:
    """The file with one rank's tables, next to that with all."""
    return path.with_suffix(f".{rank}.json")


def make() -> None:
    """The body of the process that makes them: a report of all ranks, and one of each."""
    out, (names, step, *files) = order()
    steps = slice(int(step), int(step) + 1) if step else None
    show = frozenset(each for each in TABLES if each in names.split(","))
    analysis = analyse([Path(each) for each in files], steps, show)
    if PATH not in show:
        for rank, _ in analysis.ranked.digests:
            _write(of_rank(out, rank), analysis.of_rank(rank))
    _write(out, analysis.report)  # last: where it is, the others are


def _write(out: Path, report: TraceReport) -> None:
    draft = out.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(_slim(report)))
    os.replace(draft, out)


def _slim(report: TraceReport) -> TraceReport:
    """Without what the index has already."""
    return replace(
        report, ranks=tuple(map(_slim_rank, report.ranks)), collectives=(), parallelism=(), pipeline=()
    )


def _slim_rank(rank: RankTrace) -> RankTrace:
    return replace(rank, kernels=(), ops=(), modules=(), groups=(), devices=(), in_steps=None)


def tables_answer(
    header: Header, table: Table, report: TraceReport, label: str, against: tuple[str, TraceReport] | None
) -> dict[str, Any]:
    """A table as the page shows it; see README.md.

    Args:
        header: of the index.
        table: its name.
        report: made with it.
        label: what the variant is called.
        against: the label and report of another variant, whose tree of operators is compared.
    """
    about = headline(report)
    if against is not None:
        other, base = against
        shown, about = shown_changes(diff_traces(base, report), other, label)
    else:
        shown = shown_table(report, table)
    return {
        "table": table,
        "kinds": [{"key": key, "title": title} for key, title in TITLES.items()],
        "sentence": f"{label}: {about}",
        "ranks": [rank.rank for rank in header.ranks],
        "steps": sorted({step.step for rank in header.ranks for step in rank.steps}),
        "warnings": report.warnings,
        "tables": shown.tables,
        "notes": shown.notes,
    }
