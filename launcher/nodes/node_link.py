"""The command's handle of its link to the other nodes, and another node's end of its stream.

Nothing in the handle blocks longer than asked.
"""

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import gpurun.launcher.nodes.transport  # noqa: F401  # isort: skip  # it sets a variable that grpc reads
import grpc
import grpc.aio
import msgspec

from gpurun.launcher.errors import MachineError, NodesEnded, NodesError
from gpurun.launcher.nodes.messages import End, Message
from gpurun.launcher.nodes.transport.exchange import (
    METHOD,
    SERVICE,
    Arrived,
    Connected,
    LinkEnd,
    LinkOptions,
    Lost,
    NotConnected,
    Peer,
    Report,
    Reporter,
    carry,
    grpc_options,
)
from gpurun.launcher.nodes.transport.server import Server

_RETRY_S = 0.1
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_OTHER_SECRET = (
    "node 0 at {o.host}:{o.port} does not have the secret of node {o.rank} ({o.own_host})\n"
    "    copy ~/.config/gpurun/secret from one node to the others, or set GPURUN_SECRET on all to one value"
)
_ALL_OR_NONE = "    give --insecure on all nodes or on none; or another program listens on that port"
_NO_TLS = (
    "node 0 at {o.host}:{o.port} does without a secret, and node {o.rank} ({o.own_host}) has one\n"
    + _ALL_OR_NONE
)
_WANTS_SECRET = (
    "node 0 at {o.host}:{o.port} closes connections without a secret, and node {o.rank} ({o.own_host}) was "
    "started with --insecure\n" + _ALL_OR_NONE
)
_CLOSED_TIMES = 30
"""In a row, every 0.1 s: it is no coincidence that node 0 closes each connection at once."""
_NOT_REACHED = (
    "node {o.rank} ({o.own_host}) didn't reach node 0 at {o.host}:{o.port} within {o.join_timeout_s:g} s\n"
    "    check that gpurun is running there as node 0, that no firewall blocks the port, and that --insecure "
    "is given on all nodes or on none"
)


class Client(LinkEnd):
    """Another node's end of its stream."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self.peers[0] = self._peer = Peer(0, options.host)
        self._session = secrets.token_hex(16)
        self._connected = False
        self._num_closed = 0
        self._deadline_s = time.monotonic() + options.join_timeout_s

    async def run(self) -> None:
        """Keeps a stream to node 0 until it is cancelled, or node 0 is lost."""
        watching = asyncio.create_task(self.watch())
        try:
            async with self._channel() as channel:
                exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
                while (
                    verdict := self._judge(*await self._exchange(exchange))
                ) is None and not watching.done():
                    await asyncio.sleep(_RETRY_S)
            if verdict is not None:
                self.report(verdict)
        finally:
            watching.cancel()

    def _channel(self) -> Any:
        address = self.options.address
        place = (
            f"ipv6:[{address}]:{self.options.port}"
            if ":" in address
            else f"ipv4:{address}:{self.options.port}"
        )
        if (own := self.options.identity) is None:
            return grpc.aio.insecure_channel(place, options=grpc_options(self.options))
        proof = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        return grpc.aio.secure_channel(place, proof, options=grpc_options(self.options))

    async def _exchange(self, exchange: Any) -> tuple[Any, str]:
        """One stream; with what status it ended, and why."""
        metadata = (
            ("session", self._session),
            ("rank", str(self.options.rank)),
            ("host", self.options.own_host),
        )
        call = exchange(metadata=metadata)
        try:
            await carry(self._peer, call.read, call.write, self._deliver, self._heard)
            return await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except asyncio.InvalidStateError:  # the stream broke while it was written to
            return await call.code(), await call.details()
        except ValueError as error:
            return grpc.StatusCode.INVALID_ARGUMENT, f"node 0 ({self.options.host}): {error}"
        finally:
            call.cancel()
            self.silence.close(0, time.monotonic())

    def _judge(self, status: Any, details: str) -> Report | None:
        """The meaning of the end of a stream; `None`: it is worth connecting again."""
        if status in _REFUSED:
            return NotConnected(details)
        if self.ended:
            return Lost(0, self.host_of(0), "it has ended")
        if self._connected:
            refused = "Connection refused" in details
            return Lost(0, self.host_of(0), "it refuses connections", is_running=False) if refused else None
        if (text := self._refusal(details)) is not None:
            return NotConnected(text.format(o=self.options))
        if time.monotonic() > self._deadline_s:
            return NotConnected(_NOT_REACHED.format(o=self.options))
        return None

    def _refusal(self, details: str) -> str | None:
        """The meaning of node 0's refusal to let this node connect; `None`: perhaps it isn't there yet."""
        if "SSL_ERROR_SSL" in details:
            return _NO_TLS if "WRONG_VERSION_NUMBER" in details else _OTHER_SECRET
        is_closed = self.options.identity is None and "Socket closed" in details
        self._num_closed = self._num_closed + 1 if is_closed else 0
        return _WANTS_SECRET if self._num_closed >= _CLOSED_TIMES else None

    def _heard(self) -> None:
        self.silence.hear(0, time.monotonic())
        if not self._connected:
            self._connected = True
            self.report(Connected())

    def _deliver(self, payload: bytes) -> None:
        message = self.message(payload)
        if isinstance(message, End):
            self.ended = True
            self.report(message)
        else:
            self.report(Arrived(message))

    def send(self, rank: int, message: Message) -> None:
        """Sends a message to node 0."""
        self._peer.put(message)

    def announce(self, end: End) -> None:
        """Asks node 0 to notify all nodes of how the run ends."""
        self._peer.put(end)

    @property
    def is_settled(self) -> bool:
        return self._peer.lane.is_settled


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
