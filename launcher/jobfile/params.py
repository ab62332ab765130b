"""Parameters of a workload's function, and the rule by which a job's `params` are checked against them.

A job is checked before anything runs, as far as the source shows. Reading the source runs none of a user's
code and loads no torch. But Python code can define a function in ways that only running it shows. Wherever
the source leaves a doubt, the answer is "not known"; the worker, which does run the code, reads the function.

The catalogue of the built-in workloads is read from their source in the same way.
"""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpurun.launcher.jobfile.kinds import JobKind, builtin_file, workload_kind
from gpurun.launcher.jobfile.yaml.describe import (
    any_of,
    correction,
    describe,
    did_you_mean,
    flow_text,
    shorten,
)
from gpurun.launcher.syntax import parsed
from gpurun.workloads.registry import BUILTINS

TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "None": ("null", (type(None),)),
}
"""The values that a simple annotation allows, in words and as the types of a job's values."""


@dataclass(frozen=True)
class Param:
    """A parameter that a job may give by name."""

    name: str
    is_required: bool
    types: frozenset[str]
    """Names of `TYPES`; empty if the annotation is missing or says more than these."""
    default: str | None = None
    """The default in the source; `...` where it was read from the function; `None` where there is none."""
    choices: tuple[str, ...] = ()
    """The texts that may be given, by `Literal["a", "b"]`; empty where any may."""
    is_per_device: bool = False
    """Whether a list has one value for each device; built-in workloads annotate that as `PerDevice`."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    params: tuple[Param, ...]
    is_open: bool
    """Whether it takes any other name as well (`**kwargs`)."""

    @property
    def names(self) -> list[str]:
        return [param.name for param in self.params]

    @property
    def required(self) -> set[str]:
        return {param.name for param in self.params if param.is_required}


@dataclass(frozen=True)
class WrongParam:
    """A mistake at one of the params that a job gives."""

    name: str
    message: str
    hint: str | None
    is_unknown: bool
    """Whether the name itself is wrong, and not its value."""


def wrong_params(
    workload: str, signature: Signature, given: Mapping[str, Any], place: str = "params"
) -> Iterator[WrongParam]:
    """Names that the function doesn't take, and values of a type that it doesn't.

    Args:
        place: key of the job that holds them, such as `compare.params`.
    """
    names = signature.names
    for name in given:
        if name not in names and not signature.is_open:
            hint = _near_or_all(name, signature)
            yield WrongParam(name, f"{shorten(workload)} has no parameter `{shorten(name)}`", hint, True)
    for param in signature.params:
        if param.name in given and not _is_allowed(given[param.name], param):
            value = given[param.name]
            message = f"`{place}.{param.name}`: expected {_expected(param)}, got {describe(value)}"
            yield WrongParam(param.name, message, _correction(value, param), False)


def needs(workload: str, signature: Signature, missing: Iterable[str]) -> str:
    """The message for required params that are not given."""
    wanted = set(missing)
    listed = ", ".join(f"`{name}`" for name in signature.names if name in wanted)
    return f"{shorten(workload)} needs {listed} under `params`"


def takes(signature: Signature) -> str:
    """The hint for a name that is unknown or missing."""
    return f"its parameters are {', '.join(signature.names)}" if signature.params else "it has no parameters"


def _near_or_all(name: str, signature: Signature) -> str:
    """The hint for a name that is unknown: the one that may be meant, then all, if there are more."""
    near = did_you_mean(name, signature.names)
    if near is None:
        return takes(signature)
    return f"{near} The parameters are {', '.join(signature.names)}" if len(signature.names) > 1 else near


def refused(workload: str, reason: object) -> str:
    """The message for values that a built-in workload refuses, though each is of the right type."""
    return f"params of {workload}: {reason}"


def _correction(value: Any, param: Param) -> str | None:
    """How to write a value that a parameter doesn't take, where that can be guessed."""
    if isinstance(value, list) and len(value) > 1 and all(_is_allowed(item, param) for item in value):
        listed = flow_text([{param.name: item} for item in value])
        return f"to compare them, write `compare: {{params: {listed}}}`"
    if param.choices:
        return did_you_mean(str(value), param.choices)
    is_word = isinstance(value, str) and "int" in param.types
    digits = f"write digits, such as `{param.name}: 4`" if is_word else None
    return correction(value, *(each for name in param.types for each in TYPES[name][1])) or digits


