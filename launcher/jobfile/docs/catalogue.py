"""The built-in workloads with their parameters, read from their source: no torch is loaded."""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from gpurun.launcher.jobfile.kinds import JobKind, builtin_file, default_batch, workload_kind
from gpurun.launcher.jobfile.params import Param, read_module, signature_of_builtin
from gpurun.workloads.registry import BUILTINS


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
        global_batch=default_batch(name) if workload_kind(name).has_batch else None,
        about=doc.partition("\n\n")[0].replace("\n", " "),
        params=tuple(_parameter(param, meanings) for param in (signature.params if signature else ())),
    )


def _parameter(param: Param, meanings: dict[str, str]) -> Parameter:
    return Parameter(param.name, param.default, meanings.get(param.name, ""))


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
