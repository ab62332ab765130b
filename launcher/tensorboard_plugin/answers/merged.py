"""A variant's ranks in one trace, for Perfetto; made once by a process of its own, kept with the index."""

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

FILE = "merged.pt.trace.json.gz"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


class Merges:
    """Merged traces of a server, one being made at a time. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._under_way: set[str] = set()
        self._failed: dict[str, str] = {}

    def get(self, traces: Traces, index: Index) -> Path | str | None:
        """The file, or why there is none, or `None` while it is being made; asking begins that."""
        home = find(traces, index.version)
        if home is None:
            return "the traces have changed; try again"
        path = home / FILE
        with self._lock:
            if path.is_file():
                return path
            if str(path) in self._failed:
                return self._failed[str(path)]
            if str(path) not in self._under_way and len(self._under_way) < MAX_BUILDS:
                self._under_way.add(str(path))
                threading.Thread(target=self._make, args=(traces, path), daemon=True).start()
        return None

    def _make(self, traces: Traces, path: Path) -> None:
        with self._turn:
            failed = _run(traces, path)
        with self._lock:
            self._under_way.discard(str(path))
            if failed:
                self._failed[str(path)] = failed


def _run(traces: Traces, path: Path) -> str | None:
    """Makes the file; returns what went wrong."""
    entry = "gpurun.launcher.tensorboard_plugin.answers.merged:make"
    command = helper_argv(entry, str(os.getpid()), str(path), *map(str, traces.files))
    try:
        done = subprocess.run(command, capture_output=True, timeout=BUILD_LIMIT_S, check=False, text=True)
    except subprocess.TimeoutExpired:
        return f"merging the traces took longer than {BUILD_LIMIT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else f"the traces can't be merged: {lines[-1] if lines else 'killed'}"


def make() -> None:
    """The body of that process, which ends with its parent; its arguments: parent, file, traces."""
    parent, out, *traces = sys.argv[1:]
    die_with(int(parent))
    yield_to_others()
    merge_traces([Path(each) for each in traces], Path(out))


def file_name(variant: str) -> str:
    """What the download is called; in a header, so without any character that means something there."""
    return f"{_UNUSUAL.sub('-', variant)[:100] or 'trace'}.pt.trace.json.gz"
