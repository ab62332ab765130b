"""Messages of one connection in order, each delivered once, however often the connection breaks. Pure.

gRPC keeps a stream in order and connects again, but a new stream knows nothing of what was lost with the old
one. So messages are numbered, and kept until the other end has confirmed them.
"""

from collections import deque

import msgspec

HEARTBEAT = 0
"""The number of a frame without a message."""


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One gRPC message of a stream."""

    number: int
    """From 1 in each direction, or `HEARTBEAT`."""
    received: int
    """The number of the last message that arrived from the other end."""
    payload: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode_frame(content: bytes) -> Frame:
    """The frame.

    Raises:
        ValueError: it is none.
    """
    try:
        return _decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a frame: {error}") from error


class Lane:
    """One end's messages to the other end, and the numbers of those that came."""

    def __init__(self) -> None:
        self._unconfirmed: deque[bytes] = deque()
        self._first = 1
        """Number of the first unconfirmed message."""
        self._next = 1
        """Number of the next message to send on the current stream."""
        self._received = 0
        self._reported = 0
        """What the other end knows of `_received`, if the current stream holds."""

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

    def next_frame(self) -> Frame | None:
        """What to send now: a message, a confirmation, or nothing."""
        position = self._next - self._first
        if position < len(self._unconfirmed):
            self._next += 1
            self._reported = self._received
            return Frame(self._next - 1, self._received, self._unconfirmed[position])
        return self.heartbeat() if self._reported != self._received else None

    def heartbeat(self) -> Frame:
        """Shows that this end is alive, and confirms what came."""
        self._reported = self._received
        return Frame(HEARTBEAT, self._received)

    def accept(self, frame: Frame) -> bytes | None:
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
