"""How often the launcher reports the right cause of a failure, and 200 launches that should succeed."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.timing import record, table
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.machine.process_tree import descendants, start_ticks
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.guard import split_process
from gpurun.launcher.processes.pool import TORCH, WorkerPool
from gpurun.launcher.processes.protocol import Exit, StartRequest
from gpurun.launcher.rundir.files import RunDir, write_json

TESTS = Path(__file__).resolve().parents[2] / "tests" / "integration" / "processes"
WORLD = 4
LAST_WORDS_S = 0.5
LEFT_BEHIND_S = 3.0
STATUS = {
    "raise": "raised ValueError",
    "exit": "exit code 3",
    "hard exit": "exit code 3",
    "early exit": "exit code 0",
    "kill": "SIGKILL",
    "segfault": "SIGSEGV",
    "abort": "SIGABRT",
    "memory": "OOM killer",
    "import": "raised ModuleNotFoundError",
    "two raise": "raised ValueError",
    "two kill": "SIGKILL",
    "loader-raise": "raised ValueError: Caught ValueError in DataLoader worker",
    "loader-kill": "DataLoader worker",
    "startup raise": "raised ValueError",
    "startup segfault": "SIGSEGV",
    "end exit": "exit code 3",
    "end segfault": "SIGSEGV",
}
"""The required headline by fault.

