"""Answers made from a variant's traces on request, by a separate process, and kept with the index.

The merged trace; the tables of `gpurun trace --show` by variant, rank and step; two variants' trees of
operators.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.findings.finding import of_level
from gpurun.launcher.findings.trace_cases import NO_TABLE
from gpurun.launcher.machine.helper_process import helper_argv, yield_to_others
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.report.tables_on_request import TITLES, shown_table
from gpurun.launcher.report.terminal.changes import shown_changes
from gpurun.launcher.tensorboard_plugin.timeline.format import Header, Index
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, find, with_file_names
from gpurun.launcher.tensorboard_plugin.timeline.indexing import BUILD_LIMIT_S, MAX_BUILDS
from gpurun.launcher.trace.analysis.analyse import analyse
from gpurun.launcher.trace.diff import diff_traces
from gpurun.launcher.trace.explain import capture_text
from gpurun.launcher.trace.merge import merge_traces
from gpurun.launcher.trace.model import TABLES, RankTrace, Table, TraceReport

MERGED_FILE = "merged.pt.trace.json.gz"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


class Made:
    """The files of one kind of a server, one being made at a time. Safe for threads."""

    def __init__(self, entry: str, failed: str) -> None:
        """`entry`: the body of the process, `package.module:function`, which asks `order` for its arguments;
        `failed`: begins what is said if it fails, such as `the traces can't be merged`."""
        self._entry = entry
        self._failure = failed
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._under_way: set[Path] = set()
        self._failed: dict[Path, str] = {}

    def get(self, traces: Traces, index: Index, name: str, *arguments: str) -> Path | str | None:
        """The file, or why there is none, or `None` while it is being made; asking begins that.

        Args:
            traces: what it is made from.
            index: the variant's.
            name: of the file; another one where the arguments are others.
            arguments: for the process, before the traces.
        """
        home = find(traces, index.version)
        if home is None:
            return "the traces have changed; try again"
        path, traces = home / name, of_index(traces, index.header)
        with self._lock:
            if path.is_file():
                return path
            if path in self._failed:
                return self._failed[path]
            if path not in self._under_way and len(self._under_way) < MAX_BUILDS:
                self._under_way.add(path)
                threading.Thread(target=self._make, args=(traces, path, arguments), daemon=True).start()
        return None

    def _make(self, traces: Traces, path: Path, arguments: tuple[str, ...]) -> None:
        with self._turn:
            failed = self._run(traces, path, arguments)
        with self._lock:
            self._under_way.discard(path)
            if failed:
                self._failed[path] = failed

    def _run(self, traces: Traces, path: Path, arguments: tuple[str, ...]) -> str | None:
        """Makes the file; returns what went wrong."""
        files = map(str, traces.files)
        given = (str(os.getpid()), str(path), str(traces.within), *arguments, *files)
        try:
            done = subprocess.run(
                helper_argv(self._entry, *given),
                capture_output=True,
                timeout=BUILD_LIMIT_S,
                check=False,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return f"{self._failure}: it took longer than {BUILD_LIMIT_S:.0f} s"
        lines = [line for line in done.stderr.splitlines() if line[:1].strip()]  # advice is indented
        return None if done.returncode == 0 else f"{self._failure}: {lines[-1] if lines else 'killed'}"


def of_index(traces: Traces, header: Header) -> Traces:
    """The trace files that the index shows: of a single capture, also where others have other steps."""
    shown = {Path(file).name for rank in header.ranks for file in rank.files}
    return replace(traces, files=tuple(file for file in traces.files if file.name in shown))


def order() -> tuple[Path, Path, list[str]]:
    """In such a process, which ends with its parent: the file to make, where the traces have to be, and the
    arguments."""
    parent, out, within, *arguments = sys.argv[1:]
    die_with(int(parent))
    yield_to_others()
    return Path(out), Path(within), arguments


def merges() -> Made:
    """Each variant's ranks in one trace, for Perfetto: `MERGED_FILE`."""
    entry = "gpurun.launcher.tensorboard_plugin.answers.requested:make_merged"
    return Made(entry, "the traces can't be merged")


def make_merged() -> None:
    """The body of the process that makes it."""
    out, within, traces = order()
    merge_traces([Path(each) for each in traces], out, within=(within,))


def file_name(variant: str) -> str:
    """The name of the download; in a header, so without any character that means something there."""
    return f"{_UNUSUAL.sub('-', variant)[:100] or 'trace'}.pt.trace.json.gz"


PATH: Table = "critical-path"
"""Takes longer than all others together, so it is made by itself."""
OTHERS = tuple(each for each in TABLES if each != PATH)


@dataclass(frozen=True)
class TableRequest:
    """The parameters of a request."""

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

    def get(self, traces: Traces, index: Index, wanted: TableRequest) -> TraceReport | str | None:
        """A report with the table, or why there is none, or `None` while it is being made."""
        step = "" if wanted.step is None else str(wanted.step)
        found = self._made.get(traces, index, wanted.file, ",".join(wanted.names), step)
        if not isinstance(found, Path):
            return found
        path = found if wanted.rank is None or wanted.table == PATH else of_rank(found, wanted.rank)
        if not path.is_file():  # by these files alone ranks may be others
            return NO_TABLE.format(step=wanted.step, rank=wanted.rank)
        report = msgspec.json.decode(path.read_bytes(), type=TraceReport)
        return replace(report, findings=with_file_names(report.findings, traces.files))


def of_rank(path: Path, rank: int) -> Path:
    """The file with one rank's tables, next to that with all."""
    return path.with_suffix(f".{rank}.json")


def make() -> None:
    """The body of the process that makes them: a report of all ranks, and one of each."""
    out, within, (names, step, *files) = order()
    steps = slice(int(step), int(step) + 1) if step else None
    show = frozenset(each for each in TABLES if each in names.split(","))
    analysis = analyse([Path(each) for each in files], steps, show, within=(within,))
    if PATH not in show:
        for rank, _ in analysis.ranked.digests:
            _write(of_rank(out, rank), analysis.of_rank(rank))
    _write(out, analysis.report)  # last: where it is, the others are


def _write(out: Path, report: TraceReport) -> None:
    draft = out.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(_slim(report)))
    os.replace(draft, out)


def _slim(report: TraceReport) -> TraceReport:
    """The report without what the index has already."""
    return replace(
        report, ranks=tuple(map(_slim_rank, report.ranks)), collectives=(), parallelism=(), pipeline=()
    )


def _slim_rank(rank: RankTrace) -> RankTrace:
    return replace(rank, kernels=(), ops=(), modules=(), groups=(), devices=(), in_steps=None)


def first_table(header: Header) -> Table:
    """The table to begin with: where no GPU worked, there are no kernels."""
    return "kernels" if any(rank.total.num_kernels for rank in header.ranks) else "operators"


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
    about = f"{capture_text(report)}; times in ms"
    if against is not None:
        other, base = against
        shown, about = shown_changes(diff_traces(base, report), other, label)
    else:
        shown = shown_table(report, table)
    warnings = (each.text for each in of_level(report.findings, "detail"))
    return {
        "table": table,
        "kinds": [{"key": key, "title": title} for key, title in TITLES.items()],
        "sentence": f"{label}: {about}",
        "ranks": [rank.rank for rank in header.ranks],
        "steps": sorted({step.step for rank in header.ranks for step in rank.steps}),
        "warnings": [*dict.fromkeys((*header.warnings, *warnings))],
        "tables": shown.tables,
        "notes": shown.notes,
    }
