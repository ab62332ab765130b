"""Imports go down only, torch is the workers', and one table names the kinds of device."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from typing import TypeGuard

import pytest

from gpurun.launcher import FLOORS
from gpurun.launcher.jobfile.kinds import JOB_KINDS
from gpurun.launcher.strategies import STRATEGIES
from tests.conftest import SNAPSHOTS
from tests.unit.house.source import (
    FACE,
    ROOT,
    Module,
    everything_imported,
    imported_by,
    imported_by_variable,
    modules,
    package_of,
    page,
    planted,
)

LEVEL = {package: level for level, packages in enumerate(FLOORS) for package in packages.split()}


OF_THE_FACE = {"__file__", "__path__", "launcher", "workloads"}
"""What modules below the public face may take from it; anything else needs what is above them."""


UNPICKLE = {
    "gpurun.launcher.trace.parallel": "results of a child, in a file without a name",
    "gpurun.launcher.tensorboard_plugin.timeline.index.build": "a draft of a worker, in our own cache",
}
"""Unpickling runs code: these read what a process of ours has just written where no one else can write."""


def test_nothing_that_others_can_write_is_unpickled() -> None:
    dangerous = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = {module.name for module, imported in everything_imported() if imported.module in dangerous}
    assert found == UNPICKLE.keys()


def test_every_package_has_a_floor() -> None:
    packages = {module.package for module in modules().values() if module.name != "gpurun.launcher"}
    assert packages - {FACE} == set(LEVEL)


def test_imports_go_down() -> None:
    above = [
        f"{module.path}:{imported.line}: {module.package} imports {imported.module}, a floor above"
        for module, imported in everything_imported()
        if imported.module in modules() and imported.module not in {FACE, "gpurun.launcher"}
        if level_of(module.package) < level_of(package_of(imported.module))
    ]
    assert not above, "\n".join(above)


def test_imports_by_name_are_found() -> None:
    assert imported_by('importlib.import_module("gpurun.launcher.cli.main")') == ["gpurun.launcher.cli.main"]
    assert imported_by('import_module(f"gpurun.launcher.cli.commands.{name}")') == [
        "gpurun.launcher.cli.commands"
    ]
    assert imported_by('pkgutil.resolve_name("gpurun.launcher.cli.main:cli")') == ["gpurun.launcher.cli.main"]
    assert imported_by('import_module(name="gpurun.launcher.cli.main")') == ["gpurun.launcher.cli.main"]
    renamed = 'from importlib import import_module as im\nim("gpurun.launcher.cli.main")'
    assert "gpurun.launcher.cli.main" in imported_by(renamed)


@pytest.mark.parametrize(
    "source",
    [
        "import gpurun\ngpurun.launcher.cli.main.cli()",
        "import gpurun as g\ng.launcher.cli.main.cli()",
        "import gpurun.launcher.errors\ngpurun.launcher.cli.main.cli()",
        "from gpurun import launcher\nlauncher.cli.main.cli()",
        "from gpurun.launcher import cli as front\nfront.main",
    ],
)
def test_attributes_of_packages_are_imports(source: str) -> None:
    assert "gpurun.launcher.cli.main" in imported_by(source)


IMPORTED_BY_VARIABLE = {
    "gpurun.launcher.worker.accelerators.runtime": "a row of the accelerators' table",
    "gpurun.launcher.worker.strategies.base": "a row of the strategies' table",
    "gpurun.launcher.worker.training.load_workload": "a user's module",
    "gpurun.launcher.worker.base.preload": "packages that a program has imported before",
    "gpurun.launcher.worker.entry.zygote": "what the command asks for: modules, a rank's entry",
    "gpurun.workloads.registry": "a row of the workloads' table",
}
"""Modules that import what a variable names, each with what that is: the floors can't be read there."""


def test_imports_by_variable_are_known() -> None:
    found = {
        module.name: f"{module.path}:{line}: imports what a variable names"
        for module in modules().values()
        for line in imported_by_variable(module)
    }
    new = [text for name, text in found.items() if name not in IMPORTED_BY_VARIABLE]
    assert not new, "\n".join(new)
    assert found.keys() == IMPORTED_BY_VARIABLE.keys(), "an exception that is needed no more"


