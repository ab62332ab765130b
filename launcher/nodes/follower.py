"""Nodes other than the first: they start ranks for node 0, and send it exits and files."""

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpurun.launcher.inspect.requests import ring, write_request
from gpurun.launcher.inspect.snapshot import RankSnapshot
from gpurun.launcher.logs.relay import LogTail, Relay
from gpurun.launcher.nodes.messages import (
    Ack,
    Exits,
    LogText,
    Message,
    Port,
    PreloadModules,
    RankKind,
    RequestWritten,
    Run,
    Settle,
    Settled,
    SnapshotRequest,
    Snapshots,
    StartRanks,
    StepCounts,
    Stop,
    Stopped,
    TracesWanted,
)
from gpurun.launcher.nodes.node_link import NodeLink
from gpurun.launcher.nodes.transfer import Outbox
from gpurun.launcher.processes.pool import Pools, RankPool
from gpurun.launcher.processes.protocol import PROGRAM_ENTRY, WORKER_ENTRY, Exit, StartRequest
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, leave, read_states
from gpurun.launcher.rundir.files import RunDir, write_bytes, write_json
from gpurun.launcher.rundir.rank_files import ERROR_FILE, write_error

ENTRIES: Mapping[RankKind, str] = {"workload": WORKER_ENTRY, "program": PROGRAM_ENTRY}
"""The only code that node 0 can start here."""
_POLL_S = 0.05
_WAIT_S = 1.0
_SHOW_EVERY_S = 0.2
"""Longer than a rank takes from its last output to its end."""
_STEPS_EVERY_S = 1.0
"""How often node 0 gets the number of completed steps."""


@dataclass(frozen=True)
class Places:
    """The places of node 0's directories on this node."""

    run: Path
    """The shared run directory, or `scratch`."""
    scratch: Path
    """This node's own."""
    job_dir: Path
    leaders_run: str
    leaders_job_dir: str

    @property
    def is_shared(self) -> bool:
        """Whether this node writes into node 0's run directory."""
        return self.run != self.scratch

    def launch_config(self, name: str) -> Path:
        """Always this node's own: its content differs from node to node."""
        return RunDir(self.scratch).launch_config(name)

    def translate(self, text: str, name: str) -> str:
        """A path of node 0 as it is on this node; any other text is unchanged."""
        moved: Mapping[str, Path] = {
            str(RunDir(Path(self.leaders_run)).launch_config(name)): self.launch_config(name),
            self.leaders_run: self.run,
            self.leaders_job_dir: self.job_dir,
        }
        for theirs, ours in moved.items():
            if text == theirs or text.startswith(f"{theirs}/"):
                return f"{ours}{text[len(theirs) :]}"
        return text


