"""`gpurun JOB.yaml` on one of several nodes: node 0 executes the plan, the others follow it."""

import contextlib
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpurun.launcher.errors import GpurunError, MachineError, NodesEnded, NodesError, SpecError
from gpurun.launcher.machine.helper_process import temporary_directory
from gpurun.launcher.machine.host import Machine, inspect_machine
from gpurun.launcher.nodes.cluster_pool import ClusterPool
from gpurun.launcher.nodes.follower import Follower, places_of
from gpurun.launcher.nodes.join import Joined, joined
from gpurun.launcher.nodes.messages import End, FindRooms, LogText, RoomsFound, Run
from gpurun.launcher.nodes.node_link import LINGER_S, NodeLink
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.devices import all_devices
from gpurun.launcher.plan.model import Node, Plan, node_of_device
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool import WorkerPools, say_on_stderr
from gpurun.launcher.run.attempts import num_restarts
from gpurun.launcher.run.job import Finished, Job, Prepared, carry_out, prepare
from gpurun.launcher.run.max_batch import NodeDevices, combined, find_rooms, wants_max
from gpurun.launcher.run.open import whole_record
from gpurun.launcher.run.progress_line import Progress
from gpurun.launcher.rundir.files import append_lines, write_bytes, write_json
from gpurun.launcher.rundir.paths import LAUNCHES, PROGRAM_FILES
from gpurun.launcher.rundir.records import MaxBatch, NodeRooms, Restart
from gpurun.launcher.units import format_duration

_PRINTING_S = 0.5
"""How long node 0 takes to print its table after it has released the others."""
_RUN_S = 120.0
"""How long node 0 may take to plan and to open the run directory."""
_POLL_S = 0.2
_KEPT = ".kept"
"""A file in a scratch directory that a message has named, so that it is kept."""


def run_on_nodes(pools: WorkerPools, job: Job, flags: NodeFlags) -> Finished | None:
    """Runs this node's part. `None` on nodes other than the first, which has the results.

    Raises:
        GpurunError: the same one, with the same exit code, on every node.
    """
    machine = inspect_machine()
    leader, other = Leader(pools, job, machine, flags), OtherNode(pools, job)
    with contextlib.ExitStack() as kept:
        while True:
            begun = leader.num_nodes
            try:
                with joined(
                    *(job.spec, job.job_dir, flags, machine, say_on_stderr, begun),
                    has_own_args=job.output.streams.as_torchrun,
                ) as here:
                    if here.rank != 0:
                        other.follow(here, kept)
                        return None
                    if not leader.lead(here):
                        return leader.finished
            except GpurunError as error:
                if leader.finished is not None:  # no node has come in the place of the lost one
                    return replace(leader.finished, error=error)
                if not (isinstance(error, NodesEnded) and error.starts_again):
                    raise


