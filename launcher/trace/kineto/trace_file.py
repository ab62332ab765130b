"""A trace file: its uncompressed bytes, its events a block at a time, and what else it may be.

A block is cut where an event seems to end (`}`, a comma, `{`). Decoding proves whether it did: a cut inside a
string or an event's arguments leaves brackets open, and such JSON never decodes. Brackets are only counted in
that case, and for the end of the array.

Files that aren't valid traces are recognised: other kinds, values that JSON doesn't have, and damage.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.errors import TraceError
from gpurun.launcher.rundir.files import open_file
from gpurun.launcher.trace.intervals import Int64
from gpurun.launcher.trace.kineto.writers import (
    HEAD_BYTES,
    LIST_OF_LISTS,
    TOKENS,
    is_other_document,
    kind_of_document,
    kind_of_file,
)
from gpurun.launcher.units import format_count

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 17
MAX_PADDING_BYTES = 1 << 20
"""Zeros after the compressed data, as block devices and tapes leave them."""
UNPACKED_FREE_BYTES = 256 << 20
UNPACKED_RATIO = 200
"""Kineto traces compress 15 to 40 times; gzip's limit, 1032 times, is that of a zip bomb."""
MAX_UNPACKED_BYTES = 64 << 30
"""The most unpacked bytes of all traces that are read for one answer."""


def allowed_bytes(files: Sequence[Path], among: Sequence[Path] = ()) -> int:
    """How many bytes traces may have together when they are unpacked.

    Args:
        files: the traces.
        among: all traces that are read for the same answer; these get their share of what all may have.
    """
    sizes = {file: size_of(file) for file in {*files, *among}}
    whole = sum(sizes[file] for file in among or files)
    allowed = min(max(UNPACKED_FREE_BYTES, UNPACKED_RATIO * whole), MAX_UNPACKED_BYTES)
    return allowed * sum(sizes[file] for file in files) // max(whole, 1) if among else allowed


def size_of(file: Path) -> int:
    """Bytes of a file without the holes that it may have; 0 if it doesn't exist."""
    try:
        status = file.stat()
    except OSError:
        return 0
    return min(status.st_size, 512 * status.st_blocks or status.st_size)  # some file systems count no blocks


@dataclass
class ReadLimits:
    """The limits of what may still be read."""

    left: int | None = None
    """Unpacked bytes of all files together; `None`: whoever reads decides."""
    within: Sequence[Path] = ()
    """The directories that each file has to be in, as `open_file` takes them."""


ANYTHING = ReadLimits()


