"""The process that builds an index: it may take gigabytes and minutes, and a damaged trace may crash it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.tensorboard_plugin.timeline.format import Problem
from gpurun.launcher.tensorboard_plugin.timeline.index.build import BrokenTraces, build


class Order(msgspec.Struct, frozen=True):
    """What is to be built, as JSON on stdin."""

    parent: int
    """Process id of the server."""
    files: tuple[str, ...]
    folder: str
    """An empty one, for the index."""


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line on stdout."""

    file: int = -1
    position: int = 0
    """Bytes of that file that have been read."""
    problems: tuple[Problem, ...] = ()
    """The last line, where no trace can be read."""
    done: bool = False
    """The last line, where all went well."""


def main() -> None:
    """Builds what stdin orders; progress and outcome go to stdout."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    die_with(order.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C means the server, which ends us
    os.nice(5)
    try:
        build([Path(file) for file in order.files], Path(order.folder), tell_position)
    except BrokenTraces as error:
        _tell(News(problems=error.problems))
    else:
        _tell(News(done=True))


def tell_position(file: int, position: int) -> None:
    """Also called in this process's own workers; lines this short are never mixed in a pipe."""
    _tell(News(file=file, position=position))


def _tell(news: News) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(news) + b"\n")
