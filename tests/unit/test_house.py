"""The rules of the house: imports go down only, directories stay small, words are the field's."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path

import pytest

from gpurun.launcher import FLOORS

ROOT = Path(__file__).parents[2]
LEVEL = {package: level for level, packages in enumerate(FLOORS) for package in packages.split()}
FACE = "gpurun"  # what users import and start (`gpurun/*.py`): above all floors

MAX_FLAT = 12
MAX_LINES = 400
SMALL_LINES = 60


# Two modules of one name do the same for another thing.
SAME_NAME = {
    "__main__": "what `python -m` starts: the product, a rank",
    "base": "what all strategies, all workloads, all micro-benchmarks have in common",
    "build": "makes what its package is named after: a Comparison, a Plan, an index",
    "diff": "two runs, two traces, and the report and the command for both",
    "files": "of the run directory, and those that a job names",
    "model": "the dataclasses that its package is about",
    "uneven": "users import it from `gpurun`; the code is the worker's",
}

# Small modules with one importer that stay alone, each with the reason.
OWN_MODULE: dict[str, str] = {}

DIALECT = ("told", "tells", "stands", "beside", "nobody", "folders?", "disturbed", "disturbance")
OLD_MODULES = {"account", "blame", "look", "doing", "pace", "link", "agree", "fit"}
OLD_CLASSES = {"LaunchOrder", "Sight", "Said", "Taken", "Several", "Wrong", "LeftOut", "Unlike"}
OLD_FUNCTIONS = {"blame", "pace", "goes_again", "too_late", "give_up_alike", "let_node_0_go_first"}
PHRASES = (
    r"which job\?",
    r"failures? that can pass",
    r"ma(?:de|kes?) no step",
    r"is a mode of NVIDIA GPUs",
    r"are at the \S+ ?%? level",
    r"that by their curves no other beats",
    r"hearts beat in the store",
)


OF_THE_FACE = {"__file__", "__path__", "launcher", "workloads"}
"""What modules below the public face may take from it; anything else needs what is above them."""


@dataclass(frozen=True)
class Import:
    """One imported name, wherever it is imported: at the top, in a function, under TYPE_CHECKING."""

    module: str
    """Dotted name of the module; for `from package import module` that of the module."""
    line: int


@dataclass(frozen=True)
class Module:
    path: Path
    """Relative to the repository."""
    name: str
    """Dotted, as it is imported: `gpurun.launcher.trace.diff`."""
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """What has a floor: a directory or a module of `launcher`, `workloads`, or the public face."""
        return package_of(self.name)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"


def package_of(module: str) -> str:
    """'trace' of 'gpurun.launcher.trace.diff', 'gpurun' of 'gpurun.uneven'."""
    match module.split("."):
        case ["gpurun", "launcher", package, *_]:
            return package
        case ["gpurun", "workloads", *_]:
            return "workloads"
        case _:
            return FACE


@cache
def modules() -> dict[str, Module]:
    """All modules of the product, by name."""
    paths = [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("workloads/**/*.py"), *ROOT.glob("src/gpurun/*.py")]
    return {module.name: module for module in map(_module, sorted(paths))}


def _module(path: Path) -> Module:
    relative = path.relative_to(ROOT)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[1:] if parts[0] == "src" else ("gpurun", *parts)).removesuffix(".__init__")
    text = path.read_text()
    return Module(relative, name, text, ast.parse(text))


def imports(module: Module) -> Iterator[Import]:
    """Every import of the module; `__init__` files import only as the package that they are."""
    importers = _importers(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield Import(inner if inner in modules() else node.module or "", node.lineno)
        elif isinstance(node, ast.Call) and (named := _imported_by_name(node, importers)) is not None:
            name = _literal(named).partition(":")[0]
            yield from [Import(name, node.lineno)] if name else []
    yield from _attributes(module)


IMPORTERS = frozenset({"import_module", "__import__", "resolve_name"})


def _importers(module: Module) -> frozenset[str]:
    """Functions that import by name, by all the names that they have in the module."""
    aliases = (
        alias for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    return IMPORTERS | {alias.asname for alias in aliases if alias.asname and alias.name in IMPORTERS}


def _imported_by_name(node: ast.Call, importers: frozenset[str]) -> ast.expr | None:
    """What such a call imports; `None` of all else."""
    if _called(node) not in importers:
        return None
    by_keyword = (keyword.value for keyword in node.keywords if keyword.arg == "name")
    return next(iter(node.args), None) or next(by_keyword, None)


def _attributes(module: Module) -> Iterator[Import]:
    """Modules used as attributes of an imported package: `import gpurun; gpurun.launcher.cli.main`."""
    packages = dict(_imported_packages(module))
    for node in ast.walk(module.tree):
        name, *attributes = _chain(node)
        if attributes and name in packages:
            parts = [*packages[name].split("."), *attributes]
            used = next((end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in modules()), 0)
            if used > packages[name].count(".") + 1:
                yield Import(".".join(parts[:used]), getattr(node, "lineno", 0))


def _imported_packages(module: Module) -> Iterator[tuple[str, str]]:
    """What names in the module mean one of ours: `gpurun`, `launcher` of `from gpurun import launcher`."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = f"{above}{alias.name}"
                shown = whole if alias.asname or above else whole.partition(".")[0]
                if shown in modules():
                    yield alias.asname or shown.rpartition(".")[2], shown


