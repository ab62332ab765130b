"""The ranks of all nodes, as if they were on one machine; node 0 has this."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.launcher.errors import NodesError, SpecError
from gpurun.launcher.grouping import grouped
from gpurun.launcher.inspect.requests import (
    HEAD_START_STEPS,
    Answer,
    Declined,
    Question,
    RanksSeen,
    TracesRequested,
    WantTraces,
    answer,
    next_number,
    ranks_to_record,
    ring,
    take_question,
    write_request,
)
from gpurun.launcher.inspect.snapshot import STACKS_S, RankSnapshot
from gpurun.launcher.nodes.messages import (
    Ack,
    Chunk,
    Exits,
    LogText,
    Message,
    OfAttempt,
    Port,
    PreloadModules,
    RankKind,
    RequestWritten,
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
from gpurun.launcher.nodes.transfer import Inbox
from gpurun.launcher.processes.pool import Pools, RankPool
from gpurun.launcher.processes.protocol import PROGRAM_ENTRY, TERMINATE, Exit, StartRequest
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.records import CaptureRequest, FailureRecord

_POLL_S = 0.05
_BEFORE_STOP_NS = 10_000_000
_ECHO_S = 1.0
"""How long a node's message to itself may take until it returns with its number."""
_NODES_ANSWER_S = STACKS_S + 2.0
"""How long other nodes may take to look at their ranks and to answer."""


@dataclass
class Timeline:
    """Converts the times of one attempt to node 0's clock, in the order in which node 0 hears of exits.

    Hosts' clocks are never compared. A node reports at once that ranks have ended. Between the ranks of one
    message, and between a rank's failure record and its exit, the host's own clock decides.
    """

    last_ns: int = 0
    shifts_ns: dict[int, int] = field(default_factory=dict)
    """The value to add to a time of a rank's host to get a time of node 0, by rank."""

    def place(self, exits: Sequence[Exit], now_ns: int) -> list[Exit]:
        """The exits of one message, placed after those of all messages before it.

        Args:
            now_ns: when the message was read, by node 0's clock.
        """
        if not exits:
            return []
        first_ns = min(exit_.time_ns for exit_ in exits)
        shift_ns = max(now_ns, self.last_ns + 1) - first_ns
        self.last_ns = max(exit_.time_ns for exit_ in exits) + shift_ns
        self.shifts_ns.update({exit_.rank: shift_ns for exit_ in exits})
        return [replace(exit_, time_ns=exit_.time_ns + shift_ns) for exit_ in exits]


