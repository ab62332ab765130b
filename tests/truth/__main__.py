"""`python -m tests.truth SESSION.json`: forks the ranks and the link of a session, and waits for them.

A process of its own: it imports torch once for all of them, and they are forked while it has no threads.
"""

import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.rundir.files import read_json
from gpurun.launcher.worker.base.exit import finish
from tests.truth.plan import Session
from tests.truth.rank import run_link, run_rank


def main(path: Path) -> int:
    """The first exit code that isn't 0, when all have ended or been ended."""
    session = read_json(path, Session)
    context = multiprocessing.get_context("fork")
    members = [
        context.Process(target=member, args=(session, rank, os.getpid()))
        for rank in range(session.world_size + 1)
    ]
    for process in members:
        process.start()
    alive = {process.sentinel: process for process in members}
    code = 0
    while alive and not code:
        for sentinel in wait(list(alive)):
            process = alive.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            code = code or process.exitcode or 0
    for process in alive.values():
        process.kill()
        process.join()
    return code


def member(session: Session, rank: int, parent: int) -> None:
    """One rank, or after the last one the link; ends without gloo's destructors, as our ranks do."""
    die_with(parent)
    try:
        if rank == session.world_size:
            run_link(session)
        else:
            run_rank(session, rank)
    except BaseException:
        traceback.print_exc()
        finish(1)
    finish(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
