"""A command in small: `python process_front.py DIRECTORY BODY…` starts a rank per body and waits for signals.

It has the processes of the real one: front, supervisor, server, ranks; only torch is missing.
"""

import sys
from pathlib import Path

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.processes import incoming_signals
from gpurun.launcher.processes.guard import split_process
from gpurun.launcher.processes.incoming_signals import interruptible
from gpurun.launcher.processes.pool import WorkerPool
from gpurun.launcher.processes.protocol import StartRequest

GRACE_S = 0.2
incoming_signals.BURST_S = 3600.0  # on a busy machine, signals come late that are meant as those of one key
ROOT = Path(__file__).resolve().parents[3]
PYTHONPATH = f"{Path(__file__).parent}:{ROOT}:{ROOT / 'src'}"


def main(directory: str, bodies: list[str]) -> int:
    try:
        with split_process() as guard, interruptible(guard.kill_workers):
            run(WorkerPool(guard, preload=(), env={"PYTHONPATH": PYTHONPATH}), directory, bodies)
    except GpurunError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def run(pool: WorkerPool, directory: str, bodies: list[str]) -> None:
    with pool:
        try:
            pool.start([request(directory, rank, body) for rank, body in enumerate(bodies)])
            while not pool.poll(60.0):
                pass
        finally:
            pool.stop(GRACE_S)


def request(directory: str, rank: int, body: str) -> StartRequest:
    log = str(Path(directory) / "log" / f"rank{rank}.log")
    return StartRequest(rank, (directory, str(rank)), {}, log, directory, f"process_bodies:{body}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
