"""Every case that a judge names is in the table, with the figures that its sentence needs; none is unused."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from inspect import signature
from pathlib import Path

import pytest

from gpurun.launcher.findings.check_cases import FAILED, OK, REMEDIES, SKIPPED, Case
from gpurun.launcher.findings.finding import finding

JUDGES = Path(__file__).resolve().parents[3] / "launcher/selftest"
TABLES: Mapping[str, Mapping[str, Case]] = {
    "ok": {name: Case(sentence) for name, sentence in OK.items()},
    "failed": FAILED,
    "skipped": {name: Case(sentence) for name, sentence in SKIPPED.items()},
}
SLOT = re.compile(r"\{(\w+)")


def needed(case: Case) -> set[str]:
    """The figures without which there is no sentence or no remedy."""
    return set(SLOT.findall(re.sub(r"\[[^]]*\]", "", f"{case.sentence} {case.remedy}")))


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """How a judge decides, the case that it names, and the call."""
    trees = (ast.parse(path.read_text()) for path in sorted(JUDGES.glob("*.py")))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TABLES:
            yield from ((ast.unparse(node.func), case, node) for case in named(node.args[0]))


def named(case: ast.expr) -> list[str]:
    """The names of an argument, which may depend on a condition."""
    match case:
        case ast.IfExp(body=one, orelse=other):
            return [*named(one), *named(other)]
        case ast.Constant(value=str(name)):
            return [name]
    return []


def test_a_case_has_the_figures_that_it_needs() -> None:
    found = list(calls())
    assert len(found) > sum(map(len, TABLES.values())) / 2
    for status, case, call in found:
        given = {keyword.arg for keyword in call.keywords}
        assert None in given or needed(TABLES[status][case]) <= given, case


@pytest.mark.parametrize("names", [*TABLES.values(), REMEDIES])
def test_every_case_and_every_remedy_is_named_somewhere(names: Collection[str]) -> None:
    sources = "".join(path.read_text() for path in JUDGES.glob("*.py"))
    assert not [name for name in names if f'"{name}"' not in sources]
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", name) for name in names)


def test_no_figure_of_a_case_has_the_name_of_something_else() -> None:
    taken = {*signature(finding).parameters, "where", "check", "case"}
    assert not {name for case in FAILED.values() for name in SLOT.findall(case.sentence)} & taken
