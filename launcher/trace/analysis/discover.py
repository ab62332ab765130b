"""Finds the files to read and the rank of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import TraceError
from gpurun.launcher.trace.analysis.digest import Digest
from gpurun.launcher.trace.merged_file import is_merged

SUFFIXES = (".json", ".json.gz")
OWN_FILES = frozenset(
    {
        "comparison.json",
        "facts.json",
        "host.json",
        "invocation.json",
        "launch.json",
        "plan.json",
        "spec.json",
        "status.json",
        "trace.json",
    }
)
"""JSON files of a run directory that aren't traces; skipped without a note."""
_RANK = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,9})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """Files to read, in order, and notes on skipped ones."""

    files: tuple[Path, ...]
    warnings: tuple[str, ...]


def find_traces(paths: Sequence[Path]) -> Found:
    """The files in `paths`; directories are searched recursively for `*.json` and `*.json.gz`.

    Symbolic links that lead out of a directory aren't followed. Traces merged by gpurun are skipped, since
    their ranks would count twice.

    Raises:
        TraceError: a path doesn't exist, or no file is found at all.
    """
    files: list[Path] = []
    warnings: list[str] = []
    for path in paths:
        if path.is_dir():
            _look_into(path, files, warnings)
        elif path.exists():
            files.append(path)
        else:
            raise TraceError(f"{path}: no such file or directory")
    unique = {file.resolve(): file for file in reversed(files)}
    if not unique:
        named = ", ".join(map(str, paths)) or "nothing"
        raise TraceError("\n".join([f"{named}: no traces here (looked for *.json and *.json.gz)", *warnings]))
    return Found(tuple(file for file in files if unique.get(file.resolve()) is file), tuple(warnings))


def _look_into(directory: Path, files: list[Path], warnings: list[str]) -> None:
    root = directory.resolve()
    for path in sorted(directory.rglob("*")):
        if not path.name.endswith(SUFFIXES) or path.name in OWN_FILES or path.name.startswith("."):
            continue
        try:
            inside = path.resolve().is_relative_to(root)
        except (OSError, RuntimeError):
            inside = False
        if not inside:
            warnings.append(f"{path}: symbolic link out of the directory, not followed")
        elif path.is_file() and is_merged(path):
            warnings.append(f"{path}: a merged trace of all ranks, written by gpurun; left out")
        elif path.is_file():
            files.append(path)


@dataclass(frozen=True)
class Ranked:
    """Digests with their ranks, sorted by rank, and notes on what was assumed."""

    digests: tuple[tuple[int, Digest], ...]
    warnings: tuple[str, ...]


def assign_ranks(digests: Sequence[Digest]) -> Ranked:
    """Each trace's rank: from the trace, else from its file name, else the next free number.

    If several traces have one rank, the latest is used.
    """
    warnings: list[str] = []
    taken: dict[int, Digest] = {}
    nameless: list[Digest] = []
    for digest in digests:
        rank = digest.rank
        if rank is None:
            rank = rank_in_name(digest.path.name)
            if rank is not None:
                warnings.append(
                    f"{digest.path}: doesn't state its rank; assumed to be rank {rank} by its name"
                )
        if rank is None:
            nameless.append(digest)
        else:
            _take(rank, digest, taken, warnings)
    for digest in nameless:
        rank = next(number for number in range(len(digests) + len(taken)) if number not in taken)
        taken[rank] = digest
        how = " from its position" if len(digests) > 1 else ""
        warnings.append(f"{digest.path}: doesn't state its rank; assumed to be rank {rank}{how}")
    return Ranked(tuple(sorted(taken.items(), key=lambda item: item[0])), tuple(warnings))


def _take(rank: int, digest: Digest, taken: dict[int, Digest], warnings: list[str]) -> None:
    other = taken.get(rank)
    if other is not None:
        first, last = sorted((other, digest), key=lambda each: each.base_ns + each.total.measure.start)
        warnings.append(f"{first.path}: same rank {rank} as {last.path}, which was recorded later; left out")
        digest = last
    taken[rank] = digest


def rank_in_name(name: str) -> int | None:
    """The number after `rank` or `worker` in a file name."""
    found = _RANK.search(name)
    return int(found[1]) if found else None
