"""Builds the index of one variant: reads each rank's trace, matches the ranks, writes the columns."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import msgspec

from gpurun.launcher.errors import TraceError
from gpurun.launcher.findings.finding import Finding, noticed, of_level
from gpurun.launcher.machine.helper_process import yield_to_others
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.tensorboard_plugin.timeline.format import (
    FORMAT,
    INDEX_FILE,
    Header,
    StepSpan,
    UnreadableFile,
)
from gpurun.launcher.tensorboard_plugin.timeline.index.rank_draft import RankDraft, draft
from gpurun.launcher.tensorboard_plugin.timeline.index.writer import Writer, facts
from gpurun.launcher.tensorboard_plugin.timeline.index_store import with_file_names
from gpurun.launcher.tensorboard_plugin.timeline.mapped import MAX_HEADER_BYTES
from gpurun.launcher.trace.analysis.analyse import Analysis, combine
from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.collective import Collective
from gpurun.launcher.trace.analysis.digest import Digest, digest
from gpurun.launcher.trace.explain import last_rank
from gpurun.launcher.trace.kineto.read_trace import read_trace
from gpurun.launcher.trace.kineto.trace_file import ReadLimits
from gpurun.launcher.trace.parallel import PARALLEL_FROM_BYTES, weight
from gpurun.launcher.units import format_count

MAX_WORKERS = 4
"""Each holds one trace's columns, 80 bytes per event."""

Span = tuple[int, int]
Report = Callable[[int, int, int], None]
"""Called with the number of a file, how many of its bytes have been read, and how many they unpacked to."""


@dataclass(frozen=True)
class DraftFile:
    """A worker's result for one trace; its entries are in a file, since they are large."""

    digest: Digest
    path: Path
    first_ns: int
    last_ns: int

    def span(self, realigned: Realigned) -> Span:
        """First start and last end in ns, on another clock."""
        return realigned.time_ns(self.first_ns), realigned.time_ns(self.last_ns)


def build(files: Sequence[Path], within: Path, directory: Path, report: Report) -> None:
    """Writes the index of `files`, one per rank, into `directory`, which is empty.

    `within`: where the files have to be when they are opened.

    Raises:
        BrokenTraces: none of them can be read, or their index would be too large to be opened.
        OSError: the disk is full.
    """
    found = _read_all(files, ReadLimits(within=(within,)), directory, report)
    problems = tuple(each for each in found if isinstance(each, UnreadableFile))
    drafts = {each.digest.path: each for each in found if isinstance(each, DraftFile)}
    if not drafts:
        raise BrokenTraces(problems)
    analysis = combine([each.digest for each in drafts.values()])
    header = _write(analysis, drafts, directory, problems)
    content = msgspec.json.encode(header)
    if len(content) > MAX_HEADER_BYTES:
        text = (
            "too many names, threads and collectives for a timeline:"
            f" {format_count(len(content))} bytes to describe them"
        )
        raise BrokenTraces(
            (*problems, UnreadableFile(files[0].parent.name, None, f"{text}; trace fewer steps"))
        )
    (directory / INDEX_FILE).write_bytes(content)