def _expected(param: Param) -> str:
    """The values of a parameter, in words."""
    if param.choices:
        return any_of(param.choices)
    return " or ".join(words for name, (words, _) in TYPES.items() if name in param.types)


def _is_allowed(value: Any, param: Param) -> bool:
    """A whole number is allowed for any number, but `true` for none, though Python counts it as one."""
    if not param.types:
        return True
    if param.choices and isinstance(value, str):
        return value in param.choices
    return any(type(value) in TYPES[name][1] for name in param.types)


MAX_BYTES = 500_000
"""Parsing takes about 0.1 s for a file of this size."""

SIMPLE_TYPES = frozenset({"int", "float", "str", "bool"})

_DYNAMIC = frozenset({"globals", "locals", "vars", "exec", "eval", "setattr"})
"""Functions by which a module may bind names that don't appear in it."""


@dataclass(frozen=True)
class TopLevelNames:
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
        return parsed(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def names_of(module: ast.Module) -> TopLevelNames:
    """The names that the module binds."""
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    bound = Counter(name for node in _top_level(module) for name in _bound_by(node))
    is_dynamic = "__getattr__" in bound
    for node in ast.walk(module):
        bound.update(node.names if isinstance(node, ast.Global) else ())
        is_dynamic = is_dynamic or _is_dynamic(node)
    return TopLevelNames(tuple(functions), bound, not is_dynamic)


def returned_by(function: ast.FunctionDef) -> list[ast.expr | None]:
    """The values of a function's own `return` statements, without those of functions inside of it."""
    return [node.value for node in own_nodes(function) if isinstance(node, ast.Return)]


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """All of a function's body, without the bodies of functions inside of it."""
    left = list[ast.AST](function.body)
    while left:
        yield (node := left.pop())
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)


def signature_of(module: ast.Module, function: str) -> Signature | None:
    """The function's signature; `None` where the source leaves a doubt."""
    names = names_of(module)
    args = _arguments(module, function)
    if not names.is_complete or names.bound[function] != 1 or args is None or args.posonlyargs:
        return None
    known = SIMPLE_TYPES - names.bound.keys()
    if names.bound["Literal"] == 1 and any(map(_imports_literal, module.body)):
        known |= {"Literal"}
    return Signature(tuple(_params(args, known)), args.kwarg is not None)


def _arguments(module: ast.Module, name: str) -> ast.arguments | None:
    """The arguments of a function or class, by its source; `None` where something else may decide."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and not node.decorator_list:
            return node.args if isinstance(node, ast.FunctionDef) else _arguments_of_class(module, node)
    return None


_PLAIN_BASES = frozenset({"object", "nn.Module", "torch.nn.Module"})
"""Classes that leave it to `__init__` what is taken."""


def _arguments_of_class(module: ast.Module, node: ast.ClassDef) -> ast.arguments | None:
    """The arguments of `__init__` after `self`; without bases, a class that has none takes nothing."""
    own = Counter(name for each in _top_level(node) for name in _bound_by(each))
    inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    decides_otherwise = node.keywords or own["__new__"] or own["__init__"] != len(inits)
    if decides_otherwise or _is_patched(module, node.name) or not _has_plain_bases(node):
        return None
    if not inits and not node.bases:
        return ast.arguments([], [], None, [], [], None, [])
    if len(inits) != 1 or inits[0].decorator_list or not inits[0].args.args:
        return None
    given = inits[0].args
    return ast.arguments(**{**vars(given), "args": given.args[1:]})


def _has_plain_bases(node: ast.ClassDef) -> bool:
    return all(ast.unparse(base) in _PLAIN_BASES for base in node.bases)


def _is_patched(module: ast.Module, name: str) -> bool:
    """Whether something is assigned to an attribute of the class, such as another `__init__`."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in ast.walk(module)
    )


@cache
def signature_of_builtin(name: str) -> Signature | None:
    """The parameters of a built-in workload, by its source."""
    module = read_module(builtin_file(name))
    return signature_of(module, BUILTINS[name].function) if module else None


def signature_of_function(function: Callable[..., Any]) -> Signature:
    """The signature of a function, or of anything else that can be called.

    Types are left out behind a decorator, which may convert what it passes on; so is everything where Python
    knows no signature.
    """
    try:
        found = inspect.signature(function, eval_str=True)
    except Exception:  # an annotation in quotes may raise anything
        try:
            found = inspect.signature(function)
        except (TypeError, ValueError):
            return Signature((), is_open=True)
    is_wrapped = hasattr(function, "__wrapped__")
    known = SIMPLE_TYPES | {"Literal"}
    params = [
        _param(
            param.name,
            None if is_wrapped else _as_source(param.annotation),
            None if param.default is param.empty else ast.Constant(None if param.default is None else ...),
            known,
        )
        for param in found.parameters.values()
        if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)
    ]
    return Signature(tuple(params), any(p.kind is p.VAR_KEYWORD for p in found.parameters.values()))