def _chain(node: ast.AST) -> list[str]:
    """`a.b.c` as its names; what isn't such a chain begins with an empty one."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=attr):
            return [*_chain(value), attr]
    return [""]


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def _literal(node: ast.expr) -> str:
    """The text; of an f-string the package with which it begins."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text.rpartition(".")[0]
    return ""


@cache
def everything_imported() -> list[tuple[Module, Import]]:
    return [(module, imported) for module in modules().values() for imported in imports(module)]


UNPICKLE = {
    "gpurun.launcher.trace.parallel": "results of a child, in a file without a name",
    "gpurun.launcher.tensorboard_plugin.timeline.index.build": "a draft of a worker, in our own cache",
}
"""Unpickling runs code: these read what a process of ours has just written where no one else can write."""


def test_nothing_that_others_can_write_is_unpickled() -> None:
    dangerous = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    found = {module.name for module, imported in everything_imported() if imported.module in dangerous}
    assert found == UNPICKLE.keys()


# Floors


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
    "gpurun.launcher.worker.entry.zygote": "what the command asks it to import once for all ranks",
    "gpurun.launcher.worker.entry.forked_rank": "the entry that the command names",
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


def imported_by_variable(module: Module) -> list[int]:
    importers = _importers(module)
    calls = (node for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    found = ((call.lineno, _imported_by_name(call, importers)) for call in calls)
    return [line for line, named in found if named is not None and not _literal(named)]


def test_an_import_by_variable_is_found() -> None:
    assert imported_by_variable(planted("name = 'gpurun.launcher.cli'\nimport_module(name)")) == [2]
    assert imported_by_variable(planted("importlib.import_module('json')")) == []


def planted(source: str) -> Module:
    return Module(Path("launcher/x.py"), "gpurun.launcher.x", source, ast.parse(source))


def imported_by(source: str) -> list[str]:
    return [imported.module for imported in imports(planted(source))]


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
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(module="gpurun", names=names):
                found += [(node.lineno, one.name) for one in names if one.name not in OF_THE_FACE]
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
    "launcher/cli/options.py",  # the help of --devices
    "launcher/trace/",  # Kineto's names
)
DEVICE_TYPES = ("cpu", "cuda")


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """All text in the code that isn't a docstring or the description of a field."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def test_only_the_table_and_the_runtimes_name_a_kind_of_gpu() -> None:
    named = [
        f"{module.path}:{text.lineno}: {text.value!r}"
        for module in modules().values()
        if not module.path.as_posix().startswith(MAY_NAME_CUDA)
        for text in texts(module.tree)
        if DEVICE_WORD.search(str(text.value))
    ]
    assert not named, "\n".join(named)


def test_only_its_runtime_uses_torch_cuda() -> None:
    used = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.path.as_posix() != "launcher/worker/accelerators/cuda.py"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "cudnn")
    ]
    assert not used, "\n".join(used)


def test_no_code_compares_a_device_type() -> None:
    """Workloads may ask for the CPU: they are below the table."""
    compared = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.package != "workloads"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare | ast.Call)
        for text in asked(node)
        if isinstance(text, ast.Constant) and str(text.value).partition(":")[0] in DEVICE_TYPES
    ]
    others = ("launcher/compare/causes.py", "launcher/worker/meters/cpu_time.py")  # a trace; /proc/stat
    assert not [place for place in compared if not place.startswith(others)]


def asked(node: ast.Compare | ast.Call) -> list[ast.expr]:
    """What something is compared with, or must start with."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    is_prefix = isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "removeprefix")
    return list(node.args) if is_prefix else []


