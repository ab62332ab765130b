"""JSON that isn't quite: what writers of traces are known to get wrong is mended, all else is located."""

from __future__ import annotations

import re

import msgspec

_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)(-?(?:nan|inf(?:inity)?))(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL_TO_SPACE = bytes([32] * 32) + bytes(range(32, 256))
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape in a string; the group holds half of a surrogate pair without the other half."""
_PLACE = re.compile(r"^(?:JSON is malformed: )?(.*) \(byte (\d+)\)$")
_SKIPPED = msgspec.json.Decoder(msgspec.Raw)
"""Checks the text without building anything of it."""


def cleaned(text: bytes) -> bytes:
    """`text` as JSON has it.

    Kineto has written `nan` and `inf`, raw control characters, broken UTF-8 and halves of surrogate pairs.
    """
    text = text.translate(_CONTROL_TO_SPACE)
    text = _NOT_A_NUMBER.sub(lambda match: match[1] + b"null", text)
    return _whole_pairs(text).decode("utf-8", "replace").encode()


def find_damage(text: bytes) -> tuple[int, str] | None:
    """Byte and kind of the first damage that `cleaned` doesn't mend; `None` if `text` only ends too early."""
    even = _NOT_A_NUMBER.sub(lambda match: match[1] + b"0".ljust(len(match[2])), text)
    try:
        _SKIPPED.decode(_whole_pairs(even.translate(_CONTROL_TO_SPACE)))
    except (msgspec.DecodeError, RecursionError) as error:
        found = _PLACE.match(str(error))
        return (int(found[2]), found[1]) if found else None
    return None


def _whole_pairs(text: bytes) -> bytes:
    """Replaces half pairs, with as many bytes, by what stands for an unknown character."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], text)
