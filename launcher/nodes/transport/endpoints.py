"""The gRPC streams between node 0, which serves, and the others: one stream per node, both ways.

gRPC brings the connection, TLS, keepalive, flow control, limits and reconnection. Everything here runs in one
event loop, and reports to the command through a function that may be called from that loop.
"""

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gpurun.launcher.machine.network import family_of
from gpurun.launcher.nodes.messages import End, LogText, Message, decode, encode
from gpurun.launcher.nodes.transport.connection import (
    PULSE_S,
    QUIET_S,
    Lane,
    Silence,
    decode_frame,
    encode_frame,
)
from gpurun.launcher.nodes.transport.credentials import NODE_NAME, Identity

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its library writes to stderr, and reads this when imported
import grpc
import grpc.aio

_SERVICE, _METHOD = "gpurun.Nodes", "Exchange"
_MAX_MESSAGE_BYTES = 64 << 20
"""The stacks of all ranks of a node are the largest message; files come in chunks."""
_CHECK_S = 0.25
_RETRY_S = 0.1
_CONNECT_S = 5.0
"""What one attempt to connect may take; with dropped packets it would last for minutes."""
_HANDSHAKE_S = 10.0
"""How long a stranger can keep a connection without proving that it knows the secret."""
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


@dataclass(frozen=True)
class LinkOptions:
    """Everything that a node's connection needs."""

    rank: int
    """Node rank; node 0 serves."""
    num_nodes: int
    host: str
    """The rendezvous host as the user calls it."""
    address: str
    """Its IP address."""
    port: int
    listen: str
    """Address that node 0 listens on; empty: all of them."""
    own_host: str
    join_timeout_s: float
    silence_s: float
    """A node that was not heard for this long is lost."""
    identity: Identity | None
    """`None`: connections are neither encrypted nor authenticated."""


@dataclass(frozen=True)
class Connected:
    """Node 0 is reached, or listens."""


@dataclass(frozen=True)
class Refused:
    """Node 0 can't be reached, or refuses this node, or can't listen."""

    text: str


@dataclass(frozen=True)
class Arrived:
    """A message for this node. Messages are in the order in which they came."""

    message: Message


@dataclass(frozen=True)
class Lost:
    """A node is lost."""

    rank: int
    host: str
    why: str


Report = Connected | Refused | Arrived | Lost | End
Reporter = Callable[[Report], None]


@dataclass
class Peer:
    """The other end of a connection, which outlives its streams."""

    rank: int
    host: str
    lane: Lane = field(default_factory=Lane)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream: int = 0
    """Number of the current stream; an earlier one may not have noticed yet that it is over."""
    has_left: bool = False
    """Whether its stream ended after the end of the run was announced, perhaps without a confirmation."""

    def put(self, message: Message | End) -> None:
        self.lane.put(encode(message))
        self.wake.set()


async def carry(
    peer: Peer,
    read: Callable[[], Awaitable[Any]],
    write: Callable[[bytes], Awaitable[Any]],
    deliver: Callable[[bytes], None],
    heard: Callable[[], None],
) -> None:
    """Carries messages both ways until the stream ends.

    Raises:
        ValueError: the other end does not follow the protocol.
        grpc.RpcError: the stream broke.
    """
    peer.stream += 1
    number = peer.stream
    peer.lane.rewind()
    writer = asyncio.create_task(_write(peer, number, write))
    try:
        while (content := await read()) is not grpc.aio.EOF and peer.stream == number:
            payload = peer.lane.accept(decode_frame(content))
            heard()
            if payload is not None:
                peer.wake.set()
                deliver(payload)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)


async def _write(peer: Peer, number: int, write: Callable[[bytes], Awaitable[Any]]) -> None:
    while peer.stream == number:
        peer.wake.clear()
        while peer.stream == number and (frame := peer.lane.next_frame()) is not None:
            await write(encode_frame(frame))
        try:
            await asyncio.wait_for(peer.wake.wait(), PULSE_S)
        except TimeoutError:
            if peer.stream == number:
                await write(encode_frame(peer.lane.heartbeat()))