def _as_source(annotation: Any) -> ast.expr | None:
    """An annotation as source would have it, so that it is judged alike; `None` where there is no source."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    texts = ("None" if part is types.NoneType else inspect.formatannotation(part) for part in parts)
    try:
        return ast.parse(" | ".join(texts), mode="eval").body
    except SyntaxError:
        return None


def _imports_literal(node: ast.stmt) -> bool:
    match node:
        case ast.ImportFrom(module="typing" | "typing_extensions", names=names):
            return any(alias.name == "Literal" and alias.asname is None for alias in names)
    return False


def _params(args: ast.arguments, known: frozenset[str]) -> Iterator[Param]:
    num_required = len(args.args) - len(args.defaults)
    defaults = [*[None] * num_required, *args.defaults, *args.kw_defaults]
    for arg, default in zip([*args.args, *args.kwonlyargs], defaults, strict=True):
        yield _param(arg.arg, arg.annotation, default, known)


def _param(name: str, annotation: ast.expr | None, default: ast.expr | None, known: frozenset[str]) -> Param:
    allowed = _types(annotation, known)
    if allowed and default is not None and _is_none(default):
        allowed |= {"None"}
    return Param(
        name=name,
        is_required=default is None,
        types=allowed,
        default=ast.unparse(default) if default else None,
        choices=_choices(annotation) if allowed else (),
        is_per_device=isinstance(annotation, ast.Name) and annotation.id == "PerDevice",
    )


def _types(annotation: ast.expr | None, known: frozenset[str]) -> frozenset[str]:
    """The simple types that an annotation allows, `int` or `int | None`; empty where there are others."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _types(annotation.left, known), _types(annotation.right, known)
        return left | right if left and right else frozenset()
    if isinstance(annotation, ast.Name) and annotation.id in known:
        return frozenset({annotation.id})
    if "Literal" in known and _choices(annotation):
        return frozenset({"str"})
    return frozenset({"None"}) if annotation is not None and _is_none(annotation) else frozenset()


def _choices(annotation: ast.expr | None) -> tuple[str, ...]:
    """The texts of a `Literal` that has nothing but texts, or of several; empty where any text will do."""
    match annotation:
        case ast.BinOp(left=left, right=right):
            sides = [side for side in (left, right) if not _is_none(side)]
            found = [_choices(side) for side in sides]
            return tuple(text for texts in found for text in texts) if all(found) else ()
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            texts = [value.value for value in values if isinstance(value, ast.Constant)]
            is_all = len(texts) == len(values) and all(isinstance(text, str) for text in texts)
            return tuple(map(str, texts)) if is_all else ()
    return ()


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


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
        case ast.Name(id=str(name), ctx=ast.Store() | ast.Del()) | ast.MatchMapping(rest=str(name)):
            return (name,)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return tuple(alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return (name,)
    return ()


def _is_dynamic(node: ast.AST) -> bool:
    match node:
        case ast.alias(name="*") | ast.Attribute(value=ast.Name(id="sys"), attr="modules"):
            return True
        case ast.Name(id=name):
            return name in _DYNAMIC
    return False


@dataclass(frozen=True)
class Parameter:
    """One parameter of a workload."""

    name: str
    default: str | None
    """The default as Python writes it; `None` where the job must give a value."""
    meaning: str
    """The description in the function's docstring; empty where it says nothing."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One built-in workload."""

    name: str
    kind: str
    """`training` or `micro-benchmark`."""
    summary: str
    bound_by: str
    global_batch: int | None
    """The batch where the job gives none; `None` where the job must give one, or where there is none."""
    about: str
    """The summary of the function's docstring."""
    params: tuple[Parameter, ...]


def catalogue() -> tuple[CatalogueEntry, ...]:
    """All built-in workloads, in the order of the registry."""
    return tuple(_entry(name) for name in BUILTINS)


def _kinds() -> list[JobKind]:
    """Kinds that have built-in workloads, in the order of the registry."""
    return list(dict.fromkeys(map(workload_kind, BUILTINS)))


def _entry(name: str) -> CatalogueEntry:
    builtin = BUILTINS[name]
    module = read_module(builtin_file(name))
    signature = signature_of_builtin(name)
    doc = _docstring(module, builtin.function)
    meanings = dict(_args(doc))
    return CatalogueEntry(
        name=name,
        kind=builtin.kind,
        summary=builtin.summary,
        bound_by=builtin.bound_by,
        global_batch=builtin.global_batch,
        about=doc.partition("\n\n")[0].replace("\n", " "),
        params=tuple(
            Parameter(param.name, param.default, meanings.get(param.name, ""))
            for param in (signature.params if signature else ())
        ),
    )


def _docstring(module: ast.Module | None, function: str) -> str:
    nodes = module.body if module else []
    found = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function)
    return next((ast.get_docstring(node) or "" for node in found), "")


