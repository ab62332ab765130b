"""The store through which a program's ranks find each other, in a process that outlives every one of them.

`torchrun` keeps it in its agent; so no rank hosts it, a rank may end before the others, and the port is
taken before anybody hears of it.
"""

import signal
from collections.abc import Sequence
from pathlib import Path

from gpurun.launcher.worker.base.process_group import open_store


def main(argv: Sequence[str]) -> None:
    """Opens a store for some ranks, writes its port to a file, and stays.

    Args:
        argv: the file, the number of ranks, and the address to listen on.
    """
    path, world_size, address = argv
    store = open_store(Path(path), int(world_size), address)
    while store is not None:
        signal.pause()
