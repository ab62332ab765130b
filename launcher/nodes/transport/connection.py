"""One end's state of a connection: which messages have come, and when it heard of the other end. Pure.

gRPC keeps a stream in order and connects again, but a new stream knows nothing of what was lost with the old
one. So messages are numbered, and kept until the other end has confirmed them.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

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


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[StreamFrame] = msgspec.msgpack.Decoder(StreamFrame)


def encode_frame(frame: StreamFrame) -> bytes:
    return _encoder.encode(frame)


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
