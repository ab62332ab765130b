"""The command's handle of its link to the other nodes. Nothing here blocks longer than asked."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import msgspec

from gpurun.launcher.errors import MachineError, NodesEnded, NodesError
from gpurun.launcher.nodes.messages import (
    Announce,
    Connected,
    ConnectionLost,
    End,
    Heartbeats,
    JoinRendezvous,
    LinkOptions,
    LinkReport,
    LinkRequest,
    Mail,
    Message,
    Quit,
    Refused,
    RendezvousDone,
    Send,
    decode,
    encode,
)
from gpurun.launcher.processes.channel import ServingProcess
from gpurun.launcher.processes.guard import Guard, python_argv

M = TypeVar("M", bound=msgspec.Struct)
T = TypeVar("T")

LINGER_S, LOST_LINGER_S = 5.0, 1.0
"""How long node 0 waits until all others know how the run ended; shorter if a node is lost."""
_QUIT_S = 2.0
"""How long the link may take to send its last messages."""


SILENCE_S = 5.0
"""A node without heartbeats for this long is lost: with the grace period, all is over within 10 s."""
SUSPICIOUS_SILENCE_S = 2.5
"""Likewise, if ranks have already lost their connections to peers."""
BUSY_S = 1.0
"""A node that did not listen for this long can't judge whether others were silent."""


@dataclass
class Silence:
    """Which nodes have sent node `rank` no heartbeat, and for how long.

    Nodes heartbeat through the store; one that stops is considered lost. Node 0 counts the heartbeats of each
    node; the others only notice whether the store answers, which is node 0's.
    """

    rank: int
    now_s: float
    suspicious: bool = False
    counts: tuple[int, ...] = ()
    heard_s: dict[int, float] = field(default_factory=dict)

    def begin(self, num_nodes: int, now_s: float) -> None:
        """From now on nodes heartbeat."""
        watched = range(1, num_nodes) if self.rank == 0 else (0,)
        self.heard_s = dict.fromkeys(watched, now_s)

    def resume(self, now_s: float) -> None:
        """This node listens again, perhaps after it was busy: that time does not count as silence."""
        away_s = now_s - self.now_s
        if away_s > BUSY_S:
            self.heard_s = {rank: heard_s + away_s for rank, heard_s in self.heard_s.items()}
        self.now_s = now_s

    def beats(self, counts: Sequence[int], now_s: float) -> None:
        """Counts of all nodes' heartbeats so far, read from the store."""
        for rank in self.heard_s:
            if self.rank != 0 or not self.counts or counts[rank] != self.counts[rank]:
                self.heard_s[rank] = now_s
        self.counts = tuple(counts)

    def find(self, now_s: float) -> tuple[int, float] | None:
        """The node that has been silent for too long, and for how many seconds."""
        self.now_s = now_s
        limit_s = SUSPICIOUS_SILENCE_S if self.suspicious else SILENCE_S
        silent = [(now_s - heard_s, rank) for rank, heard_s in self.heard_s.items()]
        longest_s, rank = max(silent, default=(0.0, 0))
        return (rank, longest_s) if longest_s > limit_s else None


