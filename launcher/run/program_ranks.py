"""Launches of programs that run unchanged: what is started for one, and how it ends."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.network import LOOPBACK
from gpurun.launcher.plan.launch_config import program_order
from gpurun.launcher.plan.model import Launch, Variant
from gpurun.launcher.processes.exits import Exit
from gpurun.launcher.processes.protocol import SERVICE_RANK, StartRequest
from gpurun.launcher.run.attempts import num_restarts
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event

ENTRY = "gpurun.launcher.worker.program.rank:main"
STORE = "gpurun.launcher.worker.base.process_group:serve_store"


def begin_launch(
    spec: JobSpec, run: RunDir, variant: Variant, launch: Launch, name: str, job_dir: Path
) -> None:
    """Writes the order that the ranks of an attempt read, and says that it begins."""
    order = program_order(
        spec, variant, name, run_dir=run.path.resolve(), job_dir=job_dir, is_first=launch.repetition == 0
    )
    write_json(run.launch_config(name), order)
    append_lines(run.events(name), [Event(time.time_ns(), "start", variant.id)])


def launch_requests(
    run: RunDir, variant: Variant, launch: Launch, name: str, job_dir: Path, address: str = LOOPBACK
) -> list[StartRequest]:
    """The ranks of an attempt, and first of all the store through which they find each other.

    Args:
        address: where the store listens.
    """
    order = str(run.launch_config(name).resolve())
    port_file = str(run.rendezvous(name).resolve())
    store_log = run.log(name, 0).with_name("store.log")
    store = StartRequest(
        rank=SERVICE_RANK,
        args=(port_file, str(variant.world_size), address),
        env={},
        log=str(store_log.resolve()),
        cwd=str(job_dir),
        entry=STORE,
    )
    attempt_env = {"TORCHELASTIC_RESTART_COUNT": str(num_restarts(run, launch))}
    ranks = [
        StartRequest(
            rank=process.rank,
            args=(order, str(process.rank)),
            env=rank_env({**process.env, **attempt_env}, variant.env),
            log=str(run.log(name, process.rank).resolve()),
            cwd=str(job_dir),
            entry=ENTRY,
            control=str(run.control(name).resolve()),
            cpus=process.cpus,
        )
        for process in launch.processes
    ]
    return [store, *ranks]


def rank_env(planned: Mapping[str, str], stated: Mapping[str, str]) -> dict[str, str]:
    """The planned environment. A number of threads that the shell has set stays, unless the job says one."""
    is_theirs = "OMP_NUM_THREADS" in os.environ and "OMP_NUM_THREADS" not in stated
    return {key: value for key, value in planned.items() if not (is_theirs and key == "OMP_NUM_THREADS")}


def end_launch(run: RunDir, variant: Variant, name: str, exits: Sequence[Exit]) -> None:
    """Says that an attempt is done if every rank has ended well: no rank can know that of the others."""
    if sum(exit_.returncode == 0 for exit_ in exits) == variant.world_size:
        append_lines(run.events(name), [Event(time.time_ns(), "done", variant.id)])
