"""The same jobs of two nodes by every engine that runs here: how many end as they should.

By hand and with `mpirun` over two network namespaces, with Slurm and Ray on clusters of their own. Needs
root, and for Ray `make engines`. SkyPilot needs machines of a cloud or a Kubernetes, so it can't run here.
"""

import datetime
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.machine.git import commit_of
from gpurun.launcher.rundir.files import append_lines, read_lines
from tests.integration.command import ENGINES, write
from tests.integration.nodes.hosts import NAMES, Hosts, await_file
from tests.integration.nodes.test_mpi import AS_ROOT, OPTIONS, agent, executable
from tests.integration.nodes.test_ray_and_skypilot import ray_of_two_nodes
from tests.slurm.cluster import NODES, SlurmCluster

KEPT = Path(__file__).with_name("engines.jsonl")
"""A line per job that was run, by any call."""
JOB_S = 180.0
LEFT_S = 20.0
"""How long processes may take to end after the command or the job has."""
GPURUN = (sys.executable, "-m", "gpurun")
TOKEN = "ENGINES_BENCHMARK"
"""A variable by which the processes of a job are known."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
Environ = Mapping[str, str]

COMPARED = """
    name: two
    workload: sleep
    params: {alpha_ms: 20, beta_ms: 20}
    devices: cpu:1
    nodes: 2
    global_batch: 8
    compare: {split: [even, [6, 2]]}
    steps: {rounds: 8}
    profile: {steps: 0}
"""
PROGRAM = """
    name: two
    script: train.py
    devices: cpu:RANKS
    nodes: 2
    profile: {steps: 0}
"""
TRAIN = """
    import time
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        if step == 3:
            open(f"began-{rank}", "w").close()
        BODY
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
"""
FAILS = "assert rank != 1 or step < 5, 'no such thing'"


@dataclass(frozen=True)
class Tried:
    """What came of one job; a line of `KEPT`."""

    engine: str
    case: str
    when: str
    commit: str
    seconds: float
    wrong: str
    """Empty: all is as it should be."""


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
    bare: Callable[[Sequence[str], int], list[str]] | None = None
    """The command that starts something so many times on each node."""
    env: Environ = field(default_factory=dict)
    """That of this command."""


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

    def bare(argv: Sequence[str], per_node: int) -> list[str]:
        slots = ",".join(f"{host}:{per_node}" for host in NAMES)
        hosts_option, _, *launching = OPTIONS[name]
        unbound = ["--bind-to", "none"] if name == "openmpi" else []
        place = [hosts_option, slots, *unbound, *launching, str(launch_agent), "-np", str(2 * per_node)]
        return [*enter, f"mpirun.{name}", *place, *argv]

    def submit(directory: Path, env: Environ) -> Started:
        mpirun = executable(directory / "bin" / "mpirun", f'#!/bin/sh\nexec mpirun.{name} "$@"\n')
        options = [f"--mpirun={word}" for word in (*OPTIONS[name], str(launch_agent))]
        path = f"{mpirun.parent}:{os.environ['PATH']}"
        command = [*enter, *GPURUN, "submit", "job.yaml", "--to", "mpi", *options]
        process = spawned(command, directory, {**AS_ROOT, **env, "PATH": path})
        return Started([process], partial(os.killpg, process.pid, signal.SIGINT))

    return Engine(NAMES[1], submit, bare, AS_ROOT)


def slurm(cluster: SlurmCluster) -> Engine:
    """A Slurm of two nodes on this machine."""

    def bare(argv: Sequence[str], per_node: int) -> list[str]:
        return ["srun", "--nodes=2", f"--ntasks-per-node={per_node}", *argv]

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

    return Engine(NODES[1], submit, bare, cluster.env)


def ray(cluster: Environ) -> Engine:
    """A Ray of two nodes on this machine; `ray job stop` sends SIGTERM to the driver, too."""

    def submit(directory: Path, env: Environ) -> Started:
        command = [*GPURUN, "submit", "job.yaml", "--to", "ray", "--dry-run"]
        text = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout
        known = "".join(f"'{name}={value}', " for name, value in env.items())  # actors don't inherit it
        write(directory, "driver.py", text.replace("COMMAND = [", f"COMMAND = ['env', {known}", 1))
        process = spawned([str(ENGINES), "driver.py"], directory, {**cluster, **env})
        return Started([process], process.terminate)

    return Engine("node 1 (", submit)


@contextmanager
def engines() -> Iterator[dict[str, Engine]]:
    """Those that run here, by name."""
    with (
        tempfile.TemporaryDirectory() as name,
        ray_of_two_nodes() as (_, ray_env),
        Hosts(Path(name)) as hosts,
        SlurmCluster(Path(name) / "slurm") as cluster,
    ):
        launch_agent = agent(Path(name), hosts)
        yield {
            "by hand": by_hand(hosts),
            "Open MPI": mpi("openmpi", hosts, launch_agent),
            "MPICH": mpi("mpich", hosts, launch_agent),
            "Slurm": slurm(cluster),
            "Ray": ray(ray_env),
        }


def check_compared(engine: Engine, directory: Path, env: Environ) -> str:
    """A comparison: both splits are measured, the uneven one is slower, gradients agree."""
    write(directory, "job.yaml", COMPARED)
    is_fine, said = engine.submit(directory, env).end()
    if not is_fine:
        return said[-2000:]
    (path,) = (directory / "runs" / "two").glob("*/comparison.json")
    comparison = json.loads(path.read_text())
    even, uneven = comparison["variants"]
    found = [(one["status"], one["vs_baseline"]["verdict"], one["split"]) for one in (even, uneven)]
    wanted = [("ok", "baseline", [4, 4]), ("ok", "slower", [6, 2])]
    error = max(one["gradient_error"] for one in (even, uneven))
    return "" if found == wanted and error < 1e-5 else f"{found}, gradient error {error}"


def check_failed(engine: Engine, directory: Path, env: Environ) -> str:
    """Rank 1, on the second node, raises."""
    program(directory, FAILS)
    is_fine, said = engine.submit(directory, env).end()
    words = "rank 1 raised AssertionError: no such thing"
    return "" if words in said and not is_fine else said[-2000:]


def check_cancelled(engine: Engine, directory: Path, env: Environ) -> str:
    """The engine's own way to cancel: Ctrl-C, `scancel`."""
    return _ended_early(engine, directory, env, lambda started: started.cancel(), "")