@dataclass
class Follower:
    """A node that follows node 0."""

    link: NodeLink
    pools: Pools
    places: Places
    say: Callable[[str], None]
    relay: Relay | None = None
    """Shows the output of this node's ranks; `None`: it is not shown."""
    args: tuple[str, ...] = ()
    """The program's arguments in this node's own line of torchrun."""
    streams: Callable[[Mapping[str, str], str], Mapping[str, str]] = lambda *_: {}
    """The fields of a program's rank's request that are this node's own, by its environment and log."""
    shown: Callable[[Sequence[StartRequest]], Sequence[LogTail]] = lambda _: ()
    """Files of this node's ranks that are shown besides their logs."""
    attempt: int = 0
    name: str = ""
    ranks: frozenset[int] = frozenset()
    """The ranks of this node, in this attempt."""
    failure: Exit | None = None
    """How the first of them has ended that failed."""
    error_files: Mapping[int, str] = field(default_factory=dict)
    """Where torch's `record` writes why a function has failed, of a program's ranks."""
    settling: Settle | None = None
    """All ranks have ended well, and node 0 waits for what they have left."""
    traces: frozenset[Path] = frozenset()
    """The traces that its ranks will write, and that node 0 lacks."""
    steps: tuple[int, ...] = ()
    """Completed steps of its ranks, as last reported to node 0."""
    reported_s: float = 0.0
    shown_s: float = 0.0
    pool: RankPool = field(init=False)
    outbox: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self.pool = self.pools.get({})
        self.outbox = Outbox(self.places.run, self.link.rank)

    def goes_on_from(self, before: "Follower | None") -> None:
        """This node has joined the run before, and has sent some of its files."""
        if before is not None and before.places.run == self.places.run:
            self.outbox = before.outbox
            self.outbox.join_again()

    def run(self) -> None:
        """Never returns.

        Raises:
            NodesEnded: the run is over.
            NodesError: node 0 is lost.
        """
        try:
            while True:
                for message in self.link.poll(_POLL_S):
                    self.handle(message)
                self.report_exits()
                self.settle()
                self.report_steps()
                self.send_traces()
                self.show_lines()
        finally:
            self.pass_error_on()

    def handle(self, message: Message) -> None:
        """Does what node 0 requests."""
        if isinstance(message, LogText):
            self.say(message.text)
        elif isinstance(message, PreloadModules):
            self.pool.preload(message.modules, message.if_harmless)
        elif isinstance(message, StartRanks):
            self.launch(message)
        elif isinstance(message, Port):
            write_bytes(RunDir(self.places.run).rendezvous(self.name), message.content)
        elif isinstance(message, SnapshotRequest):
            self.link.send(0, Snapshots(message.attempt, self.link.rank, self.snapshots()))
        elif isinstance(message, TracesWanted):
            self.take_traces(message)
        elif isinstance(message, Stop):
            self.stop(message)
        elif isinstance(message, Settle):
            self.settling = message

    def launch(self, message: StartRanks) -> None:
        """Starts this node's ranks, with its own paths."""
        self.attempt, self.name = message.attempt, message.name
        self.failure, self.steps, self.traces = None, (), frozenset()
        config = msgspec.json.decode(message.config, type=dict[str, Any])
        own = config | {"run_dir": str(self.places.run), "job_dir": str(self.places.job_dir)}
        if self.relay is not None and self.relay.as_torchrun:
            own["args"] = self.args
        write_json(self.places.launch_config(self.name), own)
        requests = [self.translated(request, ENTRIES[message.kind]) for request in message.requests]
        self.ranks = frozenset(request.rank for request in requests)
        self.error_files = {request.rank: request.env.get(ERROR_FILE, "") for request in requests}
        if self.relay is not None:
            logs = {request.rank: Path(request.log) for request in requests}
            self.relay.follow(logs, more=self.shown(requests))
        self.pool = self.pools.get(message.env)
        self.pool.start(requests)

    def translated(self, request: StartRequest, entry: str) -> StartRequest:
        """The request with this node's paths and its own way into the program."""
        places = self.places
        log, env = places.translate(request.log, self.name), dict(request.env)
        if ERROR_FILE in env:
            env[ERROR_FILE] = places.translate(env[ERROR_FILE], self.name)
        return msgspec.structs.replace(
            request,
            **{"env": env, **(self.streams(env, log) if entry == PROGRAM_ENTRY else {})},
            entry=entry,
            args=tuple(places.translate(text, self.name) for text in request.args),
            log=log,
            cwd=places.translate(request.cwd, self.name),
            control=places.translate(request.control, self.name),
        )

    def report_exits(self) -> None:
        """Reports at once which ranks have ended: the number of the message shows which was first."""
        if exits := self.pool.poll(0.0):
            self.note_failure(exits)
            self.link.send(0, Exits(self.attempt, self.link.rank, tuple(exits)))

    def note_failure(self, exits: Sequence[Exit]) -> None:
        """Keeps which rank was the first to fail here."""
        failed = [exit_ for exit_ in exits if exit_.returncode]
        if failed and self.failure is None:
            self.failure = min(failed, key=lambda exit_: exit_.time_ns)

    def pass_error_on(self) -> None:
        """Writes its error where this command's environment says, as torchrun does on each node."""
        is_asked = ERROR_FILE in os.environ and self.relay is not None and self.relay.as_torchrun
        if self.failure is not None and is_asked:
            written = self.error_files.get(self.failure.rank, "")
            write_error(written, os.environ[ERROR_FILE], self.failure.returncode)

    @property
    def control(self) -> Path:
        """Directory of this node's control blocks; where the run directory is shared, of all nodes'."""
        return RunDir(self.places.run).control(self.name)

    def report_steps(self) -> None:
        """Reports completed steps now and then: node 0 checks whether any rank still completes steps."""
        now_s = time.monotonic()
        if not self.ranks or now_s - self.reported_s < _STEPS_EVERY_S:
            return
        self.reported_s = now_s
        states = read_states(self.control)
        steps = tuple(states[rank].steps for rank in sorted(self.ranks & states.keys()))
        if steps != self.steps:
            self.steps = steps
            self.link.send(0, StepCounts(self.attempt, self.link.rank, steps))

    def show_lines(self) -> None:
        """Shows the ranks' output; after a failure only as torchrun: others report their lost peer."""
        if self.relay is None or time.monotonic() - self.shown_s < _SHOW_EVERY_S:
            return
        if self.failure is not None and not self.relay.as_torchrun:
            return
        self.shown_s = time.monotonic()
        self.relay.look()

    def snapshots(self) -> tuple[RankSnapshot, ...]:
        """Snapshots of this node's ranks."""
        return tuple(snapshot for snapshot in self.pool.observe(self.control) if snapshot.rank in self.ranks)

    def take_traces(self, message: TracesWanted) -> None:
        """Writes a request of `gpurun capture`, or lets this node's ranks know of it."""
        wanted, problem = message.request, ""
        try:
            with ControlDir(self.control) as control:
                if not self.ranks <= control.running().keys():
                    raise OSError(errno.EAGAIN, NOT_STARTED)
                write_request(control, wanted)
                if message.rings:
                    ring(control, wanted.number, self.ranks)
        except OSError as error:
            problem = f"node {self.link.rank} ({self.link.own_host}): {error.strerror}"
        if not message.rings:
            self.link.send(0, RequestWritten(message.attempt, self.link.rank, problem))
        elif not problem and not self.places.is_shared:
            run, recorded = RunDir(self.places.run), self.ranks.intersection(wanted.ranks or self.ranks)
            self.traces |= {run.captured_trace(self.name, wanted.number, rank) for rank in recorded}

    def send_traces(self) -> None:
        """Sends what `gpurun capture` waits for on node 0, once it is written."""
        if self.traces and all(path.exists() for path in self.traces):
            self.traces = frozenset()
            self.send_files()

    def settle(self) -> None:
        """Waits for the processes that this node's ranks have left, or lets them go on."""
        settling, say = self.settling, lambda text: self.link.send(0, LogText(text))
        if settling is not None and self.pool.has_settled(say, settling.waits):
            self.settling = None
            self.link.send(0, Settled(self.attempt, self.link.rank))

    def stop(self, message: Stop) -> None:
        """Ends the ranks, and sends their files."""
        self.settling = None
        self.report_exits()
        self.pool.stop(message.grace_s, message.signals)
        exits = tuple(self.pool.poll(0.0))
        self.note_failure(exits)
        if self.relay is not None and (self.relay.as_torchrun or self.failure is None):
            self.relay.finish()
        if not self.places.is_shared:
            leave(self.control)
            self.send_files()
        self.ranks = frozenset()
        self.link.send(0, Stopped(self.attempt, self.link.rank, exits))

    def send_files(self) -> None:
        """Sends what node 0 does not have."""
        self.outbox.send(lambda chunk: self.link.send(0, chunk), self.await_ack)

    def await_ack(self) -> None:
        """Returns when one more chunk has arrived."""
        while self.link.take(Ack, _WAIT_S) is None:
            continue  # node 0 is busy or the connection is slow; if node 0 were lost, this would raise


def places_of(message: Run, scratch: Path, job_dir: Path) -> Places:
    """This node's directories; node 0's run directory is shared if the token that it wrote is visible."""
    theirs = Path(message.path)
    try:
        shared = (theirs / message.token).is_file()
    except OSError:
        shared = False
    return Places(theirs if shared else scratch, scratch, job_dir, message.path, message.job_dir)
