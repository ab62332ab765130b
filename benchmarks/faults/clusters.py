"""Every engine that runs here, on two nodes of this machine.

By hand and with `mpirun` over two network namespaces, with Slurm and Ray on clusters of their own. Needs
root, and for Ray `make engines`.
"""

import ast
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from tests.integration.command import ENGINES, write
from tests.integration.nodes.hosts import NAMES, Hosts
from tests.integration.nodes.test_mpi import AS_ROOT, OPTIONS, agent, executable
from tests.integration.nodes.test_ray import ray_of_two_nodes
from tests.slurm.cluster import NODES, SlurmCluster

JOB_S = 180.0
GPURUN = (sys.executable, "-m", "gpurun")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
Environ = Mapping[str, str]


@dataclass
class Started:
    """A job that an engine carries out."""

    processes: list[subprocess.Popen[str]]
    cancel: Callable[[], object]
    log: Path | None = None
    """What the nodes write, if not the processes."""
    finish: Callable[[], bool] | None = None
    """Waits for the end; whether all went well."""

    def end(self) -> tuple[bool, str]:
        """Whether it ended well, and what was written."""
        written = [process.communicate(timeout=JOB_S)[0] for process in self.processes]
        is_fine = all(process.returncode == 0 for process in self.processes)
        if self.finish is not None:
            is_fine = self.finish()
        return is_fine, "".join(written) + (self.log.read_text() if self.log else "")


@dataclass(frozen=True)
class Engine:
    """Starts something on two nodes."""

    second: str
    """What it calls the second node."""
    submit: Callable[[Path, Environ], Started]
    """Starts the job in the directory, as gpurun's users do."""


def spawned(argv: Sequence[str], directory: Path, env: Environ) -> subprocess.Popen[str]:
    """In a session of its own, as in a terminal of its own."""
    return subprocess.Popen(
        argv,
        cwd=directory,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def by_hand(hosts: Hosts) -> Engine:
    """The command on both nodes."""
    command = [*GPURUN, "job.yaml", "--rendezvous", f"{NAMES[0]}:29400", "--node-rank"]

    def submit(directory: Path, env: Environ) -> Started:
        nodes = [spawned([*hosts.entering(node), *command, str(node)], directory, env) for node in range(2)]
        return Started(nodes, partial(nodes[0].send_signal, signal.SIGINT))

    return Engine(NAMES[1], submit)


def mpi(name: str, hosts: Hosts, launch_agent: Path) -> Engine:
    """`mpirun` of an MPI."""
    enter = hosts.entering(0)

    def submit(directory: Path, env: Environ) -> Started:
        mpirun = executable(directory / "bin" / "mpirun", f'#!/bin/sh\nexec mpirun.{name} "$@"\n')
        options = [f"--mpirun={word}" for word in (*OPTIONS[name], str(launch_agent))]
        path = f"{mpirun.parent}:{os.environ['PATH']}"
        command = [*enter, *GPURUN, "submit", "job.yaml", "--to", "mpi", *options]
        process = spawned(command, directory, {**AS_ROOT, **env, "PATH": path})
        return Started([process], partial(os.killpg, process.pid, signal.SIGINT))

    return Engine(NAMES[1], submit)


def slurm(cluster: SlurmCluster) -> Engine:
    """A Slurm of two nodes on this machine."""

    def submit(directory: Path, env: Environ) -> Started:
        process = spawned([*GPURUN, "submit", "job.yaml", "--slurm"], directory, {**cluster.env, **env})
        said, _ = process.communicate(timeout=JOB_S)
        job_id = said.partition(" as job ")[2].partition(";")[0]

        def finish() -> bool:
            deadline = time.monotonic() + JOB_S
            while (state := cluster.state_of(job_id)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                assert time.monotonic() < deadline, f"job {job_id} is still {state}"
                time.sleep(0.1)
            return state == "COMPLETED"

        return Started([], partial(cluster.run, "scancel", job_id), directory / f"slurm-{job_id}.out", finish)

    return Engine(NODES[1], submit)


def ray(cluster: Environ) -> Engine:
    """A Ray of two nodes on this machine; `ray job stop` sends SIGTERM to the driver, too."""

    def submit(directory: Path, env: Environ) -> Started:
        known = [f"{name}={value}" for name, value in env.items()]  # actors don't inherit it
        dry_run = [*GPURUN, "submit", "job.yaml", "--to", "ray", "--dry-run"]
        text = subprocess.run(dry_run, cwd=directory, check=True, capture_output=True, text=True).stdout
        (line,) = re.findall(r"^COMMAND = .*$", text, re.MULTILINE)
        command = ["env", *known, *ast.literal_eval(line.partition(" = ")[2])]
        write(directory, "driver.py", text.replace(line, f"COMMAND = {command!r}"))
        process = spawned([str(ENGINES), "driver.py"], directory, {**cluster, **env})
        return Started([process], process.terminate)

    return Engine("node 1 (", submit)


ALL = ("by hand", "Open MPI", "MPICH", "Slurm", "Ray")


@contextmanager
def engines(names: Collection[str] = ALL) -> Iterator[dict[str, Engine]]:
    """Those of these names, each on a cluster of its own or on two hosts."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:

        @cache
        def hosts() -> Hosts:
            return stack.enter_context(Hosts(Path(place)))

        @cache
        def launch_agent() -> Path:
            return agent(Path(place), hosts())

        start: Mapping[str, Callable[[], Engine]] = {
            "by hand": lambda: by_hand(hosts()),
            "Open MPI": lambda: mpi("openmpi", hosts(), launch_agent()),
            "MPICH": lambda: mpi("mpich", hosts(), launch_agent()),
            "Slurm": lambda: slurm(stack.enter_context(SlurmCluster(Path(place) / "slurm"))),
            "Ray": lambda: ray(stack.enter_context(ray_of_two_nodes())[1]),
        }
        yield {name: start[name]() for name in names}
