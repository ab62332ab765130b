"""What a comparison says, for tests that look for it."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.findings.finding import Finding, of_level
from gpurun.launcher.findings.finding_kinds import KINDS
from gpurun.launcher.findings.run_cases import REASONS
from gpurun.launcher.trace.diff import TraceDiff
from gpurun.launcher.trace.model import TraceReport

OF_VARIANTS = ("variant-failed", "slower", "nothing-left", "act-on-cause")


def notes_of(comparison: Comparison) -> tuple[str, ...]:
    """Sentences about the run itself, without the answer and its causes."""
    found = (each for each in comparison.findings if each.level not in ("answer", "cause"))
    found = (each for each in found if each.code not in OF_VARIANTS)
    return tuple(each.sentence for each in found if "variants" not in each.figures)


def warnings_of(comparison: Comparison, variant: VariantResult) -> tuple[str, ...]:
    """What was noticed about a variant."""
    found = (each for each in comparison.findings if each.code != "gradient-differs")
    found = (each for each in found if variant.id in each.figures.get("variants", ()))
    return tuple(each.text.removeprefix(each.figures["of"]) for each in found)


def trace_notes(report: TraceReport | TraceDiff) -> tuple[str, ...]:
    """What was noticed about traces."""
    return tuple(each.text for each in of_level(report.findings, "detail"))


LAUNCHER = Path(__file__).parent.parent / "launcher"
SENTENCES_OF = (
    "compare",
    "report",
    "trace",
    "selftest",
    "search",
    "stats",
    "tensorboard_plugin",
    "plan/estimate.py",
)
"""Where findings are made and shown."""


def num_literals() -> int:
    """How many texts of three words and more that code has, docstrings apart, with those of JavaScript."""
    paths = [path for name in SENTENCES_OF for path in (LAUNCHER / name, *(LAUNCHER / name).rglob("*.[pj]*"))]
    python = [text for path in paths if path.suffix == ".py" for text in _python_texts(path.read_text())]
    scripts = [path.read_text() for path in paths if path.suffix == ".js"]
    without = (re.sub(r"/\*.*?\*/|^\s*//.*?$", "", each, flags=re.DOTALL | re.MULTILINE) for each in scripts)
    quoted = [
        text for each in without for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`', each)
    ]
    texts = [*python, *(re.sub(r"\$\{[^}]*\}", " ", double or back) for double, back in quoted)]
    return sum(sum(bool(re.search("[A-Za-z]{2}", word)) for word in text.split()) > 2 for text in texts)


def _python_texts(source: str) -> list[str]:
    """Texts of a module; one of an f-string, without what it computes."""
    nodes = list(ast.walk(ast.parse(source)))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out = parts | {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = []
    for node in nodes:
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        known = [each.value if isinstance(each, ast.Constant) else " " for each in values]
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in left_out:
            texts.append("".join(each for each in known if isinstance(each, str)))
    return texts


@cache
def literals() -> frozenset[str]:
    """Texts of three words and more in the code that makes and shows findings, docstrings apart.

    A part that a sentence of the table has as well ("of its step") shows nothing.
    """
    paths = [path for name in SENTENCES_OF for path in (LAUNCHER / name, *(LAUNCHER / name).rglob("*.py"))]
    trees = [ast.parse(path.read_text()) for path in paths if path.is_file()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docs]
    texts = {node.value.strip(" ,;:.") for node in constants if isinstance(node.value, str)}
    kinds = [text for kind in KINDS.values() for text in (kind.sentence, *kind.cases.values())]
    table = "\n".join([*kinds, *REASONS.values()])
    long = (text for text in texts if sum(word.isalpha() and len(word) > 1 for word in text.split()) > 2)
    return frozenset(text for text in long if text not in table)


def said_outside_the_table(found: Iterable[Finding]) -> set[str]:
    """Literals of the code that are in the text of a finding."""
    return {text for each in found for text in literals() if text in each.text}