def check_killed(engine: Engine, directory: Path, env: Environ) -> str:
    """SIGKILL to gpurun on the second node, which whatever reports the failure names."""
    return _ended_early(engine, directory, env, lambda _: kill_second(env[TOKEN]), engine.second)


def _ended_early(
    engine: Engine, directory: Path, env: Environ, end: Callable[[Started], object], words: str
) -> str:
    program(directory, "time.sleep(1)")
    started = engine.submit(directory, env)
    for rank in range(2):
        await_file(directory / f"began-{rank}")
    end(started)
    is_fine, said = started.end()
    return "" if not is_fine and words in said else said[-2000:]


def program(directory: Path, body: str, per_node: int = 1) -> None:
    """A job whose program does this in every step."""
    write(directory, "train.py", textwrap.dedent(TRAIN).replace("BODY", body))
    write(directory, "job.yaml", textwrap.dedent(PROGRAM).replace("RANKS", str(per_node)))


def kill_second(token: str) -> None:
    """SIGKILL to gpurun on the second node: to its first process, whose ranks and supervisor must follow."""
    os.kill(min(pid for pid in processes_of(token) if _is_second(pid)), signal.SIGKILL)


def _is_second(pid: int) -> bool:
    words, variables = _arguments(pid), dict(each.partition("=")[::2] for each in _environment(pid))
    if not any(word.endswith("job.yaml") for word in words):
        return False
    if "--node-rank" in words:
        return words[words.index("--node-rank") + 1] == "1"
    return next((variables[name] for name in RANKS if name in variables), "") == "1"


def _arguments(pid: int) -> list[str]:
    return _words(pid, "cmdline")


def _environment(pid: int) -> list[str]:
    return _words(pid, "environ")


def _words(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").split("\0")
    except OSError:
        return []


def processes_of(token: str) -> list[int]:
    """All that have the variable."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return [pid for pid in numbers if f"{TOKEN}={token}" in _environment(pid)]


CASES = {
    "same comparison": check_compared,
    "failed rank named": check_failed,
    "cancelled": check_cancelled,
    "node killed": check_killed,
}


def try_case(name: str, engine: Engine, case: str) -> Tried:
    """One job, and what it left behind."""
    began_s, token = time.monotonic(), secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as directory:
        try:
            wrong = CASES[case](engine, Path(directory), {TOKEN: token})
        except (AssertionError, subprocess.TimeoutExpired) as error:  # it took too long
            wrong = str(error)
        deadline = time.monotonic() + LEFT_S
        while (left := processes_of(token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:  # so that the next case doesn't meet them
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wrong = f"left behind: {[_arguments(pid) for pid in left]}" if left and not wrong else wrong
    when = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    return Tried(name, case, when, (commit_of(Path()) or "")[:7], time.monotonic() - began_s, wrong)


def main(times: int = 1) -> None:
    """Each case so many times by each engine, in turn, and the section "Engines" of all so far."""
    facts = machine_facts()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    with engines() as found:
        for _ in range(times):
            for name, engine in found.items():
                for case in CASES:
                    append_lines(KEPT, [try_case(name, engine, case)])
    record("Engines", text_of(list(read_lines(KEPT, Tried))), facts)


def text_of(tried: Sequence[Tried]) -> str:
    """Right of how many, by engine and case; and what was wrong."""
    names = list(dict.fromkeys(one.engine for one in tried))
    rows = [[name, *(_score(tried, name, case) for case in CASES)] for name in names]
    wrong = [
        f"- {one.engine}, {one.case}, at {one.commit}: {' '.join(one.wrong.split())[-300:]}"
        for one in tried
        if one.wrong
    ]
    commits = ", ".join(dict.fromkeys(one.commit for one in tried))
    text = (
        "The same jobs of two nodes by each engine. Same comparison: both splits are measured, 6/2 is "
        "slower, gradients agree. Failed rank: the report names rank 1 and its error. Cancelled: by Ctrl-C, "
        "`scancel`, or SIGTERM to Ray's driver, as `ray job stop` sends it. Node killed: "
        "SIGKILL to gpurun on the second node, which is named. In all of them no "
        f"process is left. `python -m benchmarks engines --times N` adds to these; so far at "
        f"{commits}. SkyPilot can't run here: it needs machines of a cloud, or a Kubernetes.\n\n"
    )
    return "\n".join([text + table(["engine", *CASES], rows), "", *wrong])


def _score(tried: Sequence[Tried], engine: str, case: str) -> str:
    found = [one for one in tried if (one.engine, one.case) == (engine, case)]
    return f"{sum(not one.wrong for one in found)} of {len(found)}"
