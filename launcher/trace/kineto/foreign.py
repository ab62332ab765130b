"""Names files that aren't Kineto traces for what they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gpurun.launcher.trace.kineto.classify import DEVICES_NOT_READ, OTHER_CATEGORIES

MAX_NAMED = 6
"""Keys or categories in a message."""
_STARTS = (
    (b"SQLite format 3", "an SQLite database, such as Nsight Systems exports"),
    (b"PK\x03\x04", "a zip archive"),
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
    """What a file is that begins neither with an object nor with a list: `a zip archive, not JSON`."""
    if _VALUE.fullmatch(head.strip()):
        return "JSON, but a single value instead of events"
    known = next((what for start, what in _STARTS if head.startswith(start)), None)
    return f"{known}, not JSON" if known else "not JSON"


def kind_of_document(text: bytes | bytearray) -> str:
    """What a JSON object without events is, by its keys; or that it is cut off."""
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
    """What a trace without anything of Kineto's is, by its header and the categories of its events."""
    for key, who in _WRITERS:
        if key in header:
            return f"a trace of {who}, not of Kineto (torch.profiler)"
    if "traceEvents" not in header:
        return "a bare list of events, as Chrome's tools write, not a trace of Kineto (torch.profiler)"
    named = sorted(each for each in categories if each is not None)
    if named:
        return f"only events of the categories {_listed(named)}"
    return "only events without a category, which Kineto (torch.profiler) never writes"


def notes_on_categories(categories: Collection[str | None]) -> list[str]:
    """What a reader must know about events that were left out for their category."""
    found = [f"work on the {each} isn't read" for each in devices_not_read(categories)]
    unknown = sorted(
        each
        for each in categories
        if each is not None and each not in OTHER_CATEGORIES and each not in DEVICES_NOT_READ
    )
    if unknown:
        found.append(f"events of unknown categories left out: {_listed(unknown)}")
    return found


def devices_not_read(categories: Iterable[str | None]) -> list[str]:
    """Devices whose work the trace holds, but not in a form that the analysis reads."""
    return sorted({DEVICES_NOT_READ[each] for each in categories if each in DEVICES_NOT_READ})


def _listed(names: Collection[str]) -> str:
    shown = [repr(name[:40]) for name in list(names)[:MAX_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