# Small rooms


def test_few_modules_lie_flat() -> None:
    """In the directories of the page, the tests, the benchmarks and the tools too."""
    tops = ("tests", "benchmarks", "tools")
    others = (path.relative_to(ROOT) for top in tops for path in ROOT.glob(f"{top}/**/*.py"))
    python = [path for path in (*product(), *others) if path.name != "__init__.py"]
    flat = Counter(path.parent.as_posix() for path in (*python, *page()))
    many = {name: count for name, count in flat.items() if count > MAX_FLAT}
    assert not many, f"more than {MAX_FLAT} modules in one directory: {many}"


def test_no_module_is_long() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in (*product(), *page())}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def product() -> list[Path]:
    """Files of the modules, relative to the repository."""
    return [module.path for module in modules().values()]


def page() -> list[Path]:
    """JavaScript of the tab, relative to the repository."""
    return [path.relative_to(ROOT) for path in ROOT.glob("launcher/tensorboard_plugin/static/**/*.js")]


def test_only_the_command_line_prints() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if not module.name.startswith("gpurun.launcher.cli")
        for node in ast.walk(module.tree)
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


def test_every_module_is_imported() -> None:
    unused = [str(module.path) for module in judged() if module.name not in importers()]
    assert unused in ([], ["launcher/jobfile/docs/reference.py"])  # `make docs` calls it


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


# Words


def read_by_strangers() -> list[Path]:
    """Everything with sentences: sources, tests, the page's scripts, benchmarks, examples, documentation.

    This file alone has the lists of what isn't said.
    """
    directories = ("launcher", "workloads", "src/gpurun", "benchmarks", "examples", "docs", "tests", "tools")
    kinds = {".py", ".js", ".md", ".yaml", ".css", ".sh", ".toml", ".txt"}
    found = (path for name in directories for path in ROOT.glob(f"{name}/**/*") if path.suffix in kinds)
    at_top = (path for path in ROOT.iterdir() if path.suffix in kinds or path.name == "Makefile")
    return sorted(path for path in {*found, *at_top} - {Path(__file__)} if path.is_file())


def test_no_word_of_a_dialect() -> None:
    pattern = rf"(?<![A-Za-z])(?:{'|'.join(DIALECT)})(?![a-z])"
    assert not (found := lines_with(pattern, read_by_strangers())), "\n".join(found)


def test_no_phrase_of_a_dialect() -> None:
    assert not (found := lines_with("|".join(PHRASES), read_by_strangers())), "\n".join(found)


def lines_with(pattern: str, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in re.finditer(pattern, line, re.IGNORECASE)
    ]


