"""Tables and columns that grow while a file is read."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpurun.launcher.trace.kineto.events import Text


class Numbering(dict[Any, int]):
    """Numbers keys 0, 1, 2, … in order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Threads(dict[tuple[Text, Text], int]):
    """Numbers pairs of process and thread, or device and stream; `7` and `"7"` are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.spelled = Numbering()

    def __missing__(self, key: tuple[Text, Text]) -> int:
        self[key] = number = self.spelled[str(key[0]), str(key[1])]
        return number


class Names(dict[tuple[str, str], int]):
    """Numbers pairs of category and name, and classifies each pair once."""

    def __init__(self, classify: Callable[[str, str], int]) -> None:
        super().__init__()
        self.classify = classify
        self._kinds = array("b")

    def __missing__(self, key: tuple[str, str]) -> int:
        self[key] = number = len(self)
        self._kinds.append(self.classify(*key))
        return number

    @property
    def kinds(self) -> NDArray[np.int8]:
        """The class of each pair, by number."""
        return np.array(self._kinds, dtype=np.int8)

    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name in self)


class Columns:
    """Columns that grow in place: concatenating parts at the end would double the memory."""

    def __init__(self) -> None:
        self.columns: dict[str, array[int]] = {}

    def add(self, **columns: NDArray[Any]) -> None:
        for name, values in columns.items():
            if name not in self.columns:
                self.columns[name] = array(values.dtype.char if values.dtype != np.int64 else "q")
            self.columns[name].frombytes(np.ascontiguousarray(values).data.cast("B"))

    def done(self, name: str, dtype: DTypeLike) -> NDArray[Any]:
        """A whole column."""
        return np.frombuffer(self.columns[name], dtype=dtype) if name in self.columns else np.empty(0, dtype)
