"""What a request asks for, checked before anything is done about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_NS = 1 << 53
"""Larger numbers the page's numbers can't hold."""
MIN_WIDTH_PX, MAX_WIDTH_PX = 16, 8192
MAX_LANES = 128
MAX_TEXT = 200
MAX_VARIANTS = 50
MAX_NAME = 4096


class Refused(Exception):
    """A request that gets no answer; `code` is its HTTP status, the text one sentence for a person."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Arguments(Protocol):
    """The part of werkzeug's multi-dictionary that is used here."""

    def get(self, key: str) -> str | None: ...

    def getlist(self, key: str) -> list[str]: ...


@dataclass(frozen=True)
class Query:
    """The parameters of a request.

    Every method raises `Refused` where one is missing or can't be what it should be.
    """

    arguments: Arguments

    def name(self, key: str) -> str:
        """A name, to be looked up in a listing."""
        value = self.arguments.get(key)
        if not value or len(value) > MAX_NAME or "\0" in value:
            raise Refused(400, f"`{key}` is missing or no name")
        return value

    def names(self, key: str) -> list[str]:
        values = self.arguments.getlist(key)
        if not values:
            raise Refused(400, f"`{key}` is missing")
        if len(values) > MAX_VARIANTS:
            raise Refused(413, f"at most {MAX_VARIANTS} of `{key}` at once")
        return values

    def flag(self, key: str) -> bool:
        return self.arguments.get(key) == "1"

    def text(self, key: str) -> str:
        value = self.arguments.get(key) or ""
        if not value or len(value) > MAX_TEXT:
            raise Refused(400, f"`{key}` must have 1 to {MAX_TEXT} characters")
        return value

    def has(self, key: str) -> bool:
        return self.arguments.get(key) is not None

    def choice(self, key: str, options: Sequence[str]) -> str:
        """One of the options, the first by default."""
        value = self.arguments.get(key) or options[0]
        if value not in options:
            raise Refused(400, f"`{key}` must be one of {', '.join(options)}")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        value = self.arguments.get(key)
        if value is None and default is not None:
            return default
        digits = (value or "").removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) <= 17):
            raise Refused(400, f"`{key}` must be a whole number")
        number = int(value or "")
        if not least <= number <= most:
            raise Refused(400, f"`{key}` must lie between {least} and {most}")
        return number

    def one_of(self, key: str, numbers: Collection[int]) -> int | None:
        """One of these numbers, or `None` if the request has none."""
        if not self.has(key):
            return None
        number = self.whole(key, 0, MAX_NS)
        if number not in numbers:
            raise Refused(404, f"there is no {key} {number}; the traces may have changed")
        return number

    def stretch(self) -> tuple[int, int]:
        """`from_ns` and `to_ns`, the first below the second."""
        start = self.whole("from_ns", -MAX_NS, MAX_NS)
        end = self.whole("to_ns", -MAX_NS, MAX_NS)
        if end <= start:
            raise Refused(400, "`to_ns` must be after `from_ns`")
        return start, end

    def lanes(self, num_lanes: int, default_all: bool = False) -> tuple[int, ...]:
        """The lanes asked for, each once."""
        value = self.arguments.get("lanes")
        if value is None and default_all:
            return tuple(range(num_lanes))
        texts = value.split(",") if value and len(value) <= MAX_LANES * 8 else [""]
        if not all(text.isascii() and text.isdecimal() for text in texts):
            raise Refused(400, "`lanes` must be numbers of lanes with commas between them")
        lanes = tuple(dict.fromkeys(map(int, texts)))
        if len(lanes) > MAX_LANES:
            raise Refused(413, f"at most {MAX_LANES} lanes at once")
        if max(lanes) >= num_lanes:
            raise Refused(404, f"there are only {num_lanes} lanes")
        return lanes
