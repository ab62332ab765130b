"""Values of a job file in words, for messages."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

_MAX_CHARS = 40
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_NOT_TEXTS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
"""Words that YAML takes for something else."""

_WITH_UNIT = re.compile(r"([0-9]{1,9})(?: ?[A-Za-z]{2,}| ?x|[,;])")
_THOUSANDS = re.compile(r"[0-9]{1,3}([_,][0-9]{3}){1,3}")
_MULTIPLE = re.compile(r"([0-9]{1,6}) ?([kKM])")
_MULTIPLES = {"k": 1000, "K": 1000, "M": 10**6}
_VARIABLE = re.compile(r"\$(\w|\{\w)")

_TRUTHS = {
    **dict.fromkeys(("yes", "on", "y", "1"), "true"),
    **dict.fromkeys(("no", "off", "n", "0"), "false"),
}
"""Other spellings of `true` and `false`, YAML 1.1 among them."""


def describe(value: Any) -> str:
    """Describes `value`: `the text "64"`, `the number 3`, `a list`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"the number {shorten(str(value))}"
    if isinstance(value, str):
        return f'the text "{shorten(value)}"'
    return "a list" if isinstance(value, list | tuple) else "a mapping"


def correction(value: Any, *wanted: type) -> str | None:
    """How to write a value that is of none of the types `wanted`, but was meant to be."""
    if value is None:
        return "write a value, or remove it"
    number = value.lstrip("+-") if isinstance(value, str) else ""
    if (number.isdecimal() and {int, float} & set(wanted)) or (value in ("true", "false") and bool in wanted):
        return "write it without quotes"
    if isinstance(value, float) and value.is_integer() and int in wanted:
        return f"write {value:.0f}"
    if isinstance(value, str) and int in wanted and (meant := _number_in(value)) is not None:
        return f"write {meant}"
    if isinstance(value, str) and _VARIABLE.search(value):
        return f"a job file has no variables; on the command line: --set KEY={shorten(value)}"
    if bool in wanted and (truth := truth_in(value)):
        return f"write {truth}"
    if isinstance(value, bool | int | float) and str in wanted:
        return "put it in quotes"
    return None


def _number_in(text: str) -> int | None:
    """The whole number of `64 samples`, `1,024` or `1k`."""
    if found := _WITH_UNIT.fullmatch(text):
        return int(found[1])
    if found := _MULTIPLE.fullmatch(text):
        return int(found[1]) * _MULTIPLES[found[2]]
    return int(re.sub("[_,]", "", text)) if _THOUSANDS.fullmatch(text) else None


def truth_in(value: Any) -> str | None:
    """`true` or `false` for a value that others write so: `on`, `yes please`."""
    text = str(value).lower()
    first = text.partition(" ")[0]
    return _TRUTHS.get(text) or (_TRUTHS.get(first) if first.isalpha() else None)


def shorten(text: str) -> str:
    """`text` in one line of at most 40 characters."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def flow_text(value: Any) -> str:
    """`value` in one line of YAML: `[even, "3:1"]`; whatever isn't a plain word is in quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{flow_text(key)}: {flow_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow_text, value))}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXTS:
        return value
    return json.dumps(value, ensure_ascii=False, default=lambda unreadable: "…")


def any_of(words: Sequence[str]) -> str:
    """`` `a`, `b` or `c` ``."""
    *most, last = (f"`{word}`" for word in words)
    return f"{', '.join(most)} or {last}" if most else last


def did_you_mean(word: str, words: Iterable[str]) -> str | None:
    """A question that names all of `words` that are one slip away, else the nearest, if one is near."""
    choices = list(words)
    near = nearest(word, choices)
    if near is None:
        return None
    if near.lower() == word.lower():
        return f"did you mean `{near}`?"
    others = [each for each in choices if each != near and _is_one_slip(word.lower(), each.lower())]
    return f"did you mean {any_of([near, *others])}?"


def near_or_all(word: str, words: Iterable[str], what: str) -> str:
    """Advice for a word that is none of `words`: the one that may be meant, and all of them."""
    choices = list(words)
    near, listed = did_you_mean(word, choices), ", ".join(choices)
    return f"{near} The {what} are {listed}" if near else f"the {what} are {listed}"


def _is_one_slip(word: str, other: str) -> bool:
    """Whether the two differ by one letter: another one, one more or one less."""
    same = _num_shared(word, other)
    rest, other_rest = word[same:], other[same:]
    end = _num_shared(rest[::-1], other_rest[::-1])
    return len(rest) - end <= 1 and len(other_rest) - end <= 1


def _num_shared(word: str, other: str) -> int:
    """The number of letters with which both begin."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(word, other, strict=False))))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The one of `words` that `word` may be a slip or the beginning of, if there is one."""
    import difflib

    by_lower = {each.lower(): each for each in words}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.65) or _begun(
        word.lower(), by_lower
    )
    return by_lower[near[0]] if near else None


def _begun(start: str, words: Iterable[str]) -> list[str]:
    """The one word that begins so; none where several do or the beginning is of less than 3 letters."""
    begun = [word for word in words if word.startswith(start)]
    return begun if len(begun) == 1 and len(start) >= 3 else []
