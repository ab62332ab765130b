"""What the rules of the house are checked on: all modules of the product, and who imports what."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
FACE = "gpurun"  # what users import and start (`gpurun/*.py`): above all floors


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
    planted: str = ""
    """The source of one that isn't in the repository."""

    @cached_property
    def text(self) -> str:
        return self.planted or (ROOT / self.path).read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is asked for: all modules together take two seconds."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree; walking it again for each rule would take seconds."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """What has a floor: a directory or a module of `launcher`, `workloads`, or the public face."""
        return package_of(self.name)

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
    return Module(relative, name)


def imports(module: Module) -> Iterator[Import]:
    """Every import of the module; `__init__` files import only as the package that they are."""
    importers = _importers(module)
    for node in module.nodes:
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
    aliases = (alias for node in module.nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
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
    for node in (node for node in module.nodes if isinstance(node, ast.Attribute)):
        name, *attributes = _chain(node)
        if name in packages:
            parts = [*packages[name].split("."), *attributes]
            used = next((end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in modules()), 0)
            if used > packages[name].count(".") + 1:
                yield Import(".".join(parts[:used]), node.lineno)


def _imported_packages(module: Module) -> Iterator[tuple[str, str]]:
    """What names in the module mean one of ours: `gpurun`, `launcher` of `from gpurun import launcher`."""
    for node in module.nodes:
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


def imported_by_variable(module: Module) -> list[int]:
    importers = _importers(module)
    calls = (node for node in module.nodes if isinstance(node, ast.Call))
    found = ((call.lineno, _imported_by_name(call, importers)) for call in calls)
    return [line for line, named in found if named is not None and not _literal(named)]


def planted(source: str) -> Module:
    return Module(Path("launcher/x.py"), "gpurun.launcher.x", source)


def imported_by(source: str) -> list[str]:
    return [imported.module for imported in imports(planted(source))]


def page() -> list[Path]:
    """JavaScript of the tab, relative to the repository."""
    return [path.relative_to(ROOT) for path in ROOT.glob("launcher/tensorboard_plugin/static/**/*.js")]


def identifiers(module: Module) -> Iterator[tuple[int, str]]:
    """All names in the code: of what is defined, imported, assigned, called or passed."""
    for node in module.nodes:
        for field in ("name", "asname", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name