def test_an_import_by_variable_is_found() -> None:
    assert imported_by_variable(planted("name = 'gpurun.launcher.cli'\nimport_module(name)")) == [2]
    assert imported_by_variable(planted("importlib.import_module('json')")) == []


def test_nothing_below_needs_the_face() -> None:
    """`from gpurun import Workload` imports torch: below the face there are only paths."""
    found = [
        f"{module.path}:{line}: {name} of the public face"
        for module in modules().values()
        if module.package != FACE
        for line, name in taken_from_face(module)
    ]
    assert not found, "\n".join(found)
    assert taken_from_face(planted("from gpurun import Workload, launcher")) == [(1, "Workload")]
    assert taken_from_face(planted("import gpurun\ngpurun.step()")) == [(2, "step")]


def taken_from_face(module: Module) -> list[tuple[int, str]]:
    found = []
    for node in module.nodes:
        match node:
            case ast.ImportFrom(module="gpurun", names=names):
                found += [(node.lineno, name.name) for name in names if name.name not in OF_THE_FACE]
            case ast.Attribute(value=ast.Name(id="gpurun"), attr=name) if name not in OF_THE_FACE:
                found.append((node.lineno, name))
    return found


def level_of(package: str) -> int:
    return LEVEL.get(package, len(FLOORS))


def test_packages_of_one_floor_import_in_no_circle() -> None:
    level = defaultdict(set)
    for module, imported in everything_imported():
        ours, theirs = module.package, package_of(imported.module)
        if imported.module in modules() and ours != theirs and LEVEL.get(ours) == LEVEL.get(theirs):
            level[ours].add(theirs)
    assert not [name for name in level if name in reachable(level, name)]


def test_directories_of_one_package_import_in_no_circle() -> None:
    circles = {
        package: {name for name in edges if name in reachable(edges, name)}
        for package, edges in siblings().items()
        if package != "gpurun.launcher"  # floors
    }
    assert not {package: names for package, names in circles.items() if names}


def siblings() -> dict[str, dict[str, set[str]]]:
    """By package: which of its directories imports which others, at every level."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, imported in everything_imported():
        if imported.module in modules():
            ours, theirs = directories_of(module.name), directories_of(imported.module)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
            if common < min(len(ours), len(theirs)):
                found[".".join(ours[:common])][ours[common]].add(theirs[common])
    return found


def directories_of(module: str) -> list[str]:
    parts = module.split(".")
    return parts if modules()[module].is_init else parts[:-1]


def reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    """What is imported from `start`, over any number of steps."""
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges.get(name, ()))
    return found


def test_only_workers_and_workloads_import_torch() -> None:
    heavy = [
        f"{module.path}:{imported.line}: {module.package} imports {imported.module}"
        for module, imported in everything_imported()
        if module.package not in {"worker", "workloads"} and imported.module.split(".")[0] == "torch"
    ]
    assert not heavy, "\n".join(heavy)


def test_the_command_never_imports_the_worker() -> None:
    """It starts workers by their names: importing one would import torch."""
    from_outside = [
        f"{module.path}:{imported.line}: {module.name} imports {imported.module}"
        for module, imported in everything_imported()
        if package_of(imported.module) == "worker" and module.package != "worker"
        if imported.module in modules() and module.name != "gpurun.uneven"
    ]
    assert not from_outside, "\n".join(from_outside)


# Kinds of device

DEVICE_WORD = re.compile(r"\bcuda\b")
MAY_NAME_CUDA = (
    "launcher/machine/accelerators.py",  # the table
    "launcher/worker/accelerators/",  # the runtimes
    "launcher/jobfile/",  # its help and its messages show devices
    "launcher/trace/",  # Kineto's names
)
DEVICE_TYPES = ("cpu", "cuda")


def texts(module: Module) -> Iterator[ast.Constant]:
    """All text in the code that isn't a docstring or the description of a field."""
    docs = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def test_only_the_table_and_the_runtimes_name_a_kind_of_gpu() -> None:
    named = [
        f"{module.path}:{text.lineno}: {text.value!r}"
        for module in modules().values()
        if not module.path.as_posix().startswith(MAY_NAME_CUDA)
        for text in texts(module)
        if DEVICE_WORD.search(str(text.value))
    ]
    assert not named, "\n".join(named)


