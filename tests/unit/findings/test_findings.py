"""Findings as data: their table, their sentences, and the first screen of a report."""

import json
import re
import shutil
import string
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.cli.main import cli
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.findings import trace_cases
from gpurun.launcher.findings.finding import (
    Finding,
    below_its_name,
    finding,
    noticed,
    of_files,
    ranked,
    relative_to,
    screen_of,
    with_figures,
    worded,
)
from gpurun.launcher.findings.finding_kinds import ADVICE, KINDS, SPENT, Kind, cases_of, outline
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.rundir.files import RunDir
from tests.said import num_literals

ROOT = Path(__file__).resolve().parents[3]
RUNS = sorted((ROOT / "docs" / "runs").iterdir())
MOST_KINDS = 60
"""More of them is a decision: a new kind replaces one, or is one of the details of a kind."""
SLOT = re.compile(r"\{(\w+)(?::\w[\w ]*)?\}")


def figures_for(kind: Kind, case: str | None = None) -> dict[str, object]:
    """A figure for every slot of its sentence."""
    case = case or next(iter(kind.cases), None)
    numbers = {"ci": (1.0, 2.0), "wins": 3, "of": 4, "most": 5}
    units = ("percent", "_ms", "_gib", "_s", "_step", "_byte")
    found: dict[str, object] = {"case": case} if case else {}
    for name in SLOT.findall(kind.sentence_of(found)):
        is_number = name.startswith("num_") or name.endswith(units)
        found[name] = numbers.get(name, 2 if is_number else name.upper())
    return found


def test_there_are_few_kinds() -> None:
    assert len(KINDS) <= MOST_KINDS


PARTS = {part.replace("_", "-") for part in SPENT}
FORMS = (
    *(
        "balanced",
        "alike",
        "several",
        "changing",
        "in-job",
        "recorded",
        "lost",
        "computing",
        "copying",
        "allocating",
        "loading",
        "once",
        "inside",
        "late",
    ),
    *("with-compile", "with-graphs", "with-both"),
)
OF_PARTS = PARTS | {f"{part}-{form}" for part in PARTS for form in FORMS}
"""Advice about a part of a step; `advice_for` makes its name."""


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("finding_kinds.py", KINDS),
        ("trace_cases.py", trace_cases.NOTICED),
        ("finding_kinds.py", ADVICE.keys() - OF_PARTS),
    ],
    ids=["kinds", "cases of traces", "advice"],
)
def test_every_row_is_found_somewhere(table: str, names: Iterable[str]) -> None:
    paths = (ROOT / "launcher").rglob("*.py")
    text = "".join(path.read_text() for path in paths if path != ROOT / "launcher" / "findings" / table)
    assert [name for name in names if f'"{name}"' not in text] == []


def test_few_texts_are_outside_of_the_table() -> None:
    """There were 859 by this count before the table."""
    assert num_literals() <= 0.6 * 859


@pytest.mark.parametrize("code", KINDS)
def test_a_kind_has_a_sentence_a_meaning_a_rule_and_something_to_do(code: str) -> None:
    kind = KINDS[code]
    assert re.fullmatch("[a-z]+(-[a-z]+)*", code)
    assert bool(kind.title) == (kind.level == "answer")
    assert kind.sentence
    assert all(text.endswith(".") for text in (kind.means, kind.decided, kind.todo))
    assert all((ROOT / page).exists() for page in re.findall(r"docs/[\w-]+\.md", kind.todo))
    assert ("{case}" in kind.sentence) == bool(kind.cases)
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", case) for case in kind.cases)
    for case in kind.cases or [None]:
        said = finding(code, **figures_for(kind, case))  # type: ignore[arg-type]
        assert not re.search(r"[\[\]]|\{\w+\}", said.text.replace("{launches: …}", ""))
        assert not said.text.endswith(".")
        assert said.headline.endswith(".")


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"a": "x"}, "x"),
        ({"a": "x", "b_ms": 2.0}, "x, 2.00 ms"),
        ({"a": "x", "num_c": 3}, "x"),
        ({"a": "x", "b_ms": 2.0, "num_c": 1}, "x, 2.00 ms of 1 launch"),
    ],
)
def test_what_is_not_known_is_left_out(figures: dict[str, object], said: str) -> None:
    assert worded("{a}[, {b_ms} ms[ of {num_c:launch}]]", figures) == said


