"""Reads many trace files on all cores, in separate processes: reading is bound by the interpreter."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gpurun.launcher.errors import TraceError
from gpurun.launcher.machine.helper_process import helper_argv, yield_to_others
from gpurun.launcher.trace.analysis.digest import Digest, digest_file
from gpurun.launcher.trace.kineto.trace_file import ReadLimits, allowed_bytes, size_of
from gpurun.launcher.trace.model import Table

PARALLEL_FROM_BYTES = 16 << 20
"""Bytes in total below which starting processes takes longer than reading."""
PACKED_FACTOR = 15
"""Uncompressed bytes per byte of gzip."""

Read = Digest | str
"""A file's digest, or why it can't be read."""


@dataclass(frozen=True)
class FileShare:
    """The files that one process reads."""

    files: tuple[Path, ...]
    steps: slice | None
    show: Set[Table]
    """The tables on request."""
    most_bytes: int
    """The most bytes that they may unpack to together."""
    within: Sequence[Path] = ()
    """The directories that they have to be in; see `ReadLimits`."""


def read_all(
    files: Sequence[Path],
    steps: slice | None,
    show: Set[Table] = frozenset(),
    among: Sequence[Path] = (),
    within: Sequence[Path] = (),
) -> list[Read]:
    """Each file's digest, or why it can't be read; in the order of `files`.

    Every process holds the columns of one file at a time.

    Args:
        files: the traces.
        steps: those to look at; `None`: everything.
        show: the tables on request.
        among: all traces that are read for the same answer, if these are some of them.
        within: where they have to be, as `open_file` takes it.

    Raises:
        TraceError: a process was killed.
    """
    num_processes = min(len(files), len(os.sched_getaffinity(0)))
    if num_processes < 2 or sum(map(weight, files)) < PARALLEL_FROM_BYTES:
        return read_in_turn(FileShare(tuple(files), steps, show, allowed_bytes(files, among), within))
    found: dict[Path, Read] = {}
    parts = _parts(files, num_processes)
    shares = [FileShare(part, steps, show, allowed_bytes(part, among or files), within) for part in parts]
    for share, reads in _run(shares):
        found.update(zip(share.files, reads, strict=True))
    return [found[file] for file in files]


def read_in_turn(share: FileShare) -> list[Read]:
    """Each file's digest, or why it can't be read."""
    room = ReadLimits(share.most_bytes, share.within)
    return [_read_one(file, share, room) for file in share.files]


def _read_one(file: Path, share: FileShare, room: ReadLimits) -> Read:
    try:
        return digest_file(file, share.steps, share.show, room)
    except TraceError as error:
        return str(error)


def weight(file: Path) -> int:
    """Approximate uncompressed size of the file; 0 if it doesn't exist."""
    return size_of(file) * (PACKED_FACTOR if file.suffix == ".gz" else 1)


def _parts(files: Sequence[Path], number: int) -> list[tuple[Path, ...]]:
    """The files in parts of about equal size: the largest first, each added to the smallest part."""
    parts: list[list[Path]] = [[] for _ in range(number)]
    sizes = [0] * number
    for file in sorted(files, key=weight, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(file)
        sizes[least] += max(weight(file), 1)
    return [tuple(part) for part in parts]


def _run(shares: Sequence[FileShare]) -> Iterator[tuple[FileShare, list[Read]]]:
    """Runs a process for each share; results are passed in files, so that no process waits for its reader."""
    with ExitStack() as stack:
        running = []
        for share in shares:
            answer = stack.enter_context(tempfile.TemporaryFile())
            process = stack.enter_context(_start(share, answer))
            stack.callback(process.kill)
            running.append((share, process, answer))
        for share, process, answer in running:
            if process.wait() != 0:
                raise TraceError(
                    f"a process that read {len(share.files)} traces ended with {process.returncode}, "
                    "probably out of memory; analyse fewer files at once"
                )
            answer.seek(0)
            yield share, pickle.load(answer)


def _start(share: FileShare, answer: IO[bytes]) -> subprocess.Popen[bytes]:
    """If it ends before it has read its order, its exit status says so."""
    process = subprocess.Popen(
        helper_argv("gpurun.launcher.trace.parallel:serve"), stdin=subprocess.PIPE, stdout=answer
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as order:
        pickle.dump(share, order)
    return process


def serve() -> None:
    """The body of such a process: reads a `FileShare` from stdin, writes the digests to stdout."""
    yield_to_others()
    share: FileShare = pickle.load(sys.stdin.buffer)
    pickle.dump(read_in_turn(share), sys.stdout.buffer)
