"""Words are the field's, and every sentence is written once."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.unit.house.source import ROOT, Module, identifiers, modules, page, planted

DIALECT = (
    r"tell(?!\()|tells|telling|told",  # `file.tell()` is Python's
    "stand(?![-_]in)|stands|standing|stood",  # a stand-in is a test's
    "beside",
    "nobody(?:['’]?s)?",
    "folders?",
    "disturb(?:s|ed|ing|ance|ances)?",
    "anew",
)
"""Each word in all its forms."""
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
    r"of one's own",
    r"GPUs? of NVIDIA",
)


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


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FRAGMENT = re.compile(r"(?:What|Of|By)\b")


def test_docstrings_of_public_names_are_statements() -> None:
    """`The result of a gate.`, not `What a gate found.`: no one has to guess the rest of a sentence."""
    found = [
        f"{module.path}:{line}: {text}" for module in modules().values() for line, text in fragments(module)
    ]
    assert not found, "\n".join(found)


def fragments(module: Module) -> Iterator[tuple[int, str]]:
    """The docstrings of public names that begin as parts of a sentence."""
    for node in module.nodes:
        if isinstance(node, Documented) and not getattr(node, "name", "").startswith("_"):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def test_fragments_are_found() -> None:
    texts = ['"""Of each storage."""', 'class A:\n    """What it does."""', 'def f():\n    """By rank."""']
    assert [len(list(fragments(planted(text)))) for text in texts] == [1, 1, 1]
    assert not list(fragments(planted('"""Often."""\ndef _f():\n    """By rank."""')))


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
        for line, text in whole_texts(module):
            yield f"{module.path}:{line}", text
    for path in sorted(page()):
        for line, text in js_texts((ROOT / path).read_text()):
            yield f"{path}:{line}", text


def whole_texts(module: Module) -> Iterator[tuple[int, str]]:
    """String literals and f-strings with `{}` for each value; no docstrings, no annotations."""
    left_out = {id(node) for part in not_shown(module) for node in ast.walk(part)}
    for node in module.nodes:
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


def not_shown(module: Module) -> Iterator[ast.expr]:
    """Docstrings and annotations."""
    for node in module.nodes:
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
    module = planted(f'"""{advice}"""\nprint(f"{{copies}}: {advice}")')
    assert [sentence for _, text in whole_texts(module) for sentence in sentences(text)] == [advice]
    (said,) = whole_texts(planted('x = f"the split {split} is for {n:>{w}}, not for {m}"'))
    assert said[1] == "the split {} is for {}, not for {}"
    script = "// a comment isn't shown to anyone\nthrow Error(`no lane of ${a.b} is there`)"
    assert list(js_texts(script)) == [(2, "no lane of {} is there")]
