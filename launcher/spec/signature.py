"""What a workload's function takes, read from its source: nothing of a user's code runs, and no torch loads.

Python code can define a function in ways that only running it tells. Wherever the source leaves a doubt, the
answer is "not known": the worker, which does run it, checks again.
"""

import ast
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 500_000
"""Parsing takes about 0.1 s for a file of this size."""

SIMPLE_TYPES = frozenset({"int", "float", "str", "bool"})

_DYNAMIC = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr"})
"""Functions by which a module may bind names that don't stand in it."""


@dataclass(frozen=True)
class Param:
    """A parameter that a job may give by name."""

    name: str
    is_required: bool
    types: frozenset[str]
    """Of `SIMPLE_TYPES` and `None`; empty if the annotation is missing or says more than these."""
    default: str | None = None
    """As it stands in the source; `None` where there is none."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    params: tuple[Param, ...]
    is_open: bool
    """Whether it takes any other name as well (`**kwargs`)."""


@dataclass(frozen=True)
class Names:
    """The names that a module's source binds at its top level."""

    functions: tuple[str, ...]
    bound: Counter[str]
    """How often each name is bound."""
    is_complete: bool
    """Whether there can be no others, and none is bound again in a roundabout way."""


def read_module(path: Path) -> ast.Module | None:
    """The file's syntax tree; `None` where it can't be read or isn't Python of this version."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of invalid escapes: the run will show them
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def names_of(module: ast.Module) -> Names:
    """What the module binds."""
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    bound = Counter(name for node in _top_level(module) for name in _bound_by(node))
    is_dynamic = "__getattr__" in bound
    for node in ast.walk(module):
        bound.update(node.names if isinstance(node, ast.Global) else ())
        is_dynamic = is_dynamic or _is_dynamic(node)
    return Names(tuple(functions), bound, not is_dynamic)


def signature_of(module: ast.Module, function: str) -> Signature | None:
    """The function's signature; `None` where the source leaves a doubt."""
    names = names_of(module)
    found = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if not names.is_complete or names.bound[function] != 1 or not found:
        return None
    node = found[0]
    if node.decorator_list or node.args.posonlyargs:
        return None
    builtin = SIMPLE_TYPES - names.bound.keys()
    return Signature(tuple(_params(node.args, builtin)), node.args.kwarg is not None)


def _params(args: ast.arguments, builtin: frozenset[str]) -> Iterator[Param]:
    num_required = len(args.args) - len(args.defaults)
    defaults = [*[None] * num_required, *args.defaults, *args.kw_defaults]
    for arg, default in zip([*args.args, *args.kwonlyargs], defaults, strict=True):
        types = _types(arg.annotation, builtin)
        if types and isinstance(default, ast.Constant) and default.value is None:
            types |= {"None"}
        yield Param(arg.arg, default is None, types, ast.unparse(default) if default else None)


def _types(annotation: ast.expr | None, builtin: frozenset[str]) -> frozenset[str]:
    """The simple types that an annotation allows, `int` or `int | None`; empty where there are others."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _types(annotation.left, builtin), _types(annotation.right, builtin)
        return left | right if left and right else frozenset()
    if isinstance(annotation, ast.Name) and annotation.id in builtin:
        return frozenset({annotation.id})
    is_none = isinstance(annotation, ast.Constant) and annotation.value is None
    return frozenset({"None"}) if is_none else frozenset()


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the module is imported; functions and classes, but not their bodies."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _top_level(child)


def _bound_by(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return (name,)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return tuple(alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return (name,)
        case ast.MatchMapping(rest=str(name)):
            return (name,)
    return ()


def _is_dynamic(node: ast.AST) -> bool:
    match node:
        case ast.alias(name="*") | ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            return True
        case ast.Name(id=name):
            return name in _DYNAMIC
    return False
