"""Only the command line prints; each module and each snapshot is needed."""

import ast
import re
from collections import defaultdict
from functools import cache

from tests.conftest import SNAPSHOTS
from tests.unit.house.source import FACE, ROOT, Module, everything_imported, modules


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


def test_every_snapshot_of_words_has_its_test() -> None:
    wording = SNAPSHOTS / "wording"
    tests = (
        SNAPSHOTS.parent / path.relative_to(wording).with_suffix(".py") for path in wording.rglob("*.txt")
    )
    assert not [str(path) for path in tests if not path.exists() or "wording" not in path.read_text()]


def test_every_module_is_imported() -> None:
    unused = [str(module.path) for module in judged() if module.name not in importers()]
    assert not unused


def is_command(module: Module) -> bool:
    """Each command has a file, which is named like it: `gpurun report`."""
    return "cli/commands" in module.path.as_posix()
