"""A variant's ranks in one trace, for Perfetto."""

from __future__ import annotations

import re
from pathlib import Path

from gpurun.launcher.tensorboard_plugin.answers.made import Made, order
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces
from gpurun.launcher.tensorboard_plugin.timeline.mapped import Index
from gpurun.launcher.trace.merge import merge_traces

FILE = "merged.pt.trace.json.gz"
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


class Merges:
    """Merged traces of a server."""

    def __init__(self) -> None:
        entry = "gpurun.launcher.tensorboard_plugin.answers.merged:make"
        self._made = Made(entry, "the traces can't be merged")

    def get(self, traces: Traces, index: Index) -> Path | str | None:
        """The file, or why there is none, or `None` while it is being made."""
        return self._made.get(traces, index, FILE)


def make() -> None:
    """The body of the process that makes it."""
    out, traces = order()
    merge_traces([Path(each) for each in traces], out)


def file_name(variant: str) -> str:
    """What the download is called; in a header, so without any character that means something there."""
    return f"{_UNUSUAL.sub('-', variant)[:100] or 'trace'}.pt.trace.json.gz"
