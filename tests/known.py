"""For tests: values that may be missing in general, but not here."""

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """The value itself; fails where there is none."""
    assert value is not None
    return value
