"""The environment variables that torch's import reads, and which of them a program sets before it.

Only the program's text is read.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from gpurun.launcher.syntax import parsed

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
"""Beginnings of variables with which the server doesn't import torch for all ranks."""

IMPORT_TORCH = ("torch", "lightning", "pytorch_lightning", "accelerate", "timm", "deepspeed")
"""Beginnings of packages that import torch at once."""
MOST_FILES = 100
"""Files of a program that are looked at."""
_ENVIRON = ("os.environ", "environ")
_FUNCTIONS = (
    "os.putenv", "os.unsetenv", "putenv", "unsetenv", "load_dotenv", "dotenv.load_dotenv",
    *(f"{place}.{name}" for place in _ENVIRON for name in ("setdefault", "pop", "clear", "__setitem__")),
)  # fmt: skip
"""Functions that change the variable that their first argument names."""


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
    if b"environ" not in source or may_set(script, None):
        return {}
    found = set_by(source, {"OMP_NUM_THREADS": "", **os.environ, **env})
    return {} if any(name.startswith(OF_ONE_PROCESS) for name in found) else found


def set_by(source: bytes, env: Mapping[str, str]) -> dict[str, str]:
    """The variables, of those that torch's import reads, that a script sets before its first import of
    another package, as far as its text says to what; only those that differ from `env`."""
    found: dict[str, str] = {}
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in _known(parsed(source)):
            for name, value, is_default in _assigned(node):
                if not (is_default and name in {**env, **found}):
                    found[name] = value
    return {name: found[name] for name in changed(env, {**env, **found})}


def _known(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a script that run first and for certain: until it may import another package."""
    for node in tree.body:
        parts = list(ast.walk(node))
        names = [alias.name for part in parts if isinstance(part, ast.Import) for alias in part.names]
        names += [part.module or "." for part in parts if isinstance(part, ast.ImportFrom)]
        if any(name.partition(".")[0] not in sys.stdlib_module_names for name in names):
            return
        yield node


def may_set(script: str | None, module: str | None) -> bool:
    """Whether a program may set variables that torch's import reads before it imports torch, besides those
    that `set_by` finds: computed ones, under a condition, in a function, or in its own modules."""
    directory = os.path.dirname(os.path.realpath(script)) if script is not None else os.getcwd()
    search = _Search(Path(directory), script is not None)
    search.run([Path(script)] if script is not None else search.files_of(module or ""))
    return search.found


@dataclass
class _Search:
    """Follows a program's own files in the order in which they run, until they import torch."""

    directory: Path
    """Where its own modules are."""
    has_script: bool
    """Whether the first file is a script, of which `set_by` knows more."""
    found: bool = False
    """Whether a variable may be set."""
    _seen: set[Path] = field(default_factory=set)

    def run(self, files: Iterable[Path]) -> bool:
        """Whether torch is imported when these files have run; the first is the program."""
        return any(self._run_file(file) for file in files if not self.found)

    def files_of(self, module: str) -> list[Path]:
        """The program's own files that the import of a module runs."""
        places = [*accumulate(module.split("."), Path.joinpath, initial=self.directory)][1:]
        last = places[-1]
        files = [*(place / "__init__.py" for place in places), last.with_suffix(".py")]
        if not self._seen:
            files.append(last / "__main__.py")
        return [file for file in files if last != self.directory and file.is_file()]

    def _run_file(self, file: Path) -> bool:
        is_script = self.has_script and not self._seen
        if file in self._seen or len(self._seen) == MOST_FILES:
            return False
        self._seen.add(file)
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            tree = parsed(file.read_bytes())
            known = {id(node) for node in _known(tree) if any(_assigned(node))} if is_script else set()
            return any(self._run(node, file) for node in tree.body if id(node) not in known)
        return False

    def _import(self, name: str) -> bool:
        files = self.files_of(name)
        return self.run(files) if files else name.startswith(IMPORT_TORCH)

    def _run(self, node: ast.AST, file: Path, is_called: bool = True) -> bool:
        """Whether a statement imports torch; what a function does may happen at any later time."""
        if self.found or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            return False
        if isinstance(node, ast.Import | ast.ImportFrom):
            return any(self._import(name) for name in _imported(node, file, self.directory)) and is_called
        self.found |= _may_set_variable(node)
        is_called &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        return any(self._run(child, file, is_called) for child in ast.iter_child_nodes(node))


def _imported(node: ast.Import | ast.ImportFrom, file: Path, directory: Path) -> Iterator[str]:
    """The modules that a statement may import, by their names below the directory."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    above = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else directory
    package = [] if above == directory else list(above.relative_to(directory).parts)
    module = ".".join([*package, *([node.module] if node.module else [])])
    if module:
        yield module
    yield from (f"{module}.{alias.name}" if module else alias.name for alias in node.names)


def _may_set_variable(node: ast.AST) -> bool:
    """Whether it sets, or removes, a variable that torch's import reads, or one whose name isn't known."""
    match node:
        case ast.Subscript(value=place, slice=name, ctx=ast.Store() | ast.Del()) if _is_environ(place):
            names: list[ast.expr | None] = [name]
        case ast.AugAssign(target=place, value=given) if _is_environ(place):
            names = _keys(given)
        case ast.Call(func=ast.Attribute(value=place, attr="update")) if _is_environ(place):
            names = [ast.Constant(word.arg) if word.arg else None for word in node.keywords]
            names += [name for given in node.args for name in _keys(given)]
        case ast.Call(func=called) if ast.unparse(called) in _FUNCTIONS:
            names = [*node.args[:1]] or [None]
        case _:
            return False
    return any(
        not (isinstance(name, ast.Constant) and isinstance(name.value, str))
        or name.value.startswith(READ_AT_IMPORT)
        for name in names
    )


def _keys(given: ast.expr) -> list[ast.expr | None]:
    """The keys of a dictionary; `None`: not known."""
    return given.keys if isinstance(given, ast.Dict) else [None]


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
    return ast.unparse(place) in _ENVIRON
