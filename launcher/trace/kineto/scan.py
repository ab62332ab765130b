"""The text of a trace, before it is parsed: where events begin and end, and mistakes of known writers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
import numpy as np

from gpurun.launcher.trace.intervals import Int64

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_OPENS_EVENTS = re.compile(rb"\s*:\s*\[")
_BRACKETS = np.zeros(256, dtype=np.int8)
_BRACKETS[[ord("{"), ord("[")]] = 1
_BRACKETS[[ord("}"), ord("]")]] = -1
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


@dataclass(frozen=True, eq=False)
class Scan:
    """Byte positions in a text that starts between two events of the array."""

    starts: Int64
    """First byte of each complete event."""
    ends: Int64
    """Byte after each complete event."""
    close: int | None
    """Position of the bracket that closes the array; `None` if the text ends before it."""


def scan_events(text: bytes | bytearray) -> Scan:
    """The complete events of `text`, and the end of their array."""
    codes = np.frombuffer(text, dtype=np.uint8)
    quotes = _quotes(codes)
    brackets = np.flatnonzero(_BRACKETS[codes])
    brackets = brackets[(np.searchsorted(quotes, brackets) & 1) == 0]
    step = _BRACKETS[codes[brackets]].astype(np.int64)
    depth = np.cumsum(step)
    closing = np.flatnonzero(depth < 0)
    if len(closing):
        stop = closing[0]
        brackets, step, depth = brackets[: stop + 1], step[: stop + 1], depth[: stop + 1]
    starts = brackets[(depth == 1) & (step == 1)]
    ends = brackets[(depth == 0) & (step == -1)] + 1
    return Scan(starts[: len(ends)], ends, int(brackets[-1]) if len(closing) else None)


def _quotes(codes: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Int64:
    """Positions of quotes that open or close a string: not those after an odd number of backslashes."""
    quotes = np.flatnonzero(codes == ord('"'))
    slashes = np.flatnonzero(codes == ord("\\"))
    if not len(slashes):
        return quotes
    first = np.flatnonzero(np.diff(slashes, prepend=-2) > 1)
    run_starts = slashes[first]
    run_ends = slashes[np.append(first[1:], len(slashes)) - 1] + 1
    escaped = run_ends[(run_ends - run_starts) % 2 == 1]
    return quotes[~np.isin(quotes, escaped, assume_unique=True)]


def find_events(head: bytes | bytearray) -> int | None:
    """Position after the `[` of the top-level key `traceEvents`; `None` if `head` doesn't reach it."""
    depth = 0
    for token in _TOKENS.finditer(head):
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


def cleaned(text: bytes) -> bytes:
    """`text` as valid JSON.

    Kineto has written `nan` and `inf`, raw control characters, broken UTF-8 and halves of surrogate pairs.
    """
    text = text.translate(_CONTROL_TO_SPACE)
    text = _NOT_A_NUMBER.sub(lambda match: match[1] + b"null", text)
    return _whole_pairs(text).decode("utf-8", "replace").encode()


def find_damage(text: bytes) -> tuple[int, str] | None:
    """Byte and kind of the first damage that `cleaned` doesn't repair; `None` if `text` is only truncated."""
    even = _NOT_A_NUMBER.sub(lambda match: match[1] + b"0".ljust(len(match[2])), text)
    try:
        _SKIPPED.decode(_whole_pairs(even.translate(_CONTROL_TO_SPACE)))
    except (msgspec.DecodeError, RecursionError) as error:
        found = _PLACE.match(str(error))
        return (int(found[2]), found[1]) if found else None
    return None


def _whole_pairs(text: bytes) -> bytes:
    """Replaces half surrogate pairs by the replacement character, in as many bytes."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], text)
