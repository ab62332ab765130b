"""The output of programs as readable lines. Pure.

A progress bar redraws itself with carriage returns and cursor movements, which garble the output of several
ranks. Only the last state of every line is kept, without cursor movements.
"""

import re
from collections.abc import Mapping
from typing import TextIO

MAX_LINE_BYTES = 1 << 14
"""A longer line is cut into several, to bound the memory that endless output needs."""

_PROFILER = (
    r"(?:USDT:[-\d]+ [:\d]+ \d+:\d+ [\w.]+:\d+\] "
    r"|ERROR: External init callback must run in same thread as registerClient \()"
)
"""How lines begin that Kineto prints; the second in each thread but the main one, where it traces as well."""
_NEEDLESS = re.compile(
    rf"{_PROFILER}|ERROR:[-\d]+ [:\d]+ \d+:\d+ DeviceProperties\.cpp:\d+\] "
    r"gpuGetDeviceCount failed with code (?:35|100)\s*$"
    r'|  File "(?:[^"]*/gpurun/launcher/worker/[^"]*|<frozen runpy>)", line \d+ in \w+\s*$'
)
"""What torch prints without need: its profiler whenever it starts or stops, and, from a build for CUDA, where
there is no driver (35) or no GPU (100). A job on GPUs fails there before it traces, with its own message. And
what runs a program, in a stack of faulthandler, which tracebacks don't have either."""
_INTERRUPTED = re.compile(
    r"\[W[-\d]* ?[:.\d]+ TCPStore\.cpp:\d+\] .* - retrying \(.*\): Interrupted system call\s*$"
)
"""What torch prints when a signal of ours, for a stack, has interrupted a connection."""
_ADDRESSES = re.compile(
    r"Exception raised from .+ \(most recent call first\):\s*$"
    r"|frame #\d+: .+ \(0x[0-9a-f]+ in .+\)\s*$|<omitting python frames>\s*$"
)
"""What torch prints behind that: the addresses of C++ functions."""

_ANNOUNCED = re.compile(rf"{_PROFILER}[^\n]*\n".encode())
"""What the profiler prints when it starts or stops, also behind a progress bar, which then goes on."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
"""Source: ECMA-48, 5.4 (CSI sequences) and 5.6 (OSC strings)."""
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Also what makes a terminal show text in another order or on other lines than it has.

Source: Unicode Standard Annex #9, 2 (directional formatting characters).
"""
_PREFIX_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""SGR codes: cyan, yellow, green, magenta, blue, and their bright ones."""


def has_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether colours may be written: to a terminal that shows them, unless the user wants none.

    Source: https://no-color.org
    """
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class LineReader:
    """Cuts a stream into lines, however it is divided into portions; leaves out needless ones."""

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn = False
        self._needless = NeedlessLines()

    def feed(self, portion: bytes) -> list[str]:
        """The lines that this portion completes."""
        text = self._rest + portion.translate(None, b"\0")  # holes of sparse files
        *lines, rest = _ANNOUNCED.sub(b"", text).split(b"\n")
        found = [self._line(line) for line in lines]
        self._redrawn = b"\r" in rest.rstrip(b"\r") or (self._redrawn and not lines)
        rest = _last_state(rest)
        while len(rest) > MAX_LINE_BYTES:
            found.append(clean(rest[:MAX_LINE_BYTES].decode("utf-8", "replace")))
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return self._said(found)

    @property
    def bar(self) -> str | None:
        """The text that a progress bar shows now; `None`: the current line is no progress bar."""
        return self.unfinished or None if self._redrawn else None

    @property
    def unfinished(self) -> str:
        """The beginning of the current line."""
        return clean(self._rest.decode("utf-8", "replace"))

    def finish(self) -> list[str]:
        """The last line, if no newline ended it."""
        rest, self._rest, self._redrawn = self._rest, b"", False
        return self._said([self._line(rest)] if rest.strip() else [])

    def _said(self, lines: list[str]) -> list[str]:
        return [line for line in lines if not self._needless.has(line)]

    def _line(self, line: bytes) -> str:
        return clean(_last_state(line).rstrip(b"\r").decode("utf-8", "replace"))


def _last_state(line: bytes) -> bytes:
    """The text after the last carriage return; one at the very end has not been followed by text yet."""
    body = line.rstrip(b"\r")
    return body[body.rfind(b"\r") + 1 :] + line[len(body) :][:1]


def clean(text: str) -> str:
    """The text without control characters and escape sequences, but for colours."""
    text = _ESCAPE.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", text)
    return _CONTROL.sub("", text)


def escaped(text: str) -> str:
    """JSON whose strings have what `clean` would remove as `\\u202b`."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class NeedlessLines:
    """Finds the lines of a stream that say nothing about the program; only the log file has them."""

    def __init__(self) -> None:
        self._is_interrupted = False

    def has(self, line: str) -> bool:
        """Whether torch wrote the next line without need."""
        goes_on = self._is_interrupted and _ADDRESSES.match(line)
        self._is_interrupted = bool(goes_on or _INTERRUPTED.match(line))
        return self._is_interrupted or _NEEDLESS.match(line) is not None

    def without(self, text: bytes) -> bytes:
        """The next bytes without such lines; all others as they are."""
        lines = _ANNOUNCED.sub(b"", text).splitlines(keepends=True)
        return b"".join(line for line in lines if not self.has(line.decode("utf-8", "replace")))


def plain(text: str) -> str:
    """Whole lines of text without control characters and escape sequences, colours included."""
    return _COLOUR.sub("", clean(text))


def prefixed(rank: int, text: str, colour: bool) -> str:
    """`[rank 3] text`; if not `colour`, the text's own colours are removed too."""
    if not colour:
        return f"[rank {rank}] {_COLOUR.sub('', text)}"
    code = _PREFIX_COLOURS[rank % len(_PREFIX_COLOURS)]
    reset = "\x1b[0m" if "\x1b" in text else ""
    return f"\x1b[{code}m[rank {rank}]\x1b[0m {text}{reset}"