class BrokenTraces(Exception):
    """No trace of the variant can be read."""

    def __init__(self, problems: tuple[UnreadableFile, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


def _read_all(
    files: Sequence[Path], room: ReadLimits, directory: Path, report: Report
) -> list[DraftFile | UnreadableFile]:
    workers = min(len(files), MAX_WORKERS, len(os.sched_getaffinity(0)))
    if workers < 2 or sum(map(weight, files)) < PARALLEL_FROM_BYTES:
        return [_read(number, file, room, directory, report) for number, file in enumerate(files)]
    with ProcessPoolExecutor(workers, get_context("spawn"), die_with, (os.getpid(),)) as pool:
        tasks = [
            pool.submit(_read, number, file, room, directory, report) for number, file in enumerate(files)
        ]
        return [task.result() for task in tasks]


def _read(
    number: int, file: Path, room: ReadLimits, directory: Path, report: Report
) -> DraftFile | UnreadableFile:
    """One file's digest and draft; runs in a worker."""
    try:
        trace = read_trace(file, lambda read, unpacked: report(number, read, unpacked), room=room)
        digested = digest(trace, file, None)
    except TraceError as error:
        return problem(file, str(error))
    made = draft(trace)
    path = directory / f"draft{number}"
    with path.open("wb") as target:
        pickle.dump(made, target, protocol=5)
    windows = [scope.measure for scope in (digested.total, *digested.steps)]
    first_ns = int(made.entries.start.min(initial=min(each.start for each in windows)))
    last_ns = int(made.entries.end.max(initial=max(each.end for each in windows)))
    return DraftFile(digested, path, first_ns, last_ns)


def problem(file: Path, message: str) -> UnreadableFile:
    """The problem of a file, without the path of its directory."""
    text = message.replace(f"{file}: ", "").replace(str(file), file.name)
    byte = re.search(r"byte ([\d,]+)", text)
    return UnreadableFile(file.name, int(byte[1].replace(",", "")) if byte else None, text)


def _write(
    analysis: Analysis, drafts: dict[Path, DraftFile], directory: Path, problems: tuple[UnreadableFile, ...]
) -> Header:
    ranked = [(rank, drafts[found.path]) for rank, found in analysis.ranked.digests]
    clocks = analysis.matched.clocks
    spans = {rank: each.span(clocks.realigned(rank, each.digest.base_ns, 0)) for rank, each in ranked}
    base_ns = min(start for start, _ in spans.values())
    is_apart = recorded_apart(list(spans.values()), analysis.matched.collectives)
    zeros = {rank: span[0] if is_apart else base_ns for rank, span in spans.items()}
    steps: list[StepSpan] = []
    end_ns = 0
    parallelism = [each.parallelism for each in analysis.report.collectives]
    with Writer(directory, analysis.matched, parallelism) as writer:
        for rank, each in ranked:
            realigned = clocks.realigned(rank, each.digest.base_ns, zeros[rank])
            writer.add(rank, _load(each.path), realigned)
            steps += _steps(rank, each.digest, realigned)
            end_ns = max(end_ns, realigned.time_ns(each.last_ns))
    for each in drafts.values():
        each.path.unlink()
    return Header(
        format=FORMAT,
        base_time_ns=base_ns,
        end_ns=end_ns,
        num_events=writer.num_events,
        num_entries=writer.num_entries,
        num_level_blocks=writer.num_level_blocks,
        num_parts=writer.num_parts,
        moments=writer.moments,
        names=tuple(writer.names),
        lanes=tuple(writer.lanes),
        steps=tuple(steps),
        collectives=facts(analysis.report.collectives),
        ranks=analysis.report.ranks,
        straggler=last_rank(analysis.report),
        warnings=tuple(each.text for each in _notes(analysis, writer.num_hidden, is_apart)),
        problems=problems,
        conclusion=analysis.report.conclusion,
        apart=is_apart,
        linked=not analysis.matched.clocks.unlinked,
        parallelism=analysis.report.parallelism,
        pipeline=analysis.report.pipeline,
    )


def recorded_apart(spans: Sequence[Span], collectives: Sequence[Collective]) -> bool:
    """Whether traces have no moment and no collective in common: on one clock they would be too far apart to
    be seen.

    Args:
        spans: first start and last end of each rank, in ns on one clock.
        collectives: of all ranks.
    """
    ordered = sorted(spans)
    disjoint = all(end < start for (_, end), (start, _) in itertools.pairwise(ordered))
    return len(ordered) > 1 and disjoint and all(len(each.parts) < 2 for each in collectives)


def _load(path: Path) -> RankDraft:
    with path.open("rb") as source:
        made: RankDraft = pickle.load(source)  # our own, from this build's directory
    return made


def _steps(rank: int, found: Digest, realigned: Realigned) -> list[StepSpan]:
    return [
        StepSpan(rank, scope.step, *map(realigned.time_ns, (scope.measure.start, scope.measure.end)))
        for scope in found.steps
        if scope.step is not None and scope.position is not None
    ]


def _notes(analysis: Analysis, num_hidden: int, is_apart: bool) -> Iterator[Finding]:
    files = [found.path for _, found in analysis.ranked.digests]
    yield from with_file_names(of_level(analysis.report.findings, "detail"), files)
    if is_apart:
        yield noticed("no-common-moment")
    if num_hidden:
        yield noticed("nested-too-deeply", num_ranges=num_hidden)


class Order(msgspec.Struct, frozen=True):
    """The index to build, as JSON on stdin."""

    parent: int
    """Process id of the server."""
    files: tuple[str, ...]
    within: str
    """The directory in which they have to be."""
    directory: str
    """An empty directory for the index."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line on stdout."""

    file: int = -1
    position: int = 0
    """Bytes of that file that have been read."""
    unpacked: int = 0
    """How many they unpacked to."""
    problems: tuple[UnreadableFile, ...] = ()
    """The last line if no trace can be read."""
    done: bool = False
    """The last line if the index was built."""


def main() -> None:
    """Builds the index described on stdin; progress and outcome go to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    die_with(order.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the server, which ends this process
    yield_to_others()
    try:
        build(
            [Path(file) for file in order.files], Path(order.within), Path(order.directory), report_position
        )
    except BrokenTraces as error:
        _report(News(problems=error.problems))
    else:
        _report(News(done=True))


def report_position(file: int, position: int, unpacked: int) -> None:
    """Also called in this process's workers; writes this short are atomic in a pipe."""
    _report(News(file=file, position=position, unpacked=unpacked))


def _report(news: News) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(news) + b"\n")