JS_COMMENT = re.compile(r"/\*.*?\*/|(?<!:)//[^\n]*", re.DOTALL)


def test_no_script_of_the_tab_names_a_kind_of_gpu() -> None:
    scripts = sorted((ROOT / "launcher").rglob("*.js"))
    assert scripts
    named = [path.name for path in scripts if DEVICE_WORD.search(JS_COMMENT.sub("", path.read_text()))]
    assert not named, f"{named}: the server gives a device's name"


def test_only_its_runtime_uses_torch_cuda() -> None:
    used = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.path.as_posix() != "launcher/worker/accelerators/cuda.py"
        for node in module.nodes
        if uses_cuda(node)
    ]
    assert not used, "\n".join(used)


def uses_cuda(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    """Whether it is an attribute or an import of torch's module for these devices."""
    names = {"cuda", "is_cuda", "cudnn"}
    if isinstance(node, ast.Attribute):
        return node.attr in names
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return False
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    parts = {part for alias in node.names for part in f"{module}.{alias.name}".split(".")}
    return "torch" in parts and bool(parts & names)


def test_no_code_compares_a_device_type() -> None:
    """Workloads may ask for the CPU: they are below the table."""
    compared = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.package != "workloads"
        for node in module.nodes
        if compares_a_type(node)
    ]
    others = (
        "launcher/compare/variant_causes.py",
        "launcher/machine/process_tree.py",
    )  # a trace; /proc/stat
    assert not [place for place in compared if not place.startswith(others)]


def compares_a_type(node: ast.AST) -> TypeGuard[ast.expr | ast.pattern]:
    texts = (part for asked_for in asked(node) for part in ast.walk(asked_for))
    return any(
        isinstance(text, ast.Constant) and str(text.value).partition(":")[0] in DEVICE_TYPES for text in texts
    )