@given(st.dictionaries(st.sampled_from(string.ascii_lowercase), st.text("xyz", min_size=1), min_size=1))
def test_a_sentence_has_every_figure_that_is_known(figures: dict[str, str]) -> None:
    template = "".join(f"[<{{{name}}}>]" for name in string.ascii_lowercase)
    assert worded(template, figures) == "".join(f"<{figures[name]}>" for name in sorted(figures))


@given(st.lists(st.sampled_from(sorted(KINDS)), unique=True), st.integers(0, 4))
def test_each_finding_is_in_one_place_of_the_screen(codes: list[str], most: int) -> None:
    found = ranked(finding(code, weight=0.5, **figures_for(KINDS[code])) for code in codes)  # type: ignore[arg-type]
    screen = screen_of(found, most)
    levels = ("answer", "danger", "cause", "remedy")
    num = {level: sum(each.level == level for each in found) for level in levels}
    titles = [title for title, _ in screen.lines]
    assert len(titles) == sum(num[level] > 0 for level in ("answer", "cause", "remedy"))
    assert ("Why" in titles, "Next" in titles) == (num["cause"] > 0, num["remedy"] > 0)
    more = max(0, num["danger"] - most)
    assert len(screen.dangers) == min(most, num["danger"]) + (more > 0)
    shown = len(screen.lines) + len(screen.dangers) - (more > 0)
    assert shown + len(screen.details) == len(found)


def test_findings_are_in_the_order_of_what_they_concern() -> None:
    figures = figures_for(KINDS["input-stall"])
    small, large = (finding("input-stall", weight=share, **figures) for share in (0.1, 0.4))  # type: ignore[arg-type]
    answer = finding("not-measured", case="none")
    assert ranked([small, answer, large]) == (answer, large, small)


@pytest.fixture(params=RUNS, ids=lambda path: str(path.name))
def comparison(request: pytest.FixtureRequest, tmp_path: Path) -> Comparison:
    return compare_run(RunDir(shutil.copytree(request.param, tmp_path / "run")))


@pytest.mark.parametrize(("width", "most"), [(80, 12), (120, 9)])
def test_the_answer_is_in_the_first_lines_and_little_is_below_the_table(
    comparison: Comparison, width: int, most: int
) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", render_table(comparison, width, False, "runs/a/latest"))
    screen, *table, last = text.strip("\n").split("\n\n")
    assert table
    assert screen.startswith(("Fastest  ", "Answer  "))
    assert {line.split()[0] for line in screen.splitlines() if not line.startswith(" ")} <= {
        "Fastest", "Answer", "Why", "Next", "!",
    }  # fmt: skip
    assert len(screen.splitlines()) + len(last.splitlines()) <= most
    assert "--details" in last


def test_details_have_every_finding_that_the_screen_lacks(comparison: Comparison) -> None:
    text = " ".join(render_table(comparison, 200, True, "runs/a/latest", details=True).split())
    for each in comparison.findings:
        shown = (said.text.replace("RUN", "runs/a/latest") for said in (each, below_its_name(each)))
        assert any(" ".join(said.split())[1:] in text for said in shown)  # some begin with a capital letter


def test_of_a_report_that_is_longer_than_the_terminal_the_answer_is_at_the_end_too(
    comparison: Comparison,
) -> None:
    whole = render_table(comparison, 200, False, has_colour=False, height=100)
    answer = re.split(r"\n(?! )", whole)[0]
    assert render_table(comparison, 200, False, has_colour=False, height=5).endswith(f"\n\n{answer}")