def test_no_name_of_old() -> None:
    old = OLD_CLASSES | OLD_FUNCTIONS
    named = [
        f"{module.path}:{line}: {name}"
        for module in modules().values()
        for line, name in identifiers(module)
        if name in old
    ]
    files = [str(module.path) for module in modules().values() if module.path.stem in OLD_MODULES]
    left = named + files
    assert not left, "\n".join(left)


def identifiers(module: Module) -> Iterator[tuple[int, str]]:
    """All names in the code: of what is defined, imported, assigned, called or passed."""
    for node in ast.walk(module.tree):
        for field in ("name", "asname", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


def test_percentages_have_one_format() -> None:
    """`22 %`, as `format_percent` writes them; Python's own `%` format would leave the space out."""
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FormattedValue) and node.format_spec and "%" in ast.unparse(node.format_spec)
    ]
    assert not found, "\n".join(found)


# Sentences

LEAST_WORDS = 4
COMMENT = re.compile(r"(?m)^\s*//.*$|/\*(?:(?!\*/).|\n)*\*/")
JS_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|`((?:[^`\\]|\\.)*)`")
JS_VALUE = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")


def test_no_sentence_is_written_twice() -> None:
    where = defaultdict(list)
    for place, text in all_texts():
        for sentence in sentences(text):
            where[sentence].append(place)
    doubled = [f"{' and '.join(places)}: {text}" for text, places in where.items() if len(places) > 1]
    assert not doubled, "\n".join(doubled)


def all_texts() -> Iterator[tuple[str, str]]:
    """Place and text of every string in Python and in the tab's JavaScript, with `{}` for values."""
    for module in modules().values():
        for line, text in whole_texts(module.tree):
            yield f"{module.path}:{line}", text
    for path in sorted(page()):
        for line, text in js_texts((ROOT / path).read_text()):
            yield f"{path}:{line}", text


def whole_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String literals and f-strings with `{}` for each value; no docstrings, no annotations."""
    left_out = {id(node) for part in not_shown(tree) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in node.values if isinstance(part, ast.Constant)}
            left_out |= {id(inner) for part in format_specs(node) for inner in ast.walk(part)}
            if id(node) not in left_out:
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


def format_specs(node: ast.JoinedStr) -> list[ast.expr]:
    return [
        part.format_spec for part in node.values if isinstance(part, ast.FormattedValue) if part.format_spec
    ]


def not_shown(tree: ast.Module) -> Iterator[ast.expr]:
    """Docstrings and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        for field in ("annotation", "returns"):
            if found := getattr(node, field, None):
                yield found


def js_texts(source: str) -> Iterator[tuple[int, str]]:
    """Quoted texts and templates, with `{}` for each value."""
    code = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source)
    for found in JS_STRING.finditer(code):
        text = JS_VALUE.sub("{}", found[2]) if found[1] is None else found[1]
        yield code.count("\n", 0, found.start()) + 1, text


def sentences(text: str) -> list[str]:
    """What reads as a sentence: four words or more, between stops, colons and ends of lines; not code."""
    joined = re.sub(r"`[^`\n]*`", lambda found: found[0].replace(" ", ""), text)
    parts = (part.strip(" ,.;:()`'\"") for part in re.split(r"(?<=[.;:!?])\s+|\n", joined))
    return [part for part in parts if len(words(part)) >= LEAST_WORDS and not re.search(r"\w\(", part)]


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_][\w'’-]+", text) if " " in text else []


def test_sentences_are_found_in_longer_texts() -> None:
    advice = "pin the memory and copy with non_blocking=True"
    tree = planted(f'"""{advice}"""\nprint(f"{{copies}}: {advice}")').tree
    assert [sentence for _, text in whole_texts(tree) for sentence in sentences(text)] == [advice]
    (said,) = whole_texts(planted('x = f"the split {split} is for {n:>{w}}, not for {m}"').tree)
    assert said[1] == "the split {} is for {}, not for {}"
    script = "// a comment isn't shown to anyone\nthrow Error(`no lane of ${a.b} is there`)"
    assert list(js_texts(script)) == [(2, "no lane of {} is there")]