class Unpacked:
    """The content of a gzip file, which may have several members and zeros after them.

    `gzip` looks at every zero on its own: a file that is made longer by 20 GB would take hours.
    """

    def __init__(self, raw: FileIO) -> None:
        self._raw = raw
        self._member = zlib.decompressobj(wbits=31)
        self._rest = b""
        """Compressed bytes that are read, but not unpacked yet."""

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` more bytes; none only at the end.

        Raises:
            EOFError: the file ends within a member.
            zlib.error: this isn't gzip, or it is damaged.
        """
        while True:
            if self._member.eof:
                if not self._begin_member():
                    return b""
                self._member = zlib.decompressobj(wbits=31)
            packed = self._rest or self._raw.read(_CHUNK_BYTES)
            if not packed:
                raise EOFError("the file ends within compressed data")
            data = self._member.decompress(packed, num_bytes)
            self._rest = self._member.unconsumed_tail or self._member.unused_data
            if data:
                return data

    def _begin_member(self) -> bool:
        """Passes over zeros to the next member, if there is one."""
        packed = self._rest
        for _ in range(MAX_PADDING_BYTES // _CHUNK_BYTES):
            self._rest = packed.lstrip(b"\0")
            if self._rest:
                return True
            packed = self._raw.read(_CHUNK_BYTES)
            if not packed:
                return False
        return False


@dataclass
class TraceSource(AbstractContextManager["TraceSource"]):
    """A file, plain or gzip judged by its first bytes, read sequentially."""

    path: Path
    file: FileIO | Unpacked
    raw: FileIO
    """The file itself, which may be compressed."""
    packed_bytes: int | None
    """Size on disk if the file is compressed."""
    room: ReadLimits
    """The room that all files have together."""
    position: int = 0
    """Uncompressed bytes read so far."""

    def read(self, num_bytes: int) -> bytes:
        """Up to `num_bytes` more bytes; none only at the end, which may be that of a truncated gzip file.

        Raises:
            TraceError: the disk or the gzip stream fails, or it expands to more than a trace can hold.
        """
        try:
            data = self.file.read(num_bytes)
        except EOFError:
            return b""
        except (OSError, zlib.error) as error:
            raise TraceError(
                f"{self.path}: damaged after byte {self.position} of the uncompressed data: {error}"
            ) from error
        self.position += len(data)
        self._refuse_bomb()
        if self.room.left is not None:
            self.room.left -= len(data)
            if self.room.left < 0:
                text = "left out: together, the traces unpack to more than gpurun reads at once; name fewer"
                raise TraceError(f"{self.path}: {text}")
        return data

    def file_position(self) -> int:
        """Bytes of the file itself, compressed or not, read so far."""
        return os.lseek(self.raw.fileno(), 0, os.SEEK_CUR)

    def _refuse_bomb(self) -> None:
        if self.packed_bytes is None:
            return
        if self.position > max(UNPACKED_FREE_BYTES, UNPACKED_RATIO * self.packed_bytes):
            raise TraceError(
                f"{self.path}: {format_count(self.packed_bytes)} bytes unpack to more than"
                f" {format_count(self.position)}: "
                "this looks like a gzip bomb; if it is a trace, decompress it yourself"
            )

    def __exit__(self, *_: object) -> None:
        self.raw.close()


def open_source(path: Path, room: ReadLimits) -> TraceSource:
    """The file at `path`, ready to read, as far as there is room.

    Raises:
        TraceError: it can't be opened, is empty, is no regular file, or is elsewhere.
    """
    try:
        raw = FileIO(open_file(path, room.within), "rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    try:
        return _source(path, raw, room)
    except BaseException:
        raw.close()
        raise


def _source(path: Path, raw: FileIO, room: ReadLimits) -> TraceSource:
    num_bytes = os.fstat(raw.fileno()).st_size
    if num_bytes == 0:
        raise TraceError(f"{path}: empty (byte 0)")
    if os.pread(raw.fileno(), 2, 0) != GZIP_MAGIC:
        return TraceSource(path, raw, raw, None, room)
    return TraceSource(path, Unpacked(raw), raw, num_bytes, room)


_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)(-?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL_TO_SPACE = bytes([32] * 32) + bytes(range(32, 256))
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in a string; the group holds half of a surrogate pair without the other half."""
_PLACE = re.compile(r"^(?:JSON is malformed: )?(.*) \(byte (\d+)\)$")
_SKIPPED = msgspec.json.Decoder(msgspec.Raw)
"""Validates the text without building objects."""


def _cleaned(text: bytes) -> bytes:
    """`text` as valid JSON.

    Kineto has written `nan` and `inf`, raw control characters, broken UTF-8 and halves of surrogate pairs.
    """
    # Neither does by `re.sub`, which holds 100 bytes for each number or escape that it finds.
    text = _with_numbers(text.translate(_CONTROL_TO_SPACE), lambda _: b"null")
    return _whole_pairs(text).decode("utf-8", "replace").encode()


def _find_damage(text: bytes) -> tuple[int, str] | None:
    """Byte and kind of the first damage that `cleaned` doesn't repair; `None` if `text` is only truncated."""
    even = _with_numbers(text, lambda word: b"0".ljust(len(word)))
    try:
        _SKIPPED.decode(_whole_pairs(even.translate(_CONTROL_TO_SPACE)))
    except (msgspec.DecodeError, RecursionError) as error:
        found = _PLACE.match(str(error))
        return (int(found[2]), found[1]) if found else None
    return None


def _with_numbers(text: bytes, instead: Callable[[bytes], bytes]) -> bytes:
    """Replaces words such as `nan`."""
    parts, last = BytesIO(), 0
    for found in _NOT_A_NUMBER.finditer(text):
        parts.write(text[last : found.start(2)])
        parts.write(instead(found[2]))
        last = found.end(2)
    parts.write(text[last:])
    return parts.getvalue()


def _whole_pairs(text: bytes) -> bytes:
    """Replaces half surrogate pairs by the replacement character, in as many bytes."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    whole = bytearray(text)
    for found in _ESCAPE.finditer(text):
        if found[1]:
            whole[slice(*found.span())] = rb"\ufffd"
    return bytes(whole)


Bytes = NDArray[np.uint8]
_OPENS_EVENTS = re.compile(rb"\s*:\s*\[")
_BRACKETS = np.zeros(256, dtype=np.int8)
_BRACKETS[[ord("{"), ord("[")]] = 1
_BRACKETS[[ord("}"), ord("]")]] = -1
PIECE_BYTES = 1 << 18
"""Scanned at a time: the positions of brackets and quotes may take 18 times the memory of the text."""


@dataclass(frozen=True, eq=False)
class Scan:
    """Byte positions in a text that starts between two events of the array."""

    starts: Int64
    """First byte of each complete event, as far as the text was read."""
    ends: Int64
    """Byte after each of them."""
    close: int | None
    """Position of the bracket that closes the array; `None` if it wasn't reached."""


def scan_events(text: bytes | bytearray) -> Scan:
    """The complete events of `text`, and the end of their array.

    A text longer than `BLOCK_BYTES` is read as far as there is a complete event, at least: whoever takes the
    events out asks again for those that follow.
    """
    scanner = _Scanner()
    for offset in range(0, len(text), PIECE_BYTES):
        scanner.add(np.frombuffer(text, np.uint8, min(PIECE_BYTES, len(text) - offset), offset), offset)
        if scanner.close is not None or (scanner.num_ends and offset >= BLOCK_BYTES):
            break
    return scanner.done()


class _Scanner:
    """Reads a text piece by piece."""

    def __init__(self) -> None:
        self.close: int | None = None
        self.num_ends = 0
        self._starts: list[Int64] = []
        self._ends: list[Int64] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        """Whether a backslash before this piece escapes its first byte."""

    def add(self, codes: Bytes, offset: int) -> None:
        """Reads the piece that begins at byte `offset`."""
        quotes = self._quotes(codes)
        brackets = np.flatnonzero(_BRACKETS[codes])
        brackets = brackets[(np.searchsorted(quotes, brackets) & 1) == self._in_string]
        step = _BRACKETS[codes[brackets]].astype(np.int32)
        depth = np.cumsum(step, dtype=np.int32) + self._depth
        closing = np.flatnonzero(depth < 0)
        if len(closing):
            stop = int(closing[0])
            self.close = int(brackets[stop]) + offset
            brackets, step, depth = brackets[:stop], step[:stop], depth[:stop]
        self._starts.append(brackets[(depth == 1) & (step == 1)] + offset)
        self._ends.append(brackets[(depth == 0) & (step == -1)] + offset + 1)
        self.num_ends += len(self._ends[-1])
        self._in_string ^= bool(len(quotes) & 1)
        self._depth = int(depth[-1]) if len(depth) else self._depth

    def _quotes(self, codes: Bytes) -> Int64:
        """Positions of quotes that open or close a string: not those after an odd number of backslashes."""
        quotes = np.flatnonzero(codes == ord('"'))
        slashes = np.flatnonzero(codes == ord("\\"))
        if self._is_escaped:
            quotes, slashes = quotes[quotes > 0], slashes[slashes > 0]
        self._is_escaped = False
        if not len(slashes):
            return quotes
        first = np.flatnonzero(np.diff(slashes, prepend=-2) > 1)
        run_starts = slashes[first]
        run_ends = slashes[np.append(first[1:], len(slashes)) - 1] + 1
        escaped = run_ends[(run_ends - run_starts) % 2 == 1]
        self._is_escaped = bool(len(escaped)) and int(escaped[-1]) == len(codes)
        return quotes[~np.isin(quotes, escaped, assume_unique=True)]

    def done(self) -> Scan:
        """The events that were found; an event that is still open isn't complete."""
        none = np.empty(0, dtype=np.int64)
        starts, ends = np.concatenate((none, *self._starts)), np.concatenate((none, *self._ends))
        return Scan(starts[: len(ends)], ends, self.close)


def find_events(head: bytes | bytearray) -> int | None:
    """Position after the `[` of the top-level key `traceEvents`; `None` if `head` doesn't reach it."""
    depth = 0
    for token in TOKENS.finditer(head):
        text = token.group()
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
        elif depth == 1 and text == b'"traceEvents"':
            opening = _OPENS_EVENTS.match(head, token.end())
            if opening:
                return opening.end()
    return None


Event = TypeVar("Event")

BLOCK_BYTES = 2 << 20
MAX_PART_BYTES = 16 << 20
"""No event, header or footer of a trace is larger."""

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_SPACE = b" \t\r\n"
_NO_SPACE = re.compile(rb"[^ \t\r\n]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)

_TRAILING = "trailing characters"
"""How msgspec calls what follows a document; it names the byte after the first of them."""
_SECOND = "a second JSON document begins here, as where one file was written to twice"
_AFTER = "bytes that aren't part of the trace follow its end"
_NO_COMMA = "expected a comma between two events"


@dataclass
class Skipped:
    """Entries that are valid JSON but not events: a string for a time, or no name."""

    count: int = 0
    first_byte: int = 0
    reason: str = ""

    def add(self, byte: int, reason: str) -> None:
        if not self.count:
            self.first_byte, self.reason = byte, reason
        self.count += 1


@dataclass
class TraceBlocks(Generic[Event]):
    """Iterates over the blocks of `source`; afterwards, `header` holds all other keys of the file."""

    source: TraceSource
    event_type: type[Event]
    header: dict[str, Any] = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    cut: int | None = None
    """Afterwards: the byte at which the file ends too early, if it does."""

    def __post_init__(self) -> None:
        # Not strictly: numbers may be in quotes.
        self._events_decoder = msgspec.json.Decoder(list[self.event_type], strict=False)  # type: ignore[name-defined]
        self._event_decoder = msgspec.json.Decoder(self.event_type, strict=False)
        self._buffer = bytearray()
        self._after_event = False
        self._offset = 0

    def blocks(self) -> Iterator[tuple[list[Event], bytes]]:
        """Decoded events with the JSON array that they were decoded from.

        Of a truncated file, the events that are whole; then `cut` says where it ends.

        Raises:
            TraceError: the file is not a trace or is damaged; with the byte.
        """
        head = self._read_head()
        while True:
            more = self._fill(BLOCK_BYTES)
            self._pass_comma()
            if more:
                block = self._guess()
                if block is not None:
                    yield block
                    continue
            scan = scan_events(self._buffer)
            if len(scan.ends):
                yield self._exact(scan)
            if scan.close is not None:
                break
            if not len(scan.ends) and not self._grow():
                self._cut_off(head)
                return
        self._drop(scan.close - (int(scan.ends[-1]) if len(scan.ends) else 0), b",")
        if self._buffer[:1] != b"]":
            raise self._damaged(0, "unexpected closing bracket")
        self._read_header(head)

    def _fill(self, num_bytes: int) -> bool:
        """Whether the buffer holds `num_bytes`; if not, the file has ended."""
        while len(self._buffer) < num_bytes:
            data = self.source.read(num_bytes - len(self._buffer))
            if not data:
                return False
            self._buffer += data
        return True

    def _read_head(self) -> bytes:
        size = BLOCK_BYTES
        while True:
            more = self._fill(size)
            start = self._find_start()
            if start is not None:
                head = bytes(self._buffer[:start])
                self._drop(start)
                return head
            if not more or size >= MAX_PART_BYTES:
                raise self._foreign()
            size *= 2

    def _find_start(self) -> int | None:
        text = self._buffer.lstrip(_SPACE + _BYTE_ORDER_MARK)
        if LIST_OF_LISTS.match(text):
            return None
        if text[:1] == b"[":
            return len(self._buffer) - len(text) + 1
        return find_events(self._buffer) if text[:1] == b"{" else None

    def _foreign(self) -> TraceError:
        first = bytes(self._buffer.lstrip(_SPACE)[:1])
        path = self.source.path
        if first not in (b"{", b"["):
            start = len(self._buffer) - len(self._buffer.lstrip(_SPACE))
            return TraceError(f"{path}: byte {start}: {kind_of_file(bytes(self._buffer[:HEAD_BYTES]))}")
        if not is_other_document(self._buffer):
            self._refuse_damage(b"")
        return TraceError(f"{path}: {kind_of_document(self._buffer)}")

    def _guess(self) -> tuple[list[Event], bytes] | None:
        """The block up to the last apparent end of an event in `BLOCK_BYTES`, if it is one."""
        end = min(len(self._buffer), BLOCK_BYTES)
        tail = max(end - (1 << 16), 0)
        ends = [match.start() + 1 for match in _BETWEEN.finditer(self._buffer, tail, end)]
        if not ends:
            return None
        text = self._array(ends[-1])
        try:
            events = self._events_decoder.decode(text)
        except _UNREADABLE:
            return None
        self._drop(ends[-1])
        self._after_event = True
        return events, text

    def _exact(self, scan: Scan) -> tuple[list[Event], bytes]:
        end = int(scan.ends[-1])
        text = self._array(end)
        try:
            events = self._events_decoder.decode(text)
        except _UNREADABLE:
            events, text = self._one_by_one(scan)
        self._drop(end)
        self._after_event = True
        return events, text

    def _array(self, end: int) -> bytes:
        """The first bytes of the buffer as a JSON array."""
        with memoryview(self._buffer) as view:
            return b"".join((b"[", view[:end], b"]"))

    def _pass_comma(self) -> None:
        """Goes to the next event, after the comma, which may be the first byte of this block."""
        found = _NO_SPACE.search(self._buffer)
        if not self._after_event or found is None:
            return
        if found[0] == b",":
            self._drop(found.end())
            self._after_event = False
        elif found[0] != b"]":
            raise self._damaged(0, _NO_COMMA)

    def _one_by_one(self, scan: Scan) -> tuple[list[Event], bytes]:
        """The valid events of a block that doesn't decode as a whole."""
        self._refuse_between(scan)
        events, texts = [], []
        for start, end in zip(scan.starts.tolist(), scan.ends.tolist(), strict=True):
            text = _cleaned(bytes(self._buffer[start:end]))
            try:
                events.append(self._event_decoder.decode(text))
                texts.append(text)
            except msgspec.ValidationError as error:
                self.skipped.add(self._offset + start, str(error))
            except _UNREADABLE as error:
                place, reason = _find_damage(bytes(self._buffer[start:end])) or (0, str(error))
                raise self._damaged(start + place, reason) from error
        return events, b"[" + b",".join(texts) + b"]"

    def _refuse_between(self, scan: Scan) -> None:
        """Exactly one comma separates two events; otherwise the file is damaged there."""
        previous = 0
        for start, end in zip(scan.starts.tolist(), scan.ends.tolist(), strict=True):
            between = bytes(self._buffer[previous:start].strip(_SPACE))
            if between != (b"," if previous else b""):
                self._refuse_damage(b"[", self._buffer[:previous])
                raise self._damaged(previous, _NO_COMMA)
            previous = end

    def _damaged(self, position: int, reason: str) -> TraceError:
        return TraceError(f"{self.source.path}: damaged at byte {self._offset + position}: {reason}")

    def _grow(self) -> bool:
        """Reads more, since the buffer holds no complete event; whether there was more."""
        if len(self._buffer) >= MAX_PART_BYTES:
            self._refuse_damage(b"[")
            raise self._damaged(0, f"an event of more than {format_count(MAX_PART_BYTES)} bytes")
        size = len(self._buffer)
        self._fill(max(2 * size, BLOCK_BYTES))
        if len(self._buffer) == size:
            self._refuse_damage(b"[")
            return False
        return True

    def _cut_off(self, head: bytes) -> None:
        """Notes that the file ends here; of its keys, those before the events are known."""
        self.cut = self._offset + len(self._buffer)
        self._buffer = bytearray(b"]}" if head.lstrip(_SPACE + _BYTE_ORDER_MARK)[:1] == b"{" else b"]")
        self._read_header(head)

    def _refuse_damage(self, opening: bytes, text: bytes | bytearray | None = None) -> None:
        """An event or a header without an end is more often damaged than truncated.

        Args:
            opening: a prefix that makes the text JSON.
            text: the beginning of the buffer; by default all of it.
        """
        damage = _find_damage(opening + (self._buffer if text is None else text))
        if damage is not None:
            raise self._damaged(damage[0] - len(opening), damage[1])

    def _drop(self, count: int, allowed: bytes | None = None) -> None:
        if allowed is not None and self._buffer[:count].strip(_SPACE):
            raise self._damaged(0, "the last entry of the list is not an event")
        del self._buffer[:count]
        self._offset += count

    def _read_header(self, head: bytes) -> None:
        if self._fill(MAX_PART_BYTES):
            raise self._damaged(0, f"more than {format_count(MAX_PART_BYTES)} bytes after the events")
        tail = bytes(self._buffer[1:])
        if head.startswith(_BYTE_ORDER_MARK):
            head = head.replace(_BYTE_ORDER_MARK, b"   ", 1)
        if head.strip(_SPACE) == b"[":
            head, tail = b'{"events":[', tail + b"}"
        whole = head[:-1] + b"null" + tail
        try:
            self.header = msgspec.json.decode(_cleaned(whole))
        except _UNREADABLE as error:
            damage = _find_damage(whole)
            if damage is None and self.cut is None:
                self._cut_off(head)
                return
            place, reason = damage or (len(whole), str(error))
            in_tail = place - (len(whole) - len(tail))
            position = in_tail + 1 if in_tail >= 0 else place - self._offset
            if _TRAILING in reason:
                follows = _SECOND if whole[place - 1 : place] in (b"{", b"[") else _AFTER
                raise self._damaged(position - 1, follows) from error
            raise self._damaged(position, f"outside the event list: {reason}") from error
