"""Who wrote a file: Kineto, a writer whose events are read like its, or a program with a tool of its own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.trace.kineto.classify import (
    DEVICES_NOT_READ,
    KINETO,
    OLD_AUTOGRAD,
    OTHER_CATEGORIES,
    Writer,
)
from gpurun.launcher.trace.kineto.columns import TraceEvent
from gpurun.launcher.units import first_of

HEAD_BYTES = 4096
"""Bytes that suffice to recognise a file that is no JSON."""
MAX_NAMED = 6
"""Keys or categories in a message."""
_UNPACK = "unpack it first"
_STARTS = (
    (b"SQLite format 3", "an SQLite database, such as Nsight Systems exports: `nsys stats` reads it"),
    (b"PK\x03\x04", f"a zip archive: {_UNPACK}"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF"),
    (b"\x28\xb5\x2f\xfd", f"compressed by zstd: {_UNPACK}"),
    (b"BZh", f"compressed by bzip2: {_UNPACK}"),
    (b"\xfd7zXZ", f"compressed by xz: {_UNPACK}"),
    (b"\x1f\x8b", f"compressed by gzip twice: {_UNPACK}"),
    (b"\x80", "a pickle, such as a memory snapshot: pytorch.org/memory_viz draws it"),
    (b"<", "HTML or XML"),
    (b"version https://git-lfs", "a pointer of Git LFS, whose file `git lfs pull` gets"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_PACKET = 0x0A
"""The tag of a packet in a trace of Perfetto."""
_XPLANE = re.compile(rb"\A\n.{0,64}/(host|device):", re.DOTALL)
"""How XLA's profile begins: a plane with a name. Source: `xplane.proto` of TSL."""
_LINES = re.compile(rb"\A\s*\{.*\}[ \t]*\r?\n\s*\{")
"""How JSON Lines begin: an object a line."""
LIST_OF_LISTS = re.compile(rb"\s*\[\s*\[")
_DOCUMENTS = (
    ({"schema", "nodes"}, "a PyTorch execution trace, which has no times", ""),
    ({"rocprofiler-sdk-tool"}, "a result of rocprofv3", ": TraceLens reads it"),
    ({"$schema", "profiles"}, "a speedscope profile", ": speedscope.app draws it"),
    ({"segments", "device_traces"}, "a memory snapshot", ": pytorch.org/memory_viz draws it"),
    ({"CudaEvent"}, "an export of Nsight Systems", ": `nsys stats` reads its report"),
)
_KEYS = (
    ("viztracer_metadata", "VizTracer", "vizviewer"),
    ("xctrace", "Xcode", "Instruments"),
    ("otherData", "another tracer", "ui.perfetto.dev"),
    ("metadata", "another tracer, such as XLA's (JAX, TensorFlow) or Chrome's", "ui.perfetto.dev"),
)
"""Keys of a header, who writes it, and what reads such traces."""
TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
"""Strings and brackets of JSON. A string without an end is one token, or each escaped quote in it would be
tried as a beginning; nothing is kept to go back to."""
_VALUE = re.compile(rb'null|true|false|-?[0-9][0-9.eE+-]*|"[^"\\]*"')
_COLON = re.compile(rb"\s*:")


_OLD_CATEGORIES = {"CPU functions": "cpu_op", "CUDA functions": "kernel"}
"""By the name of the process. Source: torch 1.6, `autograd/profiler.py`, `export_chrome_trace`."""


def as_kineto(events: Sequence[TraceEvent], writer: Writer) -> Sequence[TraceEvent]:
    """The events as Kineto would have written them: with categories."""
    if writer is not OLD_AUTOGRAD:
        return events
    return [replace(each, cat=each.cat or _OLD_CATEGORIES.get(str(each.pid))) for each in events]


def kind_of_file(head: bytes) -> str:
    """The kind of a file that begins neither with an object nor with a list: `a zip archive, not JSON`."""
    if _VALUE.fullmatch(head.strip()):
        return "JSON, but a single value instead of events"
    known = next((what for start, what in _STARTS if head.startswith(start)), None)
    if head[_TAR_MAGIC_AT:].startswith(_TAR_MAGIC):
        known = f"a tar archive: {_UNPACK}"
    if _XPLANE.match(head):
        known = "a profile of XLA (JAX, TensorFlow): TensorBoard's plugin xprof reads it"
    elif head.startswith(_UTF16):
        return "text in UTF-16, as PowerShell writes it, not in UTF-8: convert it first"
    elif known is None and _is_perfetto(head):
        return _of_another("Perfetto", "ui.perfetto.dev")
    if known is None:
        return f"not JSON, but {_content(head)}"
    what, colon, advice = known.partition(": ")
    return f"{what}, not JSON{colon}{advice}"