def asked(node: ast.AST) -> list[ast.expr]:
    """What something is compared with or looked up among, or must start with."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return [side for side in sides if isinstance(side, ast.Constant | ast.Tuple | ast.Set | ast.List)]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
        return [key for key in node.value.keys if key is not None]
    if not isinstance(node, ast.Call):
        return []
    is_prefix = isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "removeprefix")
    return list(node.args) if is_prefix else []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "from torch.cuda import synchronize",
        "import torch.cuda as c",
        "from torch import cuda",
        "from torch.backends import cudnn",
        "d.type == 'cpu'",
        "d.type in ('cpu',)",
        "d.type in {'cuda', 'xpu'}",
        "match d.type:\n    case 'cpu':\n        pass",
        "{'cpu': 1, 'cuda': 2}[d.type]",
        "str(d).startswith('cuda')",
        "getattr(torch, 'cuda')",
    ],
)
def test_however_a_line_names_a_kind_of_device_it_is_found(line: str) -> None:
    nodes = [*ast.walk(ast.parse(line))]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    named = any(DEVICE_WORD.search(str(text)) for text in texts)
    assert named or any(uses_cuda(node) or compares_a_type(node) for node in nodes)


# Only the command line prints; each module and each snapshot is needed


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


# Tables are exhaustive: an unknown name is an error, and no code branches over the names of a table


NAMES = {*STRATEGIES, *(kind for kind in JOB_KINDS if kind != "program")}
BY_NAME = {"STRATEGIES", "KINDS", "JOB_KINDS", "ACCELERATORS", "SCHEDULERS"}
"""Tables in which an unknown name is an error, so that no `.get` may answer for it."""
TABLES = {"launcher/strategies.py", "launcher/jobfile/kinds.py", "workloads/registry.py"}

# `script` is also a key of job files; these are about the key.
ABOUT_THE_KEY = {
    ("launcher/jobfile/checks/rules.py", "dict of script"): "what each key takes, in an example",
    ("launcher/jobfile/load.py", "dict of script"): "the key, added to a job of the command line",
}


def branches() -> dict[tuple[str, str], str]:
    """Places that compare with a name of a strategy or of a kind of job, or map one: by file and form."""
    return {
        (str(module.path), what): f"{module.path}:{line}: {what}"
        for module in modules().values()
        if str(module.path) not in TABLES
        for line, what in branches_in(module.nodes)
    }


def branches_in(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
    found = ((node, _branch(node)) for node in nodes)
    return [(getattr(node, "lineno", 0), what) for node, what in found if what]


def _branch(node: ast.AST) -> str:
    match node:
        case ast.Compare(left=left, comparators=others):
            sides = (inner for side in (left, *others) for inner in ast.walk(side))
            return "comparison" if any(map(_is_name, sides)) else ""
        case ast.Dict(keys=keys):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and _is_name(key)]
            return f"dict of {', '.join(map(str, names))}" if names else ""
        case ast.MatchValue(value=value):
            return "case" if _is_name(value) else ""
        case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, _]):
            return "get" if _is_table(table) else ""
        case ast.Call(func=ast.Attribute(value=table, attr="get"), keywords=[_, *_]):
            return "get" if _is_table(table) else ""
        case ast.BoolOp(op=ast.Or(), values=[ast.Call(func=ast.Attribute(value=table, attr="get")), *_]):
            return "get" if _is_table(table) else ""
    return ""


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in NAMES


def _is_table(node: ast.expr) -> bool:
    return (
        getattr(node, "id", "") in BY_NAME
        or getattr(node, "attr", "") in BY_NAME
        or (isinstance(node, ast.Dict) and any(key is not None and _is_name(key) for key in node.keys))
    )


def test_no_branch_over_names_is_left() -> None:
    found = branches()
    assert found.keys() >= ABOUT_THE_KEY.keys(), "an exception that is needed no more"
    left = [text for place, text in found.items() if place not in ABOUT_THE_KEY]
    assert not left, "\n".join(left)


@pytest.mark.parametrize(
    "source",
    [
        'STRATEGIES.get(name, STRATEGIES["single"])',
        "kinds.JOB_KINDS.get(name, TRAINING)",
        "SCHEDULERS.get(name) or slurm",
        'ACCELERATORS.get(name, default="cpu")',
        '{"ddp": 1}.get(name, 2)',
        '{"ddp": 1}[name]',
        'name == "script"',
        'name in ("script", "dp")',
        'match name:\n    case "single":\n        pass',
    ],
)
def test_every_form_of_a_branch_over_names_is_found(source: str) -> None:
    assert branches_in(planted(source).nodes)


# Percentages and thousands are written one way


def test_percentages_have_one_format() -> None:
    """`22 %`, as `format_percent` writes them; Python's own `%` format would leave the space out."""
    assert not (found := formatted_with("%")), "\n".join(found)


def test_thousands_have_one_format() -> None:
    """`1,520`, by `format_number` and those that use it; the page's are by `number`, which does the same."""
    assert {place.partition(":")[0] for place in formatted_with(",")} == {"launcher/units.py"}
    script = (ROOT / "launcher/tensorboard_plugin/static/shared/format.js").read_text()
    assert "replace(/\\B(?=(\\d{3})+$)/g, ',')" in script
    others = [path for path in page() if "toLocaleString" in (ROOT / path).read_text()]
    assert not others, "grouped by the browser's language, not by `number`"


def formatted_with(sign: str) -> list[str]:
    """Where a value is formatted with the sign; not in workloads, which can't import the formatter."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.package != "workloads"
        for node in module.nodes
        if isinstance(node, ast.FormattedValue) and node.format_spec and sign in ast.unparse(node.format_spec)
    ]