@dataclass
class Leader:
    """Node 0: plans for all nodes, and executes the plan; once more after a lost node is replaced."""

    pools: WorkerPools
    job: Job
    machine: Machine
    flags: NodeFlags
    ready: Prepared | None = None
    finished: Finished | None = None
    """The results from before a node was lost, and at the end."""

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes that the run has begun with."""
        return len(self.ready.plan.nodes) if self.ready else None

    def lead(self, here: Joined) -> bool:
        """Whether all nodes are to join again."""
        if self.ready is None:
            find_max = partial(self.find_max, here)
            self.ready = prepare(self.job, self.machine, self.pools.get({}), here.nodes, find_max=find_max)
        else:
            self.ready = with_nodes(self.ready, self.machine, here.nodes)
        with followed(self.ready, self.pools, here) as ranks:
            self.finished = carry_out(self.ready, ranks, self.job.output, ranks.notify)
        error = self.finished.error
        restart = self.restart(ranks.launch, error) if type(error) is NodesError else None
        if restart is not None:
            say_on_stderr(restart)
        if not isinstance(error, NodesEnded):
            text = restart or str(error or "")
            with contextlib.suppress(GpurunError):  # the link itself may have failed
                here.link.announce(End(error.exit_code if error else 0, text, restart is not None))
        return restart is not None

    def find_max(self, here: Joined) -> MaxBatch:
        """The largest batch; each node looks for what its own devices hold, all at the same time.

        Raises:
            MachineError: a device can't hold the model and one sample.
            VariantError: the workload fails for another reason, or takes too long.
            NodesError: another node has found that, or is lost.
        """
        job = self.job
        nodes = [node_of_device(name) for name in all_devices(job.spec, self.machine, here.nodes)]
        for rank in range(1, len(here.nodes)):
            here.link.send(rank, FindRooms(nodes.index(rank), len(nodes)))
        found: dict[int, NodeRooms] = {}

        def check(timeout_s: float = 0.0) -> None:
            if (answer := here.link.take(RoomsFound, timeout_s)) is not None:
                found[answer.node] = answer.found

        place, pool = NodeDevices(0, 0, len(nodes)), self.pools.get({})
        found[0] = find_rooms(job.spec, self.machine, pool, job.job_dir, say_on_stderr, place, check)
        while len(found) < len(here.nodes):
            check(_POLL_S)
        return combined(job.spec, [found[rank] for rank in range(len(found))], say_on_stderr)

    def restart(self, attempt: str, error: NodesError) -> str | None:
        """The message for a program that goes on once the lost node is back, which counts as a restart.

        `None`: it doesn't.
        """
        assert self.ready is not None
        run, spec = self.ready.run, self.job.spec
        launch = next(
            (launch for launch in self.ready.plan.launches if launch.id == attempt.partition("~")[0]), None
        )
        if launch is None or not spec.kind.runs_program:
            return None
        number = num_restarts(run, launch) + 1
        if number > spec.restarts:
            return None
        append_lines(run.restarts, [Restart(time.time_ns(), attempt, number, str(error))])
        limit = format_duration(self.flags.join_timeout_s)
        return (
            f"{error}\n"
            f"restart {number} of {spec.restarts} of {launch.id} when gpurun has started there again, "
            f"or on another machine in its place (up to {limit})"
        )


@contextmanager
def followed(ready: Prepared, pools: WorkerPools, here: Joined) -> Iterator[ClusterPool]:
    """The ranks of all nodes: the others begin to follow this one."""
    pools.keep_only(ready.environments)
    with token_in(ready.run.path) as token:
        environments = tuple(env for env, _ in ready.environments)
        run = Run(str(ready.run.path.resolve()), str(ready.job_dir), token, environments)
        for rank in range(1, len(here.hosts)):
            here.link.send(rank, run)
        yield ClusterPool(pools, here.link, ready.run, len(here.hosts), say_on_stderr)


def with_nodes(ready: Prepared, machine: Machine, nodes: Sequence[Node]) -> Prepared:
    """The run, to go on with these nodes.

    Raises:
        SpecError: their devices are not like those that it has begun with.
    """
    plan = replace(build_plan(ready.spec, machine, nodes), step_s=ready.plan.step_s)
    if layout(plan) != layout(ready.plan):
        raise SpecError("the nodes don't have the devices that this run has begun with; start a new run")
    moved = [
        f"node {rank} is {now.host}; it was {before.host} before it was lost"
        for rank, (before, now) in enumerate(zip(ready.plan.nodes, nodes, strict=True))
        if before.host != now.host
    ]
    earlier = [note for note in ready.plan.notes if note not in plan.notes]
    plan = replace(plan, notes=(*plan.notes, *earlier, *moved))
    write_json(ready.run.host, whole_record(ready.spec, plan, machine))
    write_json(ready.run.plan, plan)
    return replace(ready, plan=plan, resumed=None)


def layout(plan: Plan) -> object:
    """The variants, and the devices and the node of each rank, whichever machine that node is."""
    ranks = [
        [(process.rank, process.devices, process.node) for process in launch.processes]
        for launch in plan.launches
    ]
    return plan.variants, ranks


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


@dataclass
class OtherNode:
    """A node that follows node 0, again after another one is replaced."""

    pools: WorkerPools
    job: Job
    run_s: float = _RUN_S
    """How long node 0 may take to begin."""
    scratch: Path | None = None
    """The directory that its ranks write to, where it doesn't share node 0's."""
    follower: Follower | None = None

    def follow(self, here: Joined, kept: contextlib.ExitStack) -> None:
        """Follows node 0 until the run is over.

        Args:
            kept: holds what stays while the nodes join again.

        Raises:
            NodesEnded: the run failed, or all nodes join again.
            NodesError: node 0 is lost.
        """
        with Progress(sys.stderr) as progress:
            progress.say(
                f"node {here.rank} of {len(here.hosts)}; results and tables are on node 0 ({here.hosts[0]})"
            )
            self.scratch = self.scratch or kept.enter_context(scratch_directory())
            try:
                self.run(here, self.scratch, progress)
            except NodesEnded as end:
                for message in end.unread:
                    if isinstance(message, LogText):
                        progress.say(message.text)
                if end.starts_again:
                    progress.say(str(end))
                    if self.follower is not None:
                        self.follower.pool.stop(self.job.spec.grace_limit_s)
                if end.exit_code != 0:
                    wait_for_node_0_exit(here.link)
                    raise

    def run(self, here: Joined, scratch: Path, progress: Progress) -> None:
        """Starts and watches ranks for node 0; never returns.

        Raises:
            NodesError: the run is over, or node 0 is lost.
        """
        run = self.await_run(here, progress.say)
        self.pools.keep_only([(env, "") for env in run.envs])
        places = places_of(run, scratch, self.job.job_dir)
        relay = self.job.output.relay(progress.say, self.job.spec.logs.keep_bytes)
        follower = Follower(here.link, self.pools, places, progress.say, relay, self.job.spec.args)
        follower.streams, follower.shown = self.job.output.streams.of, self.job.output.streams.shown
        follower.goes_on_from(self.follower)
        self.follower = follower
        with forwarded(lambda number: follower.pool.forward(number), self.job.spec.ends_on_sigusr1):
            follower.run()

    def await_run(self, here: Joined, say: Callable[[str], None]) -> Run:
        """The place at which node 0 keeps the run; before, it may ask what this node's devices hold.

        Raises:
            GpurunError: node 0 doesn't begin the run, or a device can't hold the model and one sample.
        """
        spec, limit_s = self.job.spec, math.inf if wants_max(self.job.spec) else self.run_s
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if (run := here.link.take(Run, _POLL_S)) is not None:
                return run
            if (wanted := here.link.take(FindRooms, 0.0)) is not None:
                place = NodeDevices(here.rank, wanted.first, wanted.num_devices)
                check, pool = partial(here.link.take, FindRooms, 0.0), self.pools.get({})
                found = find_rooms(
                    spec, inspect_machine(), pool, self.job.job_dir, say_on_stderr, place, check
                )
                here.link.send(0, RoomsFound(here.rank, found))
        raise NodesError(f"node 0 ({here.hosts[0]}) did not begin the run within {limit_s:g} s")


def wait_for_node_0_exit(link: NodeLink) -> None:
    """Returns when node 0 has ended, or had the time to: srun ends all nodes once one ends with an error."""
    with contextlib.suppress(GpurunError):
        link.take(Run, LINGER_S)  # only the end of the connection can come, which raises
    time.sleep(_PRINTING_S)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """This node's own copy of the run directory; removed when node 0 has all of it, kept if that failed.

    Node 0 doesn't get what programs have saved on this node, so that stays here too.

    Raises:
        MachineError: it can't be created.
    """
    with contextlib.ExitStack() as made:
        try:
            directory = made.enter_context(temporary_directory("node", is_kept))
        except OSError as error:
            raise MachineError(
                f"can't create a temporary directory: {error.strerror}; name another place: TMPDIR=…"
            ) from error
        try:
            yield directory
        except NodesEnded:
            raise
        except NodesError as error:
            if not any(directory.rglob("*.log")):
                raise
            (directory / _KEPT).touch()
            kept = f"\n    the output of this node's ranks is kept in {directory}"
            raise type(error)(f"{error}{kept}") from error
        finally:
            if saved := saved_in(directory):
                say_on_stderr(f"what the program saved on this node is kept: {', '.join(map(str, saved))}")


def saved_in(scratch: Path) -> list[Path]:
    """Directories with what the program has saved."""
    return [path for path in scratch.glob(f"{LAUNCHES}/*/{PROGRAM_FILES}") if any(path.iterdir())]


def is_kept(scratch: Path) -> bool:
    """Whether its user wants what is in it, even after the command was killed."""
    return (scratch / _KEPT).exists() or bool(saved_in(scratch))