`two`: another rank fails 20 ms later; `end`: after the last collective, when all others have succeeded.
"""
CGROUP = Path("/sys/fs/cgroup/memory")


def main(failures: int = 50, runs: int = 200, kills: int = 20) -> None:
    """Writes the section "Reliability"."""
    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        split_process() as guard,
        WorkerPool(
            guard, TORCH, {"PYTHONPATH": f"{TESTS}:{TESTS.parents[2]}:{TESTS.parents[2]}/src"}
        ) as pool,
    ):
        directory = Path(name)
        gone_s: list[float] = []
        for fault in STATUS:
            if fault == "memory" and not os.access(CGROUP, os.W_OK):
                continue  # without its own cgroup the kernel might kill any process
            right, slowest_s = blame_rate(pool, directory / fault.replace(" ", "-"), fault, failures, gone_s)
            rows.append([f"a rank's {fault}: blamed right", f"{right} of {failures}", f"{slowest_s:.2f}"])
        median_s, worst_s = statistics.median(gone_s), max(gone_s)
        title = f"from a rank's death to all gone: median {median_s:.2f} s"
        within = sum(seconds <= 1.0 for seconds in gone_s)
        rows.append([title, f"{within} of {len(gone_s)} within 1 s", f"{worst_s:.2f}"])
        clean, slowest_s = clean_ends(pool, directory / "clean", runs)
        rows.append([f"{WORLD} gloo ranks end with 0", f"{clean} of {runs}", f"{slowest_s:.2f}"])
    for victim in ("front", "supervisor", "server"):
        gone, slowest_s = kill_rate(victim, kills)
        rows.append([f"SIGKILL of the {victim}: nothing left", f"{gone} of {kills}", f"{slowest_s:.3f}"])
    record("Reliability", table(["what", "right", "slowest, s"], rows))


def launch(pool: WorkerPool, directory: Path, name: str, faulty: int, fault: str) -> list[Exit]:
    """Runs a launch to its end, as the session does: other ranks may still report, then they are stopped."""
    pool.start(requests(directory, name, faulty, fault))
    exits = pool.poll(60.0)
    deadline = time.monotonic() + (LAST_WORDS_S if any(e.returncode for e in exits) else LEFT_BEHIND_S)
    while len(exits) < WORLD and time.monotonic() < deadline:
        more = pool.poll(0.05)
        exits += more
        if any(exit_.returncode for exit_ in more):
            deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
    return exits


def requests(directory: Path, name: str, faulty: int, fault: str) -> list[StartRequest]:
    run = RunDir(directory)
    write_json(run.launch_config(name), config(directory, name))
    entry = "process_bodies:all_reduce_until_fault"
    first = str(run.launch_config(name))
    return [
        StartRequest(
            rank, (first, str(rank), str(faulty), fault), {}, str(run.log(name, rank)), str(directory), entry
        )
        for rank in range(WORLD)
    ]


def config(directory: Path, name: str) -> LaunchConfig:
    return LaunchConfig(
        launch=name, run_dir=str(directory), workload="-", job_dir=str(directory), params={}, strategy="ddp",
        devices=("cpu",) * WORLD, backend="gloo", precision="fp32", seed=0, threads=1, variants=(),
        baseline=None, warmup=0, rounds=1,
    )  # fmt: skip


def blame_rate(
    pool: WorkerPool, directory: Path, fault: str, times: int, gone_s: list[float]
) -> tuple[int, float]:
    """How often rank and status are right, and the longest time from start to cause, in seconds.

    Args:
        gone_s: receives the seconds from each rank's death until all ranks are gone.
    """
    right, slowest_s = 0, 0.0
    for attempt in range(times):
        started = time.monotonic()
        faulty = attempt % WORLD
        exits = launch(pool, directory, str(attempt), faulty, fault)
        stopped_ns = time.time_ns()
        pool.stop(1.0)
        exits += pool.poll(0)
        failure = root_cause(exits, RunDir(directory).read_failures(str(attempt)), stopped_ns)
        died_ns = min(exit_.time_ns for exit_ in exits if exit_.rank == faulty)
        gone_s.append((max(exit_.time_ns for exit_ in exits) - died_ns) / 1e9)
        slowest_s = max(slowest_s, time.monotonic() - started)
        right += failure.rank == faulty and STATUS[fault] in failure.headline
        for group in CGROUP.glob("gpurun-test-*") if fault == "memory" else ():
            group.rmdir()
    return right, slowest_s


def clean_ends(pool: WorkerPool, directory: Path, times: int) -> tuple[int, float]:
    """Launches in a row in which every rank ends with 0, and the longest of them, in seconds."""
    clean, slowest_s = 0, 0.0
    for attempt in range(times):
        started = time.monotonic()
        exits = launch(pool, directory, str(attempt), 0, "none")
        clean += [exit_.returncode for exit_ in exits] == [0] * WORLD
        pool.stop(0.0)
        pool.poll(0)
        slowest_s = max(slowest_s, time.monotonic() - started)
    return clean, slowest_s


def kill_rate(victim: str, times: int) -> tuple[int, float]:
    """How often no process is left 3 s after SIGKILL, and the longest time until then, in seconds."""
    bodies = ["hold_the_gil", "leave_grandchild", "ignore_sigterm", "sleep_for_ever"]
    right, slowest_s = 0, 0.0
    for _ in range(times):
        with tempfile.TemporaryDirectory() as name:
            took_s = time_to_vanish_s(victim, Path(name), bodies)
        slowest_s = max(slowest_s, took_s)
        right += took_s < 3.0
    return right, slowest_s


def time_to_vanish_s(victim: str, directory: Path, bodies: Sequence[str]) -> float:
    """Seconds from SIGKILL until no process of a command with these ranks is left; at most 10."""
    argv = [sys.executable, str(TESTS / "process_front.py"), str(directory), *bodies]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL, start_new_session=True) as front:
        while len(list(directory.glob("ready*"))) < len(bodies):
            time.sleep(0.01)
        pids = [front.pid, *descendants(front.pid)]
        started = time.monotonic()
        subprocess.run(["kill", f"-{signal.SIGKILL}", str(pids[_POSITION[victim]])], check=True)
        while any(start_ticks(pid) is not None for pid in pids) and time.monotonic() - started < 10:
            time.sleep(0.001)
        return time.monotonic() - started


_POSITION = {"front": 0, "supervisor": 1, "server": 2}
"""Among the command's processes, parents first."""