def _is_perfetto(head: bytes) -> bool:
    """Whether these are packets, each with its length, up to the end. Source: Perfetto's `trace.proto`."""
    at = 0
    while at < len(head):
        length, shift, byte = 0, 0, head[at]
        if byte != _PACKET:
            return False
        for byte in head[at + 1 : at + 6]:
            at, length, shift = at + 1, length | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        at += 1 + length
    return at == len(head) or (len(head) == HEAD_BYTES and any(byte < ord("\t") for byte in head))


def _content(head: bytes) -> str:
    """The beginning of a file of no known kind: `text that begins with "hello"`."""
    text = head[:64].decode("utf-8", "replace").strip()
    if not text.replace("\n", "").replace("\t", "").isprintable() or "\ufffd" in text[:-1]:
        return "binary data"
    line = text.splitlines()[0] if text else ""
    return f'text that begins with "{line[:20]}"' if text else "nothing but spaces"


def is_other_document(text: bytes | bytearray) -> bool:
    """Whether this is no damaged trace, but JSON Lines, a list of lists, or an object of a known kind."""
    return bool(_LINES.match(text) or LIST_OF_LISTS.match(text)) or _known_document(text) is not None


def _known_document(text: bytes | bytearray) -> tuple[str, str] | None:
    """The kind of JSON objects, or of a list of lists, if it is known, and what reads it."""
    if LIST_OF_LISTS.match(text):
        return "a memory timeline", ""
    keys = {*_top_keys(text)[0]}
    return next(((what, reader) for needed, what, reader in _DOCUMENTS if needed <= keys), None)


def kind_of_document(text: bytes | bytearray) -> str:
    """The kind of JSON without events, by its keys; or that it is cut off."""
    without = f"no traceEvents up to byte {len(text)}"
    if known := _known_document(text):
        what, reader = known
        return f"{what}, not a trace of torch.profiler ({without}){reader}"
    keys, is_whole = _top_keys(text)
    are_lines = bool(_LINES.match(text))
    if not is_whole and not are_lines:
        return f"cut off, or not a trace of torch.profiler: {without}"
    named = f"with the keys {_listed(list(dict.fromkeys(keys)))}" if keys else "without keys"
    return f"JSON {'Lines ' if are_lines else ''}{named}, not a trace: {without}"


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


def _of_another(name: str, reader: str) -> str:
    return f"a trace of {name}, not of Kineto (torch.profiler): {reader} reads it"


def kind_of_events(writer: Writer, header: Mapping[str, Any], categories: Iterable[str | None]) -> str:
    """The kind of a trace without anything of Kineto's, by its header and the categories of its events."""
    if writer.reader:
        return _of_another(writer.name, writer.reader)
    for key, who, reader in _KEYS:
        if key in header:
            return _of_another(who, reader)
    if "schemaVersion" in header and OTHER_CATEGORIES.issuperset(categories):
        return "Kineto (torch.profiler) recorded nothing between its start and its end"
    if "traceEvents" not in header:
        return "a bare list of events, as Chrome's tools write, not a trace of Kineto (torch.profiler)"
    named = sorted(each for each in categories if each is not None)
    if named:
        return f"only events of the categories {_listed(named)}"
    return "only events without a category, which Kineto (torch.profiler) never writes"


def notes_on_events(writer: Writer, categories: Collection[str | None]) -> Iterator[Finding]:
    """Notes on who wrote them, and on those that were left out for their category."""
    if writer.note:
        yield noticed(writer.note)
    for device in devices_not_read(KINETO, categories):
        yield noticed("device-not-read", device=device)
    unknown = sorted(
        each
        for each in categories
        if each is not None and each not in OTHER_CATEGORIES and each not in DEVICES_NOT_READ
    )
    if unknown:
        yield noticed("unknown-categories", categories=_listed(unknown))


def devices_not_read(writer: Writer, categories: Iterable[str | None]) -> list[str]:
    """Devices whose work the trace holds, but not in a form that the analysis reads."""
    found = {DEVICES_NOT_READ[each] for each in categories if each in DEVICES_NOT_READ}
    return sorted({*found, *([writer.device] if writer.device else [])})


def _listed(names: Collection[str]) -> str:
    return first_of([repr(name[:40]) for name in names], MAX_NAMED)
