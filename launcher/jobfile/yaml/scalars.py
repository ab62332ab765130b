"""The values of plain scalars by YAML 1.2's core schema.

PyYAML implements YAML 1.1, where `3:1` is the number 181, `no` is false and `1e-3` is text: all three would
turn a job file into something that its author did not write.

Source: https://yaml.org/spec/1.2.2/#103-core-schema
"""

import math
import re
from collections.abc import Mapping

Scalar = str | int | float | bool | None

SCALAR_TAGS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "null": (type(None),),
}
"""The values that may have a tag, such as `!!int`."""

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BASES = {"0o": 8, "0x": 16}

_MAX_DIGITS = 40
"""More digits are far outside the range below; Python refuses to convert more than 4,300."""

_INTEGERS = range(-(2**63), 2**64)
"""The integers that the JSON files of a run can hold."""


def resolve_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar.

    Raises:
        ValueError: a number that is not finite, or too large for the files of a run.
    """
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"`{text}` is not a number that a job can use")
    return text


def _integer(text: str) -> int:
    number = int(text, _BASES.get(text[:2], 10)) if len(text) <= _MAX_DIGITS else None
    if number is None or number not in _INTEGERS:
        raise ValueError(f"the number {text[:20]}… is too large")
    return number


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number
