"""The gRPC streams between node 0, which serves, and the others: one stream per node, both ways.

gRPC brings the connection, TLS, keepalive, flow control, limits and reconnection. Everything here runs in one
event loop, and reports to the command through a function that may be called from that loop.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from gpurun.launcher.nodes.messages import End, LogText, Message, decode, encode
from gpurun.launcher.nodes.transport.connection import (
    PULSE_S,
    QUIET_S,
    MessageLane,
    Silence,
    decode_frame,
    encode_frame,
)
from gpurun.launcher.nodes.transport.credentials import NODE_NAME, Identity

SERVICE, METHOD = "gpurun.Nodes", "Exchange"
_MAX_MESSAGE_BYTES = 64 << 20
"""The stacks of all ranks of a node are the largest message; files come in chunks."""
_CHECK_S = 0.25
_CONNECT_S = 5.0
"""The limit of one attempt to connect; with dropped packets it would last for minutes."""
HANDSHAKE_S = 10.0
"""How long a stranger can keep a connection without proving that it knows the secret."""


@dataclass(frozen=True)
class LinkOptions:
    """Everything that a node's connection needs."""

    rank: int
    """Node rank; node 0 serves."""
    num_nodes: int
    host: str
    """The rendezvous host as the user calls it."""
    address: str
    """The IP address of the node."""
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
class NotConnected:
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
    is_running: bool = True
    """Whether its gpurun may still run, on a machine that doesn't answer."""


Report = Connected | NotConnected | Arrived | Lost | End
Reporter = Callable[[Report], None]


@dataclass
class Peer:
    """The other end of a connection, which outlives its streams."""

    rank: int
    host: str
    lane: MessageLane = field(default_factory=MessageLane)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    stream: int = 0
    """Number of the current stream; an earlier one may not have noticed yet that it is over."""
    has_left: bool = False
    """Whether its stream ended after the end of the run was announced, perhaps without a confirmation."""
    is_turned_away: bool = False
    """Whether it is none of the run's nodes: neither its words nor its silence counts."""

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


class Streams(ABC):
    """The part that both ends have in common."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        self.options, self.report = options, report
        self.silence = Silence(options.silence_s, time.monotonic())
        self.ended = False
        """Whether the end of the run was announced."""
        self.hosts: tuple[str, ...] = ()
        """The hosts by node rank, once all nodes have joined."""
        self.awaited_others = 0
        """How many nodes have to connect before everything is said."""

    def host_of(self, rank: int) -> str:
        """The host of a node, as users call it."""
        return self.hosts[rank] if self.hosts else self.peer_of(rank).host

    @abstractmethod
    def peer_of(self, rank: int) -> Peer:
        """The other end, once it has connected."""

    def begin(self, hosts: tuple[str, ...]) -> None:
        """Sets all nodes, by rank."""
        self.hosts = hosts

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
        """Reports to users that a node falls silent or is heard again, unless the run ends."""
        limit_s = self.silence.limit_of(rank)
        limit = f"no heartbeat for {QUIET_S:g} s; after {limit_s:g} s it counts as lost"
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


def grpc_options(options: LinkOptions) -> Iterable[tuple[str, object]]:
    """The gRPC options of a connection.

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
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", 4),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
