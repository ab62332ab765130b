"""Tables are exhaustive: an unknown name is an error, and no code branches over the names of a table."""

import ast
from collections.abc import Iterable

import pytest

from gpurun.launcher.jobfile.kinds import JOB_KINDS
from gpurun.launcher.strategies import STRATEGIES
from tests.unit.house.source import modules, planted

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
