"""Recognises files that aren't valid traces: other kinds, values that JSON doesn't have, and damage."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any

import msgspec

from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.trace.kineto.classify import DEVICES_NOT_READ, OTHER_CATEGORIES
from gpurun.launcher.units import first_of

MAX_NAMED = 6
"""Keys or categories in a message."""
_STARTS = (
    (b"SQLite format 3", "an SQLite database, such as Nsight Systems exports"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ", "compressed by xz"),
    (b"\x1f\x8b", "compressed by gzip twice"),
    (b"\x80", "a pickle, such as a memory snapshot"),
    (b"<", "HTML or XML"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose file `git lfs pull` gets"),
)
_DOCUMENTS = (
    ({"schema", "nodes"}, "a PyTorch execution trace, which has no times"),
    ({"rocprofiler-sdk-tool"}, "a result of rocprofv3"),
    ({"$schema", "profiles"}, "a speedscope profile"),
    ({"segments", "device_traces"}, "a memory snapshot"),
)
_WRITERS = (
    ("viztracer_metadata", "VizTracer"),
    ("xctrace", "Xcode"),
    ("otherData", "another tracer"),
    ("metadata", "another tracer, such as XLA's (JAX, TensorFlow) or Chrome's"),
)
TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
"""Strings and brackets of JSON. A string without an end is one token, or each escaped quote in it would be
tried as a beginning; nothing is kept to go back to."""
_VALUE = re.compile(rb'null|true|false|-?[0-9][0-9.eE+-]*|"[^"\\]*"')
_COLON = re.compile(rb"\s*:")


def kind_of_file(head: bytes) -> str:
    """The kind of a file that begins neither with an object nor with a list: `a zip archive, not JSON`."""
    if _VALUE.fullmatch(head.strip()):
        return "JSON, but a single value instead of events"
    known = next((what for start, what in _STARTS if head.startswith(start)), None)
    return f"{known}, not JSON" if known else f"not JSON, but {_content(head)}"


def _content(head: bytes) -> str:
    """The beginning of a file of no known kind: `text that begins with "hello"`."""
    text = head.decode("utf-8", "replace").strip()
    if not text.replace("\n", "").replace("\t", "").isprintable() or "\ufffd" in text[:-1]:
        return "binary data"
    line = text.splitlines()[0] if text else ""
    return f'text that begins with "{line[:20]}"' if text else "nothing but spaces"


def kind_of_document(text: bytes | bytearray) -> str:
    """The kind of a JSON object without events, by its keys; or that it is cut off."""
    keys, is_whole = _top_keys(text)
    for needed, what in _DOCUMENTS:
        if needed <= set(keys):
            return f"{what}, not a trace of torch.profiler"
    if not is_whole:
        return "cut off, or not a trace of torch.profiler"
    return f"JSON with the keys {_listed(keys)}, not a trace" if keys else "JSON without keys, not a trace"


def _top_keys(text: bytes | bytearray) -> tuple[list[str], bool]:
    """The keys of the outermost object, as far as the text goes; whether it has all of them."""
    keys: list[str] = []
    depth = 0
    for token in TOKENS.finditer(text):
        mark = token.group()
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        elif depth == 1 and _COLON.match(text, token.end()):
            keys.append(mark[1:-1].decode("utf-8", "replace"))
    return keys, depth == 0


def kind_of_events(header: Mapping[str, Any], categories: Iterable[str | None]) -> str:
    """The kind of a trace without anything of Kineto's, by its header and the categories of its events."""
    for key, who in _WRITERS:
        if key in header:
            return f"a trace of {who}, not of Kineto (torch.profiler)"
    if "traceEvents" not in header:
        return "a bare list of events, as Chrome's tools write, not a trace of Kineto (torch.profiler)"
    named = sorted(each for each in categories if each is not None)
    if named:
        return f"only events of the categories {_listed(named)}"
    return "only events without a category, which Kineto (torch.profiler) never writes"


def notes_on_categories(categories: Collection[str | None]) -> Iterator[Finding]:
    """Notes on events that were left out for their category."""
    for device in devices_not_read(categories):
        yield noticed("device-not-read", device=device)
    unknown = sorted(
        each
        for each in categories
        if each is not None and each not in OTHER_CATEGORIES and each not in DEVICES_NOT_READ
    )
    if unknown:
        yield noticed("unknown-categories", categories=_listed(unknown))


def devices_not_read(categories: Iterable[str | None]) -> list[str]:
    """Devices whose work the trace holds, but not in a form that the analysis reads."""
    return sorted({DEVICES_NOT_READ[each] for each in categories if each in DEVICES_NOT_READ})


def _listed(names: Collection[str]) -> str:
    return first_of([repr(name[:40]) for name in names], MAX_NAMED)


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


def cleaned(text: bytes) -> bytes:
    """`text` as valid JSON.

    Kineto has written `nan` and `inf`, raw control characters, broken UTF-8 and halves of surrogate pairs.
    """
    # Neither does by `re.sub`, which holds 100 bytes for each number or escape that it finds.
    text = _with_numbers(text.translate(_CONTROL_TO_SPACE), lambda _: b"null")
    return _whole_pairs(text).decode("utf-8", "replace").encode()


def find_damage(text: bytes) -> tuple[int, str] | None:
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
