"""The environment variables that torch's import reads, and which of them a script sets before it."""

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_"),  # by OpenMP's runtimes, when they are loaded
    *("MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),  # by libraries of linear algebra
    *("TORCH", "PYTORCH", "KINETO_", "TRITON_"),
    *("LD_", "GLIBC_", "MALLOC_"),
)
"""Beginnings of variables that something reads when torch is imported."""
OF_ONE_PROCESS = (
    *("GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),  # of threads, which a fork loses
    *("TORCH_LOGS", "TORCH_TRACE"),  # of log files, which each rank has to open
    *("LD_", "GLIBC_", "MALLOC_"),
)
"""Beginnings of those with which the server doesn't import for all ranks."""


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that differ, of those that torch's import reads, in alphabetical order."""
    names = sorted(before.keys() | now.keys())
    return tuple(
        name for name in names if before.get(name) != now.get(name) and name.startswith(READ_AT_IMPORT)
    )


def shared_by_ranks(script: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a script sets, if the server can import torch with them for all ranks; else none.

    Args:
        script: its path.
        env: of the ranks, which have a number of threads besides.
    """
    source = b""
    with suppress(OSError):
        source = Path(script).read_bytes() if script else b""
    if b"environ" not in source:
        return {}
    found = set_by(source, {"OMP_NUM_THREADS": "", **os.environ, **env})
    return {} if any(name.startswith(OF_ONE_PROCESS) for name in found) else found


def set_by(source: bytes, env: Mapping[str, str]) -> dict[str, str]:
    """The variables, of those that torch's import reads, that a script sets before its first import of
    another package, as far as its text says to what; only those that differ from `env`."""
    found: dict[str, str] = {}
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.parse(source).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] not in sys.stdlib_module_names for name in names):
                break
            for name, value, is_default in _assigned(node):
                if not (is_default and name in {**env, **found}):
                    found[name] = value
    return {name: found[name] for name in changed(env, {**env, **found})}


def _assigned(node: ast.stmt) -> Iterator[tuple[str, str, bool]]:
    """The variables that a statement sets to a text, and whether only where they aren't set."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=place, slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ) if _is_environ(place):
            yield name, value, False
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=place, attr="setdefault"),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ) if _is_environ(place):
            yield name, value, True


def _is_environ(place: ast.expr) -> bool:
    """Whether it is `os.environ`, or `environ`."""
    return ast.unparse(place) in ("os.environ", "environ")
