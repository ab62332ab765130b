"""The built-in workloads by name; a module, and torch with it, is imported when its workload is built."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Builtin:
    """Where a built-in workload is and what it is for, in words for a listing."""

    module: str
    summary: str

    def load(self) -> Callable[..., Any]:
        """The module's `build` function."""
        build: Callable[..., Any] = importlib.import_module(self.module).build
        return build


BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "gpt": Builtin("workloads.gpt", "a small causal language model on the Python library's own source"),
        "mlp": Builtin("workloads.mlp", "a multi-layer perceptron on random vectors"),
        "sleep": Builtin("workloads.sleep", "sleeps alpha + beta·b ms per device: steps of a known duration"),
    }
)
