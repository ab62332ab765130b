"""What `gpurun diff` shows."""

from dataclasses import replace

from gpurun.launcher.compare.diff import Diff, NamedVariant, NotComparable, VariantDiff
from gpurun.launcher.compare.model import Difference
from gpurun.launcher.findings.finding import finding
from gpurun.launcher.report.terminal.changes import render_diff
from gpurun.launcher.units import change_text
from tests.wording import Wording

SLOWER = VariantDiff("ddp-2-even", "ddp 32/32", 42.1, 47.9, Difference(13.8, (12.9, 14.6), "slower"), None)
LOST = VariantDiff(
    "dp-2-even", "dp 32/32", 61.3, None, Difference(None, None, "inconclusive"), "oom in run B"
)
UNLIKE = NotComparable("ddp-2-48-16", "ddp 48/16", "precision: fp32 → bf16")
DIFF = Diff(
    "old",
    "new",
    0.975,
    (SLOWER, LOST),
    (UNLIKE,),
    (),
    (NamedVariant("ddp-2-40-24", "ddp 40/24"),),
    ("host versions.torch: 2.12.1 → 2.13.0",),
    findings=(
        finding("changed", where="ddp 32/32", change=change_text(13.8), percent=13.8, ci=(12.9, 14.6)),
    ),
)


def test_runs_with_nothing_in_common_say_so(wording: Wording) -> None:
    text = render_diff(replace(DIFF, ci_level=None, variants=()), 80)
    wording(text)
    assert "confidence" not in text


def test_a_note_on_all_variants_is_printed_once_and_no_level_of_intervals_that_are_not_there() -> None:
    note = "both runs have only one launch"
    unsure = replace(SLOWER, difference=Difference(13.8, None, "inconclusive"), note=note)
    findings = (finding("unchanged"), finding("too-few", why=note, weight=1))
    text = render_diff(replace(DIFF, variants=(unsure, replace(LOST, note=note)), findings=findings), 80)
    assert text.count(note) == 1
    assert "confidence" not in text


def test_long_names_cost_no_figure() -> None:
    label = "ddp 32/32 precision=bf16 accumulate=1 bucket_mb=25 gradient_as_bucket_view=false"
    text = render_diff(replace(DIFF, variants=(replace(SLOWER, label=label), LOST)), 80)
    place = text.splitlines().index(label)
    assert text.splitlines()[place + 1].split() == ["42.1", "47.9", "13.8", "%", "slower", "0.9"]
    assert max(map(len, text.splitlines())) <= 80