def test_a_finding_is_the_same_after_it_was_written_and_read() -> None:
    found = finding(
        "fastest", "a", (0, 1), leader="a", other="b", by="1 %", percent=1.0, ci=(0.5, 1.5), how="faster than"
    )
    read = Finding(**json.loads(json.dumps(vars(found))))
    assert {**vars(read), "ranks": tuple(read.ranks)} == vars(found)


def test_a_finding_may_have_other_figures() -> None:
    found = noticed("idle-last-step", file="/a/rank0.json", last_step=2000, end_step=2001)
    said = "step 2000, the last, launched no GPU work and is left out; --steps 2000:2001 shows it"
    assert found.text == f"/a/rank0.json: {said}"
    assert relative_to(Path("/a"), found) == with_figures(found, file="rank0.json")
    assert with_figures(found, of="A: ", file=None).text == f"A: {said}"


def test_notes_that_differ_in_the_file_only_are_said_once() -> None:
    def said(count: int) -> list[str]:
        notes = [noticed("no-steps", file=f"r{rank}.json") for rank in range(count)]
        return [each.text for each in of_files([*notes, noticed("steps-overlap", file="r0.json")])][:-1]

    sentence = "no steps, which profiler.step() would mark"
    assert said(1) == [f"r0.json: {sentence}"]
    assert said(2) == [f"r0.json and r1.json: {sentence}"]
    assert said(8) == [f"r0.json and 7 others: {sentence}"]
    other = noticed("cut-off", file="a.json", cut_byte=1), noticed("cut-off", file="b.json", cut_byte=2)
    assert of_files(other) == other


def test_a_code_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(cli, ["explain", "input-stall"])
    assert said.exit_code == 0
    assert said.output.startswith("input-stall (cause)\n")
    assert all(part in said.output for part in ("What it means: ", "How it is decided: ", "What to do: "))
    listed = CliRunner().invoke(cli, ["explain"]).output.splitlines()
    assert [line.split()[0] for line in listed] == list(KINDS)
    (entry,) = json.loads(CliRunner().invoke(cli, ["explain", "gate", "--json"]).output)["findings"]
    assert (entry["code"], entry["level"]) == ("gate", "answer")


@pytest.mark.parametrize("code", KINDS)
def test_an_explanation_has_no_slots(code: str) -> None:
    assert not [case for case in cases_of(KINDS[code].cases) if re.search(r"{\w+(:\w|})|[][]", case)]
    assert outline("[{file}: ]{num:launch} of {which}[ ({ms} ms)]") == "… launches of … (… ms)"


def test_an_unknown_code_has_the_nearest_one() -> None:
    said = CliRunner().invoke(cli, ["explain", "input-stal"], standalone_mode=False)
    assert said.exception is not None
    assert "did you mean input-stall?" in str(said.exception)


@pytest.mark.parametrize(
    ("figures", "about"), [({}, ("v",)), ({"variants": 3}, ("v",)), ({"variants": [3, "a", "v"]}, ("v", "a"))]
)
def test_figures_of_a_stored_finding_may_be_anything(
    figures: dict[str, object], about: tuple[str, ...]
) -> None:
    assert Finding("noticed", "detail", "odd", "v", (), None, figures).about == about


@pytest.mark.parametrize("change", [{"code": "of-the-future"}, {"figures": {"case": "of-the-future"}}])
def test_a_comparison_with_a_finding_of_an_unknown_kind_is_refused_unless_another_gpurun_made_it(
    change: dict[str, object],
) -> None:
    stored = json.loads((RUNS[0] / "comparison.json").read_bytes())
    stored["findings"][0] |= change
    with pytest.raises(msgspec.ValidationError, match="finding of no kind"):
        msgspec.convert(stored, Comparison)
    assert not msgspec.convert(stored | {"conclusions": 0}, Comparison).is_current