def _args(doc: str) -> Iterator[tuple[str, str]]:
    """Names and meanings from the section `Args:`."""
    section = re.search(r"^Args:\n((?: +.*\n?)+)", doc, re.MULTILINE)
    for item in re.split(r"\n(?=    \w)", section[1].rstrip()) if section else ():
        name, _, meaning = item.strip().partition(":")
        yield name, " ".join(meaning.split())


def render_catalogue(width: int) -> str:
    """Text at most `width` wide, for a terminal."""
    lines: list[str] = []
    for kind in _kinds():
        lines += [
            f"{kind.name}:",
            *(line for entry in catalogue() if entry.kind == kind.name for line in _lines(entry, width)),
        ]
    last = "In a job: `workload: NAME` and `params: {…}`; what each means: gpurun workloads NAME"
    return "\n".join([*lines, "", *textwrap.wrap(last, width)])


def _batch(entry: CatalogueEntry) -> str:
    return f"batch {entry.global_batch} unless the job says otherwise"


def _lines(entry: CatalogueEntry, width: int) -> list[str]:
    indent = " " * 13
    head = f"  {entry.name:<10} {entry.summary}"
    texts = [f"bound by {entry.bound_by}"]
    if entry.global_batch:
        texts.append(_batch(entry))
    if entry.params:
        texts.append("params: " + ", ".join(f"{p.name}={p.default}" for p in entry.params))
    return [
        *textwrap.wrap(head, width, subsequent_indent=indent),
        *(
            line
            for text in texts
            for line in textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
            )
        ),
    ]


def render_entry(entry: CatalogueEntry, width: int) -> str:
    """One workload with the meaning of each of its parameters, at most `width` wide."""
    batch = f"; {_batch(entry)}" if entry.global_batch else ""
    texts = [f"{entry.name}: {entry.summary}", entry.about, f"{entry.kind}, bound by {entry.bound_by}{batch}"]
    lines = [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    lines += ["", "params:"] if entry.params else ["It takes no params."]
    for param in entry.params:
        # Over two lines, so that the meanings begin in one column however long a default is.
        lines.append(f"  {param.name}{'' if param.default is None else f'={param.default}'}")
        lines += textwrap.wrap(param.meaning, width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


_HEAD = """\
# Built-in workloads

Made from the workloads' own source by `make docs`. `gpurun workloads` prints the same, with `--json` for
programs. In a job: `workload: NAME`, and its parameters under `params`.

- *Training* workloads run optimizer steps. One with a default batch size needs no `global_batch` in the job.
- *Micro-benchmarks* measure one property of the machine as a curve over size. They have no batch, no split
  and no gradient; a job runs one of them. What the machine lacks is reported, not guessed.

For training steps every report has samples/s and, where they are known, FLOP/s (counted once per run, outside
the timing), MFU (a share of the GPUs' dense peak in the job's precision; sources:
`launcher/machine/gpus/gpu.py`), the input's bytes/s, and joules per sample (the GPUs' own counters). What
is not known is left out.
"""


def workload_reference() -> str:
    """`docs/workloads.md`."""
    parts = [_HEAD]
    for kind in _kinds():
        sections = (_section(entry) for entry in catalogue() if entry.kind == kind.name)
        parts += [f"## {kind.title}\n", *sections]
    return "\n".join(parts)


def _section(entry: CatalogueEntry) -> str:
    batch = f" Batch: {entry.global_batch} unless the job says otherwise." if entry.global_batch else ""
    lines = [f"### `{entry.name}`\n", f"{entry.about} Bound by {entry.bound_by}.{batch}\n"]
    if entry.params:
        rows = [f"| `{p.name}` | `{p.default}` | {p.meaning} |" for p in entry.params]
        lines += ["| parameter | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)
