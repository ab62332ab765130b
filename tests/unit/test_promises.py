"""Every promise of README has a test of `make test`, or a benchmark: `tests/promises.md` names it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = "tests/promises.md"
NOT_IN_MAKE_TEST = {"slow", "gpu", "skip", "skipif", "xfail"}
"""Marks of tests that `make test` leaves out, or that hold nothing."""
OF_GPUS = "tests/gpu/"
"""Its conftest marks all tests there."""
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
BULLET = re.compile(r"^- (.*)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
BENCHMARK = re.compile(r"benchmarks: (\w+)")


def plain(text: str) -> str:
    """The text without emphasis, with links' words alone, and with one space between words."""
    return " ".join(LINK.sub(r"\1", text).replace("**", "").split())


@cache
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def promises() -> dict[str, str]:
    """What holds each promise, by its words in README."""
    found = {}
    for line in (ROOT / PAGE).read_text(encoding="utf-8").splitlines():
        cells = [cell.replace(r"\|", "|").strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) > 1:
            _, said, held_by, _ = cells
            found[said] = held_by
    head, rule, *rows = found.items()
    assert head == ("README says", "held by")
    assert set(rule[0]) == {"-"}
    return dict(rows)


PROMISES = promises()


def named_tests() -> list[tuple[str, str]]:
    return sorted({test for held_by in PROMISES.values() for test in TEST.findall(held_by)})


def marks(source: ast.Module, name: str) -> set[str] | None:
    """The marks of a test, those of its class and module included; `None` if there is no such test."""
    scopes: list[ast.Module | ast.ClassDef] = [source]
    scopes += (node for node in source.body if isinstance(node, ast.ClassDef))
    for scope in scopes:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                return {mark for part in (source, scope, node) for mark in own_marks(part)}
    return None


def own_marks(part: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of the decorators `pytest.mark.NAME`, and of what is assigned to `pytestmark` directly in it."""
    given = [] if isinstance(part, ast.Module) else list(part.decorator_list)
    for node in part.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            given += node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
    if any("first(0," in ast.unparse(mark) for mark in given):  # all its cases are slow
        return {"slow"}
    names = (ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in given)
    return {name.removeprefix("pytest.mark.") for name in names if name.startswith("pytest.mark.")}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a(): ...", set()),
        ('@pytest.mark.parametrize("a", first(0, [1]))\ndef test_a(): ...', {"slow"}),
        ("def test_b(): ...", None),
        ("@pytest.mark.slow\n@pytest.mark.parametrize('x', [])\ndef test_a(): ...", {"slow", "parametrize"}),
        ("pytestmark = pytest.mark.slow\ndef test_a(): ...", {"slow"}),
        ("pytestmark = [pytest.mark.gpu, pytest.mark.skipif(True)]\ndef test_a(): ...", {"gpu", "skipif"}),
        ("@pytest.mark.slow\nclass TestA:\n    def test_a(self): ...", {"slow"}),
        ("class TestA:\n    pytestmark = pytest.mark.slow\n    def test_a(self): ...", {"slow"}),
        ("@pytest.mark.slow\ndef test_b(): ...\ndef test_a(): ...", set()),
    ],
)
def test_marks_are_found_wherever_they_are(source: str, found: set[str] | None) -> None:
    assert marks(ast.parse(source), "test_a") == found


def test_readme_says_every_promise() -> None:
    text = plain(readme())
    assert not [said for said in PROMISES if plain(said) not in text], f"not in README: see {PAGE}"


def test_every_promise_is_held_by_tests_or_a_benchmark() -> None:
    without = [
        said
        for said, held_by in PROMISES.items()
        if not BENCHMARK.fullmatch(held_by) and (not TEST.search(held_by) or TEST.sub("", held_by).strip())
    ]
    assert not without


@pytest.mark.parametrize(("path", "name"), named_tests())
def test_a_test_that_holds_a_promise_is_part_of_make_test(path: str, name: str) -> None:
    assert Path(path).name.startswith("test_")
    assert not path.startswith(OF_GPUS)
    found = marks(ast.parse((ROOT / path).read_text(encoding="utf-8")), name)
    assert name.startswith("test_")
    assert found is not None, "there is no such test"
    assert not found & NOT_IN_MAKE_TEST


def test_benchmarks_that_hold_a_promise_exist() -> None:
    named = [found[1] for held_by in PROMISES.values() if (found := BENCHMARK.fullmatch(held_by))]
    assert named
    assert not set(named) - NAMES.keys()


@pytest.mark.parametrize(
    "heading",
    ["Compare splits", "Your script", "Your model", "What you can rely on", "Why not torchrun and HTA?"],
)
def test_all_that_these_sections_promise_is_in_the_table(heading: str) -> None:
    """Each sentence, word for word; links to other pages are no promises, nor is code or what others do."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", readme(), re.DOTALL | re.MULTILINE)
    section = re.sub(r"^```.*?^```$", "", section, flags=re.DOTALL | re.MULTILINE)
    section = re.sub(r" \[[^\]]*\]\([^)]*\)$|^`torchrun` starts ranks.*$", "", section, flags=re.MULTILINE)
    left = plain(BULLET.sub(r"\1", section))
    assert left
    for said in sorted(map(plain, PROMISES), key=len, reverse=True):
        left = left.replace(said, "")
    assert not set(re.findall(r"\w+", left)) - {"and"}, f"{left}: add it to {PAGE}"
