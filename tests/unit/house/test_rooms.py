"""Modules and directories stay small, each module is needed, and its name means one thing."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path

from tests.conftest import SNAPSHOTS
from tests.unit.house.source import FACE, ROOT, Module, everything_imported, modules, page, product

MAX_FLAT = 12
SMALL_LINES = 60


# Two modules of one name do the same for another thing.
SAME_NAME = {
    "__main__": "what `python -m` starts: the product, a rank",
    "base": "what all strategies, all workloads, all micro-benchmarks have in common",
    "build": "makes what its package is named after: a Comparison, a Plan, an index",
    "diff": "two runs, two traces",
    "model": "the dataclasses that its package is about",
    "uneven": "users import it from `gpurun`; the code is the worker's",
}

# Small modules with one importer that stay alone, each with the reason.
OWN_MODULE: dict[str, str] = {}


def test_few_modules_lie_flat() -> None:
    """In the directories of the page, the tests, the benchmarks and the tools too."""
    python = [path for path in (*product(), *others()) if path.name != "__init__.py"]
    flat = Counter(path.parent.as_posix() for path in (*python, *page()))
    many = {name: count for name, count in flat.items() if count > MAX_FLAT}
    assert not many, f"more than {MAX_FLAT} modules in one directory: {many}"


def others() -> list[Path]:
    """Tests, benchmarks and tools, relative to the repository."""
    tops = ("tests", "benchmarks", "tools")
    return [path.relative_to(ROOT) for top in tops for path in ROOT.glob(f"{top}/**/*.py")]


def test_only_the_command_line_prints() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if not module.name.startswith("gpurun.launcher.cli")
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, f"return it, or pass it to what the command line shows: {found}"


@cache
def importers() -> dict[str, frozenset[str]]:
    """Who imports each module, by name."""
    found = defaultdict(set)
    for module, imported in everything_imported():
        if module.name != imported.module:
            found[imported.module].add(module.name)
    return {name: frozenset(names) for name, names in found.items()}


@cache
def started_by_name() -> set[str]:
    """Modules that are started or loaded by their dotted name, as entry points of processes are."""
    text = "".join(module.text for module in modules().values()) + (ROOT / "pyproject.toml").read_text()
    return set(re.findall(r"[\"'](gpurun\.[.\w]+)", text))


def judged() -> list[Module]:
    """The modules that a rule about importers holds for.

    Left out: `__init__`, `__main__` and other entry points (they are started by name), and the files of
    tables: workloads are loaded by their names in `workloads/registry.py`, commands and schedulers have
    a file each.
    """
    named = started_by_name()
    return [
        module
        for module in modules().values()
        if not module.is_init and module.path.name != "__main__.py" and module.name not in named
        if module.package not in {FACE, "workloads", "schedulers"} and not is_command(module)
    ]


def test_a_small_module_has_several_importers() -> None:
    lonely = {
        module.name: f"{module.path} ({module.lines} lines) belongs into {importer}"
        for module in judged()
        for importer in importers().get(module.name, ())
        if len(importers()[module.name]) == 1 and module.lines < SMALL_LINES
    }
    assert lonely.keys() >= OWN_MODULE.keys(), "an exception that is needed no more"
    left = [text for name, text in lonely.items() if name not in OWN_MODULE]
    assert not left, "\n".join(left)


def test_every_snapshot_of_words_has_its_test() -> None:
    wording = SNAPSHOTS / "wording"
    tests = (
        SNAPSHOTS.parent / path.relative_to(wording).with_suffix(".py") for path in wording.rglob("*.txt")
    )
    assert not [str(path) for path in tests if not path.exists() or "wording" not in path.read_text()]


def test_every_module_is_imported() -> None:
    unused = [str(module.path) for module in judged() if module.name not in importers()]
    assert not unused


def test_names_of_modules_are_unique() -> None:
    named = (module for module in modules().values() if not module.is_init and not is_command(module))
    ordered = sorted(named, key=stem_of)
    doubled = {
        stem: [str(module.path) for module in several]
        for stem, several in ((stem, list(found)) for stem, found in groupby(ordered, stem_of))
        if len(several) > 1
    }
    assert doubled.keys() == SAME_NAME.keys(), doubled


def is_command(module: Module) -> bool:
    """Each command has a file, which is named like it: `gpurun report`."""
    return "cli/commands" in module.path.as_posix()


def stem_of(module: Module) -> str:
    return module.path.stem
