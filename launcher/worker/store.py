"""The store through which a program's ranks find each other, in a process that outlives every one of them.

`torchrun` keeps it in its agent; so no rank hosts it, a rank may end before the others, and the port is
taken before anybody hears of it.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

from launcher.worker.group import open_store


def main(argv: Sequence[str]) -> None:
    """Opens a store for `argv[1]` ranks, writes its port to the file `argv[0]`, and stays."""
    store = open_store(Path(argv[0]), int(argv[1]))
    while store is not None:
        signal.pause()
