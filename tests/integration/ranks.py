"""Runs `main(rank, directory)` of a module in processes that share one import of torch."""

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import forkserver

TIMEOUT_S = 180


def run_ranks(module: str, num_ranks: int, directory: Path) -> None:
    """`python -m tests.integration.ranks MODULE NUM_RANKS DIRECTORY`; fails with what the ranks said."""
    argv = (__name__, module, str(num_ranks), str(directory))
    family = forkserver.start(
        *argv, cwd=forkserver.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = family.communicate(timeout=TIMEOUT_S)
    finally:
        if family.poll() is None:
            os.killpg(family.pid, signal.SIGKILL)
            family.communicate()
    assert family.returncode == 0, said


@contextmanager
def in_group(rank: int, world_size: int, directory: Path, **options: Any) -> Iterator[None]:
    """With a rank's process group of gloo, which ends when all ranks are done."""
    dist = importlib.import_module("torch.distributed")
    store = dist.FileStore(str(directory / f"store{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, **options)
    yield
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def main(module: str, num_ranks: int, directory: Path) -> int:
    """The ranks' parent: 0 if all of them end well; if one fails, the others are ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    importlib.import_module("torch._dynamo")  # which every optimizer imports
    importlib.import_module("torch").set_num_threads(1)
    body = importlib.import_module(module).main
    forkserver.collect_seldom()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=body, args=(rank, directory)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    running = list(ranks)
    while running and not any(rank.exitcode for rank in ranks):
        multiprocessing.connection.wait([rank.sentinel for rank in running])
        running = [rank for rank in running if rank.exitcode is None]
    for rank in running:
        rank.kill()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