class ClusterPool:
    """Starts and ends the ranks of all nodes, and collects their files in node 0's run directory.

    All exits pass through node 0's mailbox, also those of its own ranks, which brings them into one order.
    """

    def __init__(
        self, local: Pools, link: NodeLink, run: RunDir, num_nodes: int, say: Callable[[str], None]
    ) -> None:
        """Args:
        say: shows what the link reports about the other nodes.
        """
        self._pools, self._link, self._run, self._say = local, link, run, say
        self._inbox = Inbox(run.path)
        self._env: Mapping[str, str] = {}
        self._local: RankPool = local.get({})
        self._others = range(1, num_nodes)
        self._attempt = 0
        self._name = ""
        self._working: set[int] = set()
        """Nodes whose ranks of this attempt have not been reported as stopped."""
        self._settling: set[int] | None = None
        """Nodes whose ranks have left processes; `None`: they haven't been asked yet."""
        self._answers: dict[int, Snapshots | RequestWritten | None] = {}
        """The answers of the other nodes to the last question; `None`: still awaited."""
        self._owed = Counter[int]()
        """How many answers each node owes, to earlier questions too: it answers in order."""
        self._ranks: dict[int, tuple[int, ...]] = {}
        """The ranks of this attempt that have a control block, by node: the store is no rank."""
        self._steps: dict[int, tuple[int, ...]] = {}
        """The steps by node."""
        self._exits: list[Exit] = []
        self._timeline = Timeline()
        self._port_pending = False
        self._lost = False
        self._asked_to_stop_ns: int | None = None

    @property
    def launch(self) -> str:
        """The attempt of a launch that was started last."""
        return self._name

    def get(self, env: Mapping[str, str], python: str = "") -> RankPool:
        """Makes this pool use servers with this environment on all nodes from now on, and returns it."""
        self._env, self._local = env, self._pools.get(env)
        return self

    def start(self, processes: Sequence[StartRequest]) -> None:
        """Starts the ranks of one launch on their nodes; returns at once."""
        by_node = grouped(processes, node_rank)
        config = Path(processes[-1].args[0])  # the first may be the store
        self._attempt += 1
        self._name, self._timeline = config.parent.name, Timeline()
        self._working, self._port_pending, self._settling = set(by_node), len(by_node) > 1, None
        self._ranks = {
            node: tuple(request.rank for request in some if request.control) for node, some in by_node.items()
        }
        self._steps.clear()
        self._owed.clear()
        kind: RankKind = "program" if processes[-1].entry == PROGRAM_ENTRY else "workload"
        for node in self._working - {0}:
            what = (self._attempt, self._name, kind, config.read_bytes(), tuple(by_node[node]))
            self._link.send(node, StartRanks(*what, env=self._env))
        self._local.start(by_node.get(0, []))

    def preload(self, modules: Sequence[str], if_harmless: bool = False) -> None:
        """Makes the servers of all nodes import modules for later launches."""
        self._local.preload(modules, if_harmless)
        self._send_all(self._others, PreloadModules(tuple(modules), if_harmless))

    def notify(self, text: str) -> None:
        """Shows a message to the users of the other nodes as well."""
        self._send_all(self._others, LogText(text))

    def poll(self, timeout_s: float) -> list[Exit]:
        """Ranks of all nodes that ended since the last call; waits for the first one, at most `timeout_s`.

        Raises:
            NodesError: a node is lost, or has ended the run.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._take_mail(0.0)
            remaining_s = 0.0 if self._exits else max(0.0, deadline - time.monotonic())
            if exits := self._local.poll(min(remaining_s, _POLL_S)):
                failed = any(exit_.returncode for exit_ in exits)
                self._link.suspect(failed)
                self._link.send(0, Exits(self._attempt, 0, tuple(exits)))
                if failed:  # the ordered message comes before a victim's exit is judged
                    deadline = max(deadline, time.monotonic() + _ECHO_S)
            self._pass_port_on()
            self._answer_question()
            if self._exits or time.monotonic() >= deadline:
                exits, self._exits = self._exits, []
                return exits

    def forward(self, number: int) -> None:
        """Sends a signal to this node's ranks: the other nodes' commands receive the signal themselves."""
        self._local.forward(number)

    def observe(self, directory: Path) -> tuple[RankSnapshot, ...]:
        """Snapshots of the running ranks of all nodes, by rank; without nodes that don't answer in time."""
        self._ask_others(SnapshotRequest(self._attempt))
        own = self._local.observe(directory)
        self._await_answers()
        found = [answer for answer in self._answers.values() if isinstance(answer, Snapshots)]
        seen = {snapshot.rank: snapshot for part in (own, *(a.snapshots for a in found)) for snapshot in part}
        return tuple(snapshot for _, snapshot in sorted(seen.items()))

    def steps_elsewhere(self) -> tuple[int, ...]:
        """Steps of the other nodes' ranks, as last reported."""
        return tuple(count for node in sorted(self._steps) for count in self._steps[node])

    def has_settled(
        self, say: Callable[[str], None], waits: bool = True, keep: Callable[[str], None] = lambda _: None
    ) -> bool:
        """Whether no process is left of ranks that have ended well, or it has been let go, on all nodes."""
        if self._settling is None:
            self._settling = self._working - {0}
            self._send_all(self._settling, Settle(self._attempt, waits))
        self._take_mail(0.0)
        return self._local.has_settled(say, waits, keep) and not self._settling

    def stop(self, grace_s: float, signals: tuple[int, ...] = TERMINATE) -> None:
        """Ends all ranks on all nodes; returns when their files are here.

        Raises:
            NodesError: a node is lost: that is why the launch has ended.
        """
        if self._lost or not self._working:
            self._local.stop(grace_s, signals)
            return
        self._asked_to_stop_ns = time.time_ns() - _BEFORE_STOP_NS
        try:
            self._send_all(self._working - {0}, Stop(self._attempt, grace_s, signals))
            self._local.stop(grace_s, signals)
            self._link.send(0, Stopped(self._attempt, 0, tuple(self._local.poll(0))))
            while self._working:
                self._take_mail(_POLL_S)
        finally:
            self._link.suspect(False)
            self._working.clear()
            self._asked_to_stop_ns = None
        self._put_records_in_order()

    def _send_all(self, nodes: Iterable[int], message: Message) -> None:
        for node in nodes:
            self._link.send(node, message)

    def _ask_others(self, message: Message) -> None:
        """Sends it to the other nodes that have ranks; `_await_answers` waits for them."""
        self._answers = dict.fromkeys(sorted(self._working - {0}))
        self._owed.update(self._answers.keys())
        self._send_all(self._answers, message)

    def _await_answers(self) -> None:
        deadline = time.monotonic() + _NODES_ANSWER_S
        while None in self._answers.values() and time.monotonic() < deadline:
            self._take_mail(_POLL_S)

    def _take_mail(self, timeout_s: float) -> None:
        try:
            for message in self._link.poll(timeout_s):
                self._take(message)
        except NodesError:
            self._lost = True
            raise

    def _take(self, message: Message) -> None:
        if isinstance(message, OfAttempt) and message.attempt != self._attempt:
            return
        if isinstance(message, Chunk):
            self._inbox.write(message)
            self._link.send(message.node, Ack())
        elif isinstance(message, Exits):
            stopped = isinstance(message, Stopped)
            # Ranks that ended by themselves did so before their node got the stop, however late it reports.
            now_ns = time.time_ns() if stopped or not self._asked_to_stop_ns else self._asked_to_stop_ns
            self._exits += self._timeline.place(message.exits, now_ns)
            if stopped:
                self._working.discard(message.node)
        elif isinstance(message, Snapshots | RequestWritten):
            self._owed[message.node] -= 1
            if not self._owed[message.node]:
                self._answers[message.node] = message
        elif isinstance(message, LogText):
            self._say(message.text)
        elif isinstance(message, Settled):
            (self._settling or set()).discard(message.node)
        elif isinstance(message, StepCounts):
            self._steps[message.node] = message.steps

    def _pass_port_on(self) -> None:
        """Passes on the port that rank 0 listens on: ranks of other nodes read it from their own file."""
        path = self._run.rendezvous(self._name)
        if self._port_pending and path.exists():
            self._port_pending = False
            self._send_all(self._working - {0}, Port(self._attempt, path.read_bytes()))

    def _answer_question(self) -> None:
        """Answers `gpurun stacks` and `gpurun capture` in another terminal."""
        if not self._working or (asked := take_question(self._run, self._name)) is None:
            return
        answer(self._run, self._name, asked.token, self._answer(asked.question))

    def _answer(self, question: Question) -> Answer:
        directory = self._run.control(self._name)
        if not isinstance(question, WantTraces):
            return RanksSeen(self.observe(directory))
        try:
            with ControlDir(directory) as control:
                return self._request_traces(control, question)
        except SpecError as error:
            return Declined(str(error))
        except OSError as error:
            return Declined(f"can't reach the ranks on node 0: {error.strerror}")

    def _request_traces(self, control: ControlDir, wanted: WantTraces) -> TracesRequested:
        """Has all nodes write the request, then lets all ranks know of it.

        Programs' ranks begin at the same step: as far as they get while the nodes answer, they may get once
        more until the last of them knows.

        Raises:
            SpecError: there is no such rank, or a node can't reach its ranks.
            OSError: node 0 can't.
        """
        ranks = sorted(rank for some in self._ranks.values() for rank in some)
        recorded = ranks_to_record(wanted, ranks, self._name)
        draft = CaptureRequest(next_number(control), wanted.steps, wanted.ranks, first_step=0)
        before = _most_steps(control)
        write_request(control, draft)
        self._have_others_write(draft)
        after = _most_steps(control)
        final = replace(draft, first_step=after + HEAD_START_STEPS + 2 * (after - before))
        write_request(control, final)
        self._send_all(self._working - {0}, TracesWanted(self._attempt, final, rings=True))
        ring(control, final.number, self._ranks[0])
        return TracesRequested(final.number, recorded)

    def _have_others_write(self, request: CaptureRequest) -> None:
        self._ask_others(TracesWanted(self._attempt, request, rings=False))
        self._await_answers()
        problems = [
            answer.problem
            if isinstance(answer, RequestWritten)
            else f"node {node}: no answer within {_NODES_ANSWER_S:g} s"
            for node, answer in self._answers.items()
        ]
        if any(problems):
            raise SpecError("\n".join(filter(None, problems)))

    def _put_records_in_order(self) -> None:
        """Converts the times of the ranks' failure records to node 0's clock."""
        for rank, shift_ns in self._timeline.shifts_ns.items():
            path = self._run.failure(self._name, rank)
            if path.exists():
                record = read_json(path, FailureRecord)
                write_json(path, replace(record, time_ns=record.time_ns + shift_ns))


def _most_steps(control: ControlDir) -> int:
    """The most steps of node 0's ranks.

    Raises:
        SpecError: none has started.
    """
    if not (states := control.running()):
        raise SpecError(NOT_STARTED)
    return max(state.steps for state in states.values())


def node_rank(process: StartRequest) -> int:
    """The node of a rank; the store of a program, which is not a rank, is on node 0."""
    return int(process.env.get("GROUP_RANK", "0"))