class NodeLink:
    """Messages to and from the other nodes. Unusable once it has raised."""

    def __init__(
        self, guard: Guard, options: LinkOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank = options.rank
        self.hosts: tuple[str, ...] = ()
        """By node rank, once they are known."""
        self.num_met = 0
        """How many nodes have completed torch's rendezvous."""
        self.connected = False
        self._lost_one = False
        self._clock = clock
        self._silence = Silence(options.rank, clock())
        self._mails: list[Message] = []
        argv = python_argv("gpurun.launcher.worker.entry.store_link", msgspec.json.encode(options).decode())
        self._process: ServingProcess[LinkRequest, LinkReport] = ServingProcess(
            guard, argv, {"OPENBLAS_NUM_THREADS": "1"}, LinkReport
        )
        self._is_open = True

    def send(self, to: int, message: Message) -> None:
        """Puts a message into a node's mailbox, also into this node's own."""
        self._request(Send(to, encode(message)))

    def announce(self, end: End) -> None:
        """Ends the run on all nodes, unless that has been announced before."""
        self._request(Announce(encode(end)))

    def meet(self, num_nodes: int) -> None:
        self._request(JoinRendezvous(num_nodes))

    def suspect(self, suspicious: bool) -> None:
        """Whether ranks of this node have lost their peers: then a silent node is considered lost sooner."""
        self._silence.suspicious = suspicious

    def poll(self, timeout_s: float) -> list[Message]:
        """Messages since the last call; waits for the first one, at most `timeout_s`.

        Raises:
            NodesEnded: the end of the run has been announced.
            NodesError: a node, or the connection to it, is lost.
            MachineError: node 0 can't be reached, or its port is taken.
        """
        deadline = self._clock() + timeout_s
        self._silence.resume(self._clock())
        while True:
            self._receive(0.0 if self._mails else max(0.0, deadline - self._clock()))
            if self._mails or self._clock() >= deadline:
                mails, self._mails = self._mails, []
                return mails

    def take(self, kind: type[M], timeout_s: float) -> M | None:
        """The next message of this kind; `poll` returns the others later. `None` if none comes in time.

        Raises:
            GpurunError: as `poll` does.
        """
        self._silence.resume(self._clock())
        return self._await(lambda: self._pick(kind), timeout_s)

    def await_connected(self, timeout_s: float) -> bool:
        """Whether the store is reached in time; `poll` returns messages later.

        Raises:
            MachineError: the link could not reach it.
        """
        return self._await(lambda: self.connected or None, timeout_s) is not None

    def await_met(self, timeout_s: float) -> bool:
        """Whether all nodes complete torch's rendezvous in time; `poll` returns messages later."""
        return self._await(lambda: self.num_met or None, timeout_s) is not None

    def _await(self, find: Callable[[], T | None], timeout_s: float) -> T | None:
        deadline = self._clock() + timeout_s
        while (found := find()) is None and self._clock() < deadline:
            self._receive(max(0.0, deadline - self._clock()))
        return found

    def _pick(self, kind: type[M]) -> M | None:
        for position, mail in enumerate(self._mails):
            if isinstance(mail, kind):
                del self._mails[position]
                return mail
        return None

    def close(self) -> None:
        """Lets the link send its last messages, and ends it."""
        if not self._is_open:
            return
        self._is_open = False
        channel = self._process.channel
        linger_s = LOST_LINGER_S if self._lost_one else LINGER_S
        # Without node 0, the link hangs in a call that may never return: it ends with the command.
        limit_s = 0.0 if self._lost_one and self.rank > 0 else linger_s + _QUIT_S
        with contextlib.suppress(OSError):
            channel.send(Quit(linger_s))
            deadline = self._clock() + limit_s
            while (left_s := deadline - self._clock()) > 0:
                if not channel.has_news(left_s) or channel.receive() is None:
                    break
        self._process.close()

    def _request(self, request: LinkRequest) -> None:
        try:
            self._process.channel.send(request)
        except OSError:
            self._receive(0.0)  # It may have reported why.
            self._lost(f"its link ended{self._last_words()}")

    def _receive(self, timeout_s: float) -> None:
        # Short waits: a silent node has to be noticed while nothing comes.
        if self._process.channel.has_news(min(timeout_s, 0.2)):
            reports = self._process.channel.receive()
            if reports is None:
                self._lost(f"its link ended{self._last_words()}")
            for report in reports:
                self._take(report)
        if (silent := self._silence.find(self._clock())) is not None:
            rank, seconds = silent
            self._gone(rank, f"no heartbeat for {seconds:.0f} s")

    def _take(self, report: LinkReport) -> None:
        if isinstance(report, Mail):
            try:
                self._mails.append(decode(report.payload))
            except msgspec.MsgspecError as error:
                raise NodesError(f"a node runs another version of gpurun: {error}") from error
        elif isinstance(report, Heartbeats):
            self._silence.beats(report.counts, self._clock())
        elif isinstance(report, End):
            raise NodesEnded(report.text, report.code, self._mails)
        elif isinstance(report, RendezvousDone):
            self.num_met = report.num_nodes
            self._silence.begin(report.num_nodes, self._clock())
        elif isinstance(report, Connected):
            self.connected = True
        elif isinstance(report, Refused):
            raise MachineError(report.text)
        elif isinstance(report, ConnectionLost):
            self._lost(report.text)

    def _lost(self, why: str) -> NoReturn:
        if self.rank == 0:
            raise NodesError(f"node 0 ({self._host(0)}) lost its own store: {why}")
        self._gone(0, why)

    def _gone(self, rank: int, why: str) -> NoReturn:
        self._lost_one = True
        raise NodesError(
            f"node {rank} ({self._host(rank)}) is lost: {why}\n"
            f"    its gpurun was killed, the machine is down, or the network between it and node {self.rank} "
            f"({self._host(self.rank)}) is cut"
        )

    def _host(self, rank: int) -> str:
        return self.hosts[rank] if rank < len(self.hosts) else "unknown host"

    def _last_words(self) -> str:
        lines = self._process.last_words()
        return f"; its last output: {lines[-1]}" if lines else ""