class Streams:
    """What both ends have in common."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        self.options, self.report = options, report
        self.silence = Silence(options.silence_s, time.monotonic())
        self.ended = False
        """Whether the end of the run was announced."""
        self.hosts: tuple[str, ...] = ()
        """By node rank, once all nodes have joined."""
        self.awaited_others = 0
        """How many nodes have to connect before everything is said."""

    def host_of(self, rank: int) -> str:
        """As users call it."""
        return self.hosts[rank] if self.hosts else self.peer_of(rank).host

    def peer_of(self, rank: int) -> Peer:
        raise NotImplementedError

    async def watch(self) -> None:
        """Reports nodes that fall silent, until the first that has been silent for too long."""
        while (silent := self.silence.check(time.monotonic())) is None:
            for rank, is_quiet in self.silence.changes().items():
                self._report_change(rank, is_quiet)
            await asyncio.sleep(_CHECK_S)
        rank, seconds = silent
        closed = "its connection was closed" if rank in self.silence.closed else "no heartbeat"
        self.report(Lost(rank, self.host_of(rank), f"{closed} for {seconds:.0f} s"))

    def _report_change(self, rank: int, is_quiet: bool) -> None:
        """For users; a run that ends has nodes that fall silent."""
        limit = f"no heartbeat for {QUIET_S:g} s; after {self.options.silence_s:g} s it counts as lost"
        text = f"node {rank} ({self.host_of(rank)}): {limit if is_quiet else 'heartbeats again'}"
        if not self.ended:
            self.report(Arrived(LogText(text)))

    def message(self, payload: bytes) -> Message | End:
        """Raises:
        ValueError: no message of this version.
        """
        try:
            return decode(payload)
        except Exception as error:
            raise ValueError(f"it runs another version of gpurun: {error}") from error


class Server(Streams):
    """Node 0's end of all streams."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self.port = options.port
        self._sessions: dict[str, Peer] = {}
        self._ranks: dict[int, Peer] = {}
        """The first session of each rank."""
        self._end: End | None = None
        self._server: Any = None

    def peer_of(self, rank: int) -> Peer:
        return self._ranks[rank]

    async def run(self) -> None:
        """Serves until it is cancelled."""
        try:
            await self._listen()
        except (OSError, RuntimeError) as error:
            self.report(Refused(_why_not_served(error, self.options)))
            return
        self.report(Connected())
        try:
            await self.watch()
            await asyncio.Event().wait()
        finally:
            await self._server.stop(None)

    async def _listen(self) -> None:
        options = self.options
        address = options.listen or ("::" if ":" in options.address else "0.0.0.0")
        # gRPC doesn't say why it can't listen.
        socket.create_server((address, options.port), family=family_of(address)).close()
        server = grpc.aio.server(
            options=_options(options), maximum_concurrent_rpcs=2 * options.num_nodes + 16
        )
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
        place = f"[{address}]:{options.port}" if ":" in address else f"{address}:{options.port}"
        if (own := options.identity) is None:
            self.port = server.add_insecure_port(place)
        else:
            proof = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, True)
            self.port = server.add_secure_port(place, proof)
        await server.start()
        self._server = server

    async def _exchange(self, requests: object, context: Any) -> None:
        """One stream of another node."""
        try:
            peer = self._peer_of(dict(context.invocation_metadata()))
        except (KeyError, ValueError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a node of gpurun: {error}")
            return
        try:
            await carry(
                peer,
                context.read,
                context.write,
                lambda payload: self._deliver(peer, payload),
                lambda: self._heard(peer),
            )
        except ValueError as error:
            if self.options.identity is not None:
                self.report(Refused(f"node {peer.rank} ({peer.host}): {error}"))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            peer.has_left = self.ended
            if self._ranks.get(peer.rank) is peer:
                self.silence.close(peer.rank, time.monotonic())

    def _peer_of(self, metadata: dict[str, str]) -> Peer:
        session, rank, host = metadata["session"], int(metadata["rank"]), metadata["host"]
        if session in self._sessions:
            self._sessions[session].has_left = False
            return self._sessions[session]
        if not 0 <= rank < self.options.num_nodes or len(session) > 64 or len(host) > 256:
            raise ValueError(f"node rank {rank} of {self.options.num_nodes}")
        peer = self._sessions[session] = Peer(rank, host)
        self._ranks.setdefault(rank, peer)
        if self._end is not None:
            peer.put(self._end)
        return peer

    def _heard(self, peer: Peer) -> None:
        if self._ranks.get(peer.rank) is peer:
            self.silence.hear(peer.rank, time.monotonic())

    def _deliver(self, peer: Peer, payload: bytes) -> None:
        message = self.message(payload)
        if isinstance(message, End):
            self.announce(message)
        else:
            self.report(Arrived(message))

    def send(self, rank: int, message: Message) -> None:
        """Sends a message; one to node 0 itself comes after all that have arrived."""
        if rank == 0:
            self.report(Arrived(message))
        elif rank in self._ranks:
            self._ranks[rank].put(message)

    def announce(self, end: End) -> None:
        """Reports to all nodes how the run ends; only the first announcement counts."""
        if self._end is None:
            self._end, self.ended = end, True
            self.report(end)
            for peer in self._sessions.values():
                peer.put(end)

    @property
    def is_settled(self) -> bool:
        settled = [peer.has_left or peer.lane.is_settled for peer in self._sessions.values()]
        return len(settled) >= self.awaited_others and all(settled)


class Client(Streams):
    """Another node's end of its stream."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        super().__init__(options, report)
        self._peer = Peer(0, options.host)
        self._session = secrets.token_hex(16)
        self._connected = False
        self._deadline_s = time.monotonic() + options.join_timeout_s

    def peer_of(self, rank: int) -> Peer:
        return self._peer

    async def run(self) -> None:
        """Keeps a stream to node 0 until it is cancelled, or node 0 is lost."""
        watching = asyncio.create_task(self.watch())
        try:
            async with self._channel() as channel:
                exchange = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
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
            return grpc.aio.insecure_channel(place, options=_options(self.options))
        proof = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        return grpc.aio.secure_channel(place, proof, options=_options(self.options))

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
        """What the end of a stream means; `None`: it is worth to connect again."""
        if status in _REFUSED:
            return Refused(details)
        if self.ended:
            return Lost(0, self.host_of(0), "it has ended")
        if self._connected:
            refused = "Connection refused" in details
            return Lost(0, self.host_of(0), "it refuses connections") if refused else None
        if "SSL_ERROR_SSL" in details:
            return Refused(_OTHER_SECRET.format(o=self.options))
        if time.monotonic() > self._deadline_s:
            return Refused(_NOT_REACHED.format(o=self.options))
        return None

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
        """Asks node 0 to tell all nodes how the run ends."""
        self._peer.put(end)

    @property
    def is_settled(self) -> bool:
        return self._peer.lane.is_settled


_OTHER_SECRET = (
    "node 0 at {o.host}:{o.port} does not have the secret of node {o.rank} ({o.own_host})\n"
    "    copy ~/.config/gpurun/secret from one node to the others, or set GPURUN_SECRET on all to one value"
)
_NOT_REACHED = (
    "node {o.rank} ({o.own_host}) didn't reach node 0 at {o.host}:{o.port} within {o.join_timeout_s:g} s\n"
    "    check that gpurun is running there as node 0, that no firewall blocks the port, and that --insecure "
    "is given on all nodes or on none"
)


def _why_not_served(error: OSError | RuntimeError, options: LinkOptions) -> str:
    """Why node 0 can't listen, and what to do about it."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return (
            f"port {options.port} of node 0 ({options.own_host}) is in use by another program\n"
            f"    choose another one, on all nodes: --rendezvous {options.host}:{options.port + 1}"
        )
    if number == errno.EADDRNOTAVAIL:
        return (
            f"this is node 0, so the rendezvous host has to be this machine; but {options.host} "
            f"({options.address}) is not an address of {options.own_host}"
        )
    return f"node 0 can't listen on {options.host}:{options.port}: {error}"


def _options(options: LinkOptions) -> Iterable[tuple[str, object]]:
    """What gRPC should do with a connection.

    A connection that is silent for half of the limit is closed, so that a new one can be tried: TCP itself
    waits longer and longer before it sends again what was lost.
    """
    quarter_ms = round(options.silence_s * 1000 / 4)
    return (
        ("grpc.ssl_target_name_override", NODE_NAME),
        ("grpc.keepalive_time_ms", quarter_ms),
        ("grpc.keepalive_timeout_ms", quarter_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", round(_CONNECT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.server_handshake_timeout_ms", round(_HANDSHAKE_S * 1000)),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
