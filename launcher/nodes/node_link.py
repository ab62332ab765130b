"""The command's handle of its link to the other nodes. Nothing here blocks longer than asked."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from gpurun.launcher.errors import MachineError, NodesEnded, NodesError
from gpurun.launcher.nodes.messages import End, Message
from gpurun.launcher.nodes.transport.client import Client
from gpurun.launcher.nodes.transport.exchange import (
    Arrived,
    Connected,
    LinkOptions,
    Lost,
    NotConnected,
    Report,
)
from gpurun.launcher.nodes.transport.server import Server

M = TypeVar("M", bound=msgspec.Struct)
T = TypeVar("T")

LINGER_S, LOST_LINGER_S = 5.0, 1.0
"""How long a node waits until the others know how the run ended; shorter if one is lost."""
_NOT_HEARD = (
    "its gpurun was killed or stopped, the machine is down, or the network between it and {own} is cut"
)
_ENDED = "its gpurun was killed, or has ended because it had not heard {own} for too long"
_SETTLE_S = 0.02
_CLOSE_S = 2.0


class LinkLoop:
    """A thread with the event loop of one link, or of many in a simulation."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="gpurun-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what still runs in it, and the thread."""
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop).result(_CLOSE_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S)
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class NodeLink:
    """Messages to and from the other nodes. Unusable once it has raised."""

    def __init__(self, options: LinkOptions, shared: LinkLoop | None = None) -> None:
        """Args:
        shared: the event loop to use; by default the link has its own.
        """
        self.rank = options.rank
        self.hosts: tuple[str, ...] = ()
        """The hosts by node rank, once all nodes have joined."""
        self.connected = False
        self.own_host = options.own_host
        self._lost_one = False
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._mails: list[Message] = []
        self._own = None if shared else LinkLoop()
        self._loop = (shared or self._own or LinkLoop()).loop
        self._streams = asyncio.run_coroutine_threadsafe(self._open(options), self._loop).result()

    async def _open(self, options: LinkOptions) -> Server | Client:
        streams = (Server if options.rank == 0 else Client)(options, self._reports.put)
        self._running = asyncio.create_task(streams.run())
        return streams

    def begin(self, hosts: tuple[str, ...]) -> None:
        """Sets all nodes, by rank; on node 0, one that comes later is turned away."""
        self.hosts = hosts
        self._loop.call_soon_threadsafe(self._streams.begin, hosts)

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to a node, possibly to this one. Returns at once."""
        self._loop.call_soon_threadsafe(self._streams.send, rank, message)

    def announce(self, end: End) -> None:
        """Announces how the run ends; only the first announcement of all nodes counts."""
        self._loop.call_soon_threadsafe(self._streams.announce, end)

    def suspect(self, suspicious: bool) -> None:
        """Whether ranks of this node have lost their peers: then a silent node is considered lost sooner."""
        self._streams.silence.suspicious = suspicious

    def poll(self, timeout_s: float) -> list[Message]:
        """Messages since the last call; waits for the first one, at most `timeout_s`.

        Raises:
            NodesEnded: the end of the run has been announced.
            NodesError: a node, or the connection to it, is lost.
            MachineError: node 0 can't be reached, or its port is taken.
        """
        self._await(lambda: self._mails or None, timeout_s)
        self._receive(0.0)
        mails, self._mails = self._mails, []
        return mails

    def take(self, kind: type[M], timeout_s: float) -> M | None:
        """The next message of this kind; `poll` returns the others later. `None` if none comes in time.

        Raises:
            GpurunError: as `poll` does.
        """
        return self._await(lambda: self._pick(kind), timeout_s)

    def await_connected(self, timeout_s: float) -> bool:
        """Whether node 0 is reached in time; `poll` returns messages later.

        Raises:
            MachineError: the link could not reach it.
        """
        return self._await(lambda: self.connected or None, timeout_s) is not None

    def _await(self, find: Callable[[], T | None], timeout_s: float) -> T | None:
        deadline = time.monotonic() + timeout_s
        self._receive(0.0)
        while (found := find()) is None and (left_s := deadline - time.monotonic()) > 0:
            self._receive(left_s)
        return found

    def _pick(self, kind: type[M]) -> M | None:
        for position, mail in enumerate(self._mails):
            if isinstance(mail, kind):
                del self._mails[position]
                return mail
        return None

    def refuse(self, end: End, num_others: int, limit_s: float) -> None:
        """Ends the link before all nodes have joined; reports why to the others that come in time."""
        self._streams.awaited_others = num_others if self.rank == 0 else 0
        self.announce(end)
        self.close(limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """Lets the others get the last messages, and ends the link."""
        if self._loop.is_closed() or self._running.cancelled():
            return
        limit_s = limit_s or (LOST_LINGER_S if self._lost_one else LINGER_S)
        closing = asyncio.run_coroutine_threadsafe(self._close(limit_s), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(limit_s + _CLOSE_S)
        if self._own is not None:
            self._own.close()

    async def _close(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not (self._streams.is_settled or self._running.done()) and time.monotonic() < deadline:
            await asyncio.sleep(_SETTLE_S)
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _receive(self, timeout_s: float) -> None:
        """Takes the next report, if there is one in time, and all that have come by then."""
        with contextlib.suppress(queue.Empty):
            self._take(self._reports.get(timeout=timeout_s) if timeout_s > 0 else self._reports.get_nowait())
            while True:
                self._take(self._reports.get_nowait())

    def _take(self, report: Report) -> None:
        match report:
            case Arrived(message):
                self._mails.append(message)
            case Connected():
                self.connected = True
            case End(code, text, starts_again):
                raise NodesEnded(text, code, self._mails, starts_again)
            case NotConnected(text):
                raise MachineError(text)
            case Lost():
                self._lost(report)

    def _lost(self, lost: Lost) -> NoReturn:
        self._lost_one = True
        own = f"node {self.rank} ({self.own_host})"
        causes = (_NOT_HEARD if lost.is_running else _ENDED).format(own=own)
        raise NodesError(f"node {lost.rank} ({lost.host}) is lost: {lost.why}\n    possible causes: {causes}")
