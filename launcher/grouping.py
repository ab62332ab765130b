"""Items by what they have in common, and the leaves of nested values."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items with each key, in their order; keys in the order in which they appear."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and of lists of mappings, by dotted key."""
    for key, inner in value.items():
        if isinstance(inner, list | tuple) and any(isinstance(item, Mapping) for item in inner):
            inner = {str(index): item for index, item in enumerate(inner)}
        if isinstance(inner, Mapping):
            yield from leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner
