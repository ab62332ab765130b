"""A variant without an interval: every report says why, and how many rounds are missing."""

from collections.abc import Sequence

import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.rundir.files import write_json
from tests.known import known
from tests.said import notes_of
from tests.unit.compare import hand_made
from tests.unit.compare.hand_made import EVEN, UNEVEN, Files, by_id, launch, plan, variant, write_splits

files = hand_made.files

THIRD = variant("ddp-2-40-24", (40, 24))
OUTLYING = "one of 6 rounds of ddp 40/24 took 169 ms per step, the others 60.0 to 62.5"


def write_three(files: Files, third_ms: Sequence[float], second_ms: Sequence[float] = ()) -> None:
    """Even at 110 ms, 48/16 at 66 ms, and 40/24 in one launch."""
    every = [EVEN, UNEVEN, THIRD]
    write_json(files.run.plan, plan(every, [launch("01-ddp-2", "ddp-2", 0, every, rounds=len(third_ms))]))
    steps = [i / 2 for i in range(len(third_ms))]
    files.rounds(EVEN, "01-ddp-2", [110 + step for step in steps])
    files.rounds(UNEVEN, "01-ddp-2", second_ms or [66 + step for step in steps])
    files.rounds(THIRD, "01-ddp-2", third_ms)
    files.close(*every)


def why_of(comparison: Comparison) -> str:
    """Why the answer isn't sure."""
    return next(each.text for each in comparison.findings if each.code == "too-few")


def test_a_row_without_an_interval_says_that_rounds_are_missing(files: Files) -> None:
    write_three(files, [60.0 + i / 2 for i in range(6)])
    comparison = compare_run(files.run)
    assert comparison.fastest == THIRD.id  # each rival by itself takes no more than 6 rounds
    row = known(by_id(comparison)[UNEVEN.id].vs_baseline)
    assert row.why == "6 rounds are too few to rule out chance in 2 comparisons"
    assert f"ddp 48/16 against the baseline: no verdict, since {row.why}." in notes_of(comparison)
    assert known(by_id(comparison)[THIRD.id].vs_baseline).why is None


def test_the_number_of_rounds_that_is_named_is_enough(files: Files) -> None:
    write_three(files, [60.0 + i / 2 for i in range(7)])
    rows = by_id(compare_run(files.run))
    assert [known(rows[one.id].vs_baseline).verdict for one in (UNEVEN, THIRD)] == ["faster", "faster"]


def test_the_headline_has_the_interval_of_the_table(files: Files) -> None:
    write_three(files, [60.0 + i / 2 for i in range(6)])
    comparison = compare_run(files.run)
    assert known(by_id(comparison)[THIRD.id].vs_baseline).ci == pytest.approx((-45.4545, -44.4444), abs=0.01)
    assert "44.9 % faster than the baseline ddp 32/32 (44.4 to 45.5; 6 of 6 pairs)" in comparison.headline


def test_an_outlying_round_is_named(files: Files) -> None:
    write_three(files, [60.0, 60.5, 169.0, 61.5, 62.0, 62.5])
    comparison = compare_run(files.run)
    assert known(by_id(comparison)[THIRD.id].vs_baseline).why == OUTLYING
    assert why_of(comparison) == OUTLYING
    assert not any("too few" in note for note in notes_of(comparison) if THIRD.id in note)


@pytest.mark.parametrize("num", [7, 9, 11])
def test_an_outlying_round_of_more_than_six_is_named_next_to_the_interval(files: Files, num: int) -> None:
    steps_ms = [60.0 + i / 2 for i in range(num)]
    write_three(files, [*steps_ms[:2], 169.0, *steps_ms[3:]])
    comparison = compare_run(files.run)
    (open_,) = comparison.open
    low, high = known(open_.ci)
    assert low < 0 < high
    said = f"one of {num} rounds of ddp 40/24 took 169 ms per step, the others 60.0 to {steps_ms[-1]:.1f}"
    assert "can't be distinguished (" in comparison.headline
    assert why_of(comparison) == said
    assert not any("rounds" in note for note in notes_of(comparison) if "ddp 40/24" in note)


def test_a_table_whose_row_an_outlying_round_leaves_open_has_a_note(files: Files) -> None:
    write_three(files, [*(104.0 + i / 2 for i in range(8)), 300.0])
    comparison = compare_run(files.run)
    row = known(by_id(comparison)[THIRD.id].vs_baseline)
    assert (row.verdict, known(row.ci)[1] > 0) == ("inconclusive", True)
    assert row.why == "one of 9 rounds of ddp 40/24 took 300 ms per step, the others 104 to 108"
    assert f"ddp 40/24 against the baseline: no verdict, since {row.why}." in notes_of(comparison)


def test_an_outlying_round_of_many_decides_nothing_and_isnt_named(files: Files) -> None:
    steps_ms = [60.0 + i / 2 for i in range(14)]
    write_three(files, [*steps_ms[:2], 169.0, *steps_ms[3:]])
    comparison = compare_run(files.run)
    assert comparison.fastest == THIRD.id
    assert "169" not in "\n".join((comparison.summary, *notes_of(comparison)))


def test_of_two_outlying_rounds_none_is_named(files: Files) -> None:
    write_three(files, [60.0, 60.5, 169.0, 61.5, 62.0, 150.0, 63.0])
    comparison = compare_run(files.run)
    assert comparison.fastest is None
    assert "took" not in comparison.headline


def test_a_round_like_the_others_isnt_outlying(files: Files) -> None:
    write_three(files, [64.0, 64.5, 67.5, 65.5, 66.0, 62.5])
    comparison = compare_run(files.run)
    assert comparison.fastest is None
    assert "took" not in comparison.headline


def test_of_a_round_that_was_slow_for_both_the_worse_is_named(files: Files) -> None:
    write_three(files, [60.0, 60.5, 169.0, 61.5, 62.0, 62.5], second_ms=[66.0, 66.5, 80.0, 67.5, 68.0, 68.5])
    assert why_of(compare_run(files.run)) == OUTLYING


def test_fewer_rounds_than_any_verdict_takes(files: Files) -> None:
    write_splits(files, 5)
    comparison = compare_run(files.run)
    few = "5 rounds are too few to rule out chance"
    assert known(by_id(comparison)[UNEVEN.id].vs_baseline).why == few
    assert why_of(comparison) == few
    assert not any(few in note for note in notes_of(comparison))  # once is enough
