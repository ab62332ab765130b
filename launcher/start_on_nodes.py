"""`gpurun JOB.yaml` on one of several nodes: node 0 executes the plan, the others follow it."""

import contextlib
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.launcher.errors import GpurunError, MachineError, NodesEnded, NodesError
from gpurun.launcher.machine.host import Machine, inspect_machine
from gpurun.launcher.nodes.cluster_pool import ClusterPool
from gpurun.launcher.nodes.follower import Follower, find_run
from gpurun.launcher.nodes.join import Joined, joined
from gpurun.launcher.nodes.messages import End, LogText, Run
from gpurun.launcher.nodes.node_link import LINGER_S, NodeLink
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool_per_env import WorkerPools
from gpurun.launcher.run.job import Finished, Job, carry_out, prepare, say_on_stderr
from gpurun.launcher.run.progress_line import Progress
from gpurun.launcher.rundir.files import write_bytes
from gpurun.launcher.rundir.paths import LAUNCHES, PROGRAM_FILES

_PRINTING_S = 0.5
"""How long node 0 takes to print its table after it has released the others."""
_RUN_S = 120.0
"""How long node 0 may take to plan and to open the run directory."""


def run_on_nodes(pools: WorkerPools, job: Job, flags: NodeFlags) -> Finished | None:
    """Runs this node's part. `None` on nodes other than the first, which has the results.

    Raises:
        GpurunError: the same one, with the same exit code, on every node.
    """
    machine = inspect_machine()
    with joined(job.spec, job.job_dir, flags, machine, say_on_stderr) as here:
        if here.rank == 0:
            return lead(here, pools, job, machine)
        follow(here, pools, job)
        return None


def lead(here: Joined, pools: WorkerPools, job: Job, machine: Machine) -> Finished:
    """Node 0: plans for all nodes, and executes the plan."""
    ready = prepare(job, machine, pools.get({}), here.nodes)
    pools.keep_only(ready.environments)
    with token_in(ready.run.path) as token:
        run = Run(
            str(ready.run.path.resolve()),
            str(job.job_dir),
            token,
            tuple(env for env, _ in ready.environments),
        )
        for rank in range(1, len(here.hosts)):
            here.link.send(rank, run)
        ranks = ClusterPool(pools, here.link, ready.run, len(here.hosts), say_on_stderr)
        finished = carry_out(ready, ranks, job.output, ranks.notify)
    error = finished.error
    if not isinstance(error, NodesEnded):
        with contextlib.suppress(GpurunError):  # the link itself may have failed
            here.link.announce(End(error.exit_code if error else 0, str(error) if error else ""))
    return finished


@contextmanager
def token_in(directory: Path) -> Iterator[str]:
    """A file that only nodes which share the directory can see."""
    name = f".shared-{secrets.token_hex(8)}"
    write_bytes(directory / name, b"")
    try:
        yield name
    finally:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def follow(here: Joined, pools: WorkerPools, job: Job) -> None:
    """Another node: follows node 0 until the run is over.

    Raises:
        NodesError: the run failed, or node 0 is lost.
    """
    with Progress(sys.stderr) as progress, scratch_directory(here.rank) as scratch:
        progress.say(
            f"node {here.rank} of {len(here.hosts)}; results and tables are on node 0 ({here.hosts[0]})"
        )
        try:
            run = await_run(here.link)
            pools.keep_only([(env, "") for env in run.envs])
            places = find_run(run, scratch, job.job_dir)
            relay = job.output.relay(progress.say, job.spec.logs.keep_bytes)
            follower = Follower(here.link, pools, places, progress.say, relay)
            with forwarded(lambda number: follower.pool.forward(number)):
                follower.run()
        except NodesEnded as end:
            for message in end.unread:
                if isinstance(message, LogText):
                    progress.say(message.text)
            if end.exit_code != 0:
                wait_for_node_0_exit(here.link)
                raise


def wait_for_node_0_exit(link: NodeLink) -> None:
    """Returns when node 0 has ended, or had the time to: srun ends all nodes once one ends with an error."""
    with contextlib.suppress(GpurunError):
        link.take(Run, LINGER_S)  # only the end of the connection can come, which raises
    time.sleep(_PRINTING_S)


def await_run(link: NodeLink) -> Run:
    """Where node 0 keeps the run."""
    message = link.take(Run, _RUN_S)
    if message is None:
        raise NodesError(f"node 0 ({link.hosts[0]}) did not begin the run within {_RUN_S:g} s")
    return message


@contextmanager
def scratch_directory(rank: int) -> Iterator[Path]:
    """This node's own copy of the run directory; removed when node 0 has all of it, kept if that failed.

    Node 0 doesn't get what programs have saved on this node, so that stays here too.

    Raises:
        MachineError: it can't be created.
    """
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"gpurun-node{rank}-"))
    except OSError as error:
        raise MachineError(
            f"can't create a temporary directory: {error.strerror}; name another place: TMPDIR=…"
        ) from error
    keep = False
    try:
        yield directory
    except NodesEnded:
        raise
    except NodesError as error:
        keep = any(directory.rglob("*.log"))
        kept = f"\n    the output of this node's ranks is kept in {directory}" if keep else ""
        raise type(error)(f"{error}{kept}") from error
    finally:
        if saved := [path for path in directory.glob(f"{LAUNCHES}/*/{PROGRAM_FILES}") if any(path.iterdir())]:
            say_on_stderr(f"what the program saved on this node is kept: {', '.join(map(str, saved))}")
        elif not keep:
            shutil.rmtree(directory, ignore_errors=True)
