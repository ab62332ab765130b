"""Files that are made from a variant's traces on request, by a process of its own; kept with the index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from gpurun.launcher.machine.helper_process import helper_argv, yield_to_others
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, find
from gpurun.launcher.tensorboard_plugin.timeline.indexing import BUILD_LIMIT_S, MAX_BUILDS
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.merge import merge_traces

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
        path = home / name
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
        command = helper_argv(self._entry, str(os.getpid()), str(path), *arguments, *files)
        try:
            done = subprocess.run(command, capture_output=True, timeout=BUILD_LIMIT_S, check=False, text=True)
        except subprocess.TimeoutExpired:
            return f"{self._failure}: it took longer than {BUILD_LIMIT_S:.0f} s"
        lines = done.stderr.strip().splitlines()
        return None if done.returncode == 0 else f"{self._failure}: {lines[-1] if lines else 'killed'}"


def order() -> tuple[Path, list[str]]:
    """In such a process, which ends with its parent: the file to make, and the arguments."""
    parent, out, *arguments = sys.argv[1:]
    die_with(int(parent))
    yield_to_others()
    return Path(out), arguments


class Merges:
    """A variant's ranks in one trace, for Perfetto."""

    def __init__(self) -> None:
        entry = "gpurun.launcher.tensorboard_plugin.answers.made:make_merged"
        self._made = Made(entry, "the traces can't be merged")

    def get(self, traces: Traces, index: Index) -> Path | str | None:
        """The file, or why there is none, or `None` while it is being made."""
        return self._made.get(traces, index, MERGED_FILE)


def make_merged() -> None:
    """The body of the process that makes it."""
    out, traces = order()
    merge_traces([Path(each) for each in traces], out)


def file_name(variant: str) -> str:
    """What the download is called; in a header, so without any character that means something there."""
    return f"{_UNUSUAL.sub('-', variant)[:100] or 'trace'}.pt.trace.json.gz"
