"""The gRPC streams between node 0, which serves, and the others: one stream per node, both ways.

gRPC brings the connection, TLS, keepalive, flow control, limits and reconnection. Everything here runs in one
event loop, and reports to the command through a function that may be called from that loop.

gRPC keeps a stream in order and connects again, but a new stream knows nothing of what was lost with the old
one. So messages are numbered, and kept until the other end has confirmed them.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import msgspec

from gpurun.launcher.nodes.messages import End, LogText, Message, decode, encode
from gpurun.launcher.nodes.transport.credentials import NODE_NAME, NodeCertificate

PULSE_S = 1.0
"""The time between two heartbeats of a node that has nothing else to send."""
CLOSED_S = 5.0
"""A node whose connection was closed by its kernel, and that does not connect again, has ended."""
QUIET_S = 3.0
"""When users are informed that a node is silent, which may pass."""
BUSY_S = 1.0
"""A node that did not listen for this long can't judge whether others were silent."""

HEARTBEAT = 0
"""The number of a frame without a message."""


class StreamFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One gRPC message of a stream."""

    number: int
    """The number of the message, from 1 in each direction, or `HEARTBEAT`."""
    received: int
    """The number of the last message that arrived from the other end."""
    payload: bytes = b""


_decoder: msgspec.msgpack.Decoder[StreamFrame] = msgspec.msgpack.Decoder(StreamFrame)


def decode_frame(content: bytes) -> StreamFrame:
    """The frame.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a frame: {error}") from error


class MessageLane:
    """One end's messages to the other end, and the numbers of those that came."""

    def __init__(self) -> None:
        self._unconfirmed: deque[bytes] = deque()
        self._first = 1
        """Number of the first unconfirmed message."""
        self._next = 1
        """Number of the next message to send on the current stream."""
        self._received = 0
        self._reported = 0
        """The value of `_received` that the other end knows, if the current stream holds."""

    @property
    def is_settled(self) -> bool:
        """Whether both ends have, and know that the other has, all messages so far."""
        return not self._unconfirmed and self._reported == self._received

    def put(self, payload: bytes) -> None:
        """Appends a message."""
        self._unconfirmed.append(payload)

    def rewind(self) -> None:
        """A new stream begins: what is not confirmed is sent again."""
        self._next, self._reported = self._first, -1

    def next_frame(self) -> StreamFrame | None:
        """The next frame to send: a message, a confirmation, or nothing."""
        position = self._next - self._first
        if position < len(self._unconfirmed):
            self._next += 1
            self._reported = self._received
            return StreamFrame(self._next - 1, self._received, self._unconfirmed[position])
        return self.heartbeat() if self._reported != self._received else None

    def heartbeat(self) -> StreamFrame:
        """Shows that this end is alive, and confirms what came."""
        self._reported = self._received
        return StreamFrame(HEARTBEAT, self._received)

    def accept(self, frame: StreamFrame) -> bytes | None:
        """The message of a frame, unless it came before.

        Raises:
            ValueError: no end of this lane sends such a frame.
        """
        num_confirmed = frame.received - self._first + 1
        if not 0 <= frame.number <= self._received + 1 or num_confirmed > len(self._unconfirmed):
            raise ValueError(f"frame {frame.number} after {self._received}, confirming {frame.received}")
        for _ in range(num_confirmed):
            self._unconfirmed.popleft()
        self._first += max(0, num_confirmed)
        self._next = max(self._next, self._first)
        if frame.number <= self._received:
            return None
        self._received = frame.number
        return frame.payload


@dataclass
class Silence:
    """When the other nodes were heard last.

    Node 0 listens to all other nodes, which listen to node 0 only. All times are of this node's own
    monotonic clock.
    """

    limit_s: float
    now_s: float
    """When it was checked last."""
    suspicious: bool = False
    """Whether ranks have already lost their peers; then half of the limit is enough."""
    heard_s: dict[int, float] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    """Nodes whose connection was closed while it worked."""
    quiet: set[int] = field(default_factory=set)
    """Nodes that users know to be silent."""

    def hear(self, rank: int, now_s: float) -> None:
        """Something came from this node."""
        self.heard_s[rank] = now_s
        self.closed.discard(rank)

    def close(self, rank: int, now_s: float) -> None:
        """The connection to a node ended: by the other end, if the node was heard shortly before."""
        if rank in self.heard_s and now_s - self.heard_s[rank] < 2 * PULSE_S:
            self.closed.add(rank)

    def is_heard(self, rank: int, now_s: float) -> bool:
        """Whether a node is there, as far as one can know: not if it may just be started again."""
        return rank not in self.closed and now_s - self.heard_s.get(rank, -math.inf) <= QUIET_S

    def check(self, now_s: float) -> tuple[int, float] | None:
        """The node that has been silent for too long, and for how many seconds."""
        away_s = now_s - self.now_s
        if away_s > BUSY_S:
            self.heard_s = {rank: heard_s + away_s for rank, heard_s in self.heard_s.items()}
        self.now_s = now_s
        over = {rank: now_s - heard_s for rank, heard_s in self.heard_s.items()}
        late = {rank: over_s for rank, over_s in over.items() if over_s > self.limit_of(rank)}
        return max(late.items(), key=lambda item: item[1]) if late else None

    def changes(self) -> dict[int, bool]:
        """Nodes that have become silent since the last call, `True`, and those that are back, `False`."""
        now_quiet = {rank for rank, heard_s in self.heard_s.items() if self.now_s - heard_s > QUIET_S}
        changed = now_quiet ^ self.quiet
        self.quiet = now_quiet
        return {rank: rank in now_quiet for rank in sorted(changed)}

    def limit_of(self, rank: int) -> float:
        """The seconds of silence after which the node is lost, as things are."""
        limit_s = self.limit_s / 2 if self.suspicious else self.limit_s
        return min(limit_s, CLOSED_S) if rank in self.closed else limit_s


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
    identity: NodeCertificate | None
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
            await write(encode(frame))
        try:
            await asyncio.wait_for(peer.wake.wait(), PULSE_S)
        except TimeoutError:
            if peer.stream == number:
                await write(encode(peer.lane.heartbeat()))


class LinkEnd:
    """The part that both ends have in common."""

    def __init__(self, options: LinkOptions, report: Reporter) -> None:
        self.options, self.report = options, report
        self.silence = Silence(options.silence_s, time.monotonic())
        self.ended = False
        """Whether the end of the run was announced."""
        self.hosts: tuple[str, ...] = ()
        """The hosts by node rank, once all nodes have joined."""
        self.peers: dict[int, Peer] = {}
        """The other ends by rank; of several that claim a rank, the first that connected."""
        self.awaited_others = 0
        """How many nodes have to connect before everything is said."""

    def host_of(self, rank: int) -> str:
        """The host of a node, as users call it."""
        return self.hosts[rank] if self.hosts else self.peers[rank].host

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
