"""Two runs against each other, and the gate for CI."""

import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.cli.output import check_gate
from gpurun.launcher.compare.diff import diff_runs, gated
from gpurun.launcher.compare.figures.ranks import RankFigures
from gpurun.launcher.compare.label import value_text
from gpurun.launcher.compare.model import Comparison, Difference, Gate, Noise, StepTime, VariantResult
from gpurun.launcher.compare.ranking import opposite
from gpurun.launcher.errors import GateError, UndecidedError
from gpurun.launcher.rundir.records import CodeVersion, Status
from gpurun.launcher.stats.estimates import percent_from_log
from tests.known import known
from tests.measured import measured
from tests.unit.compare.test_compare_explain import rank
from tests.wording import Wording


def result(
    variant_id: str, medians_ms: list[float], status: Status = "ok", global_batch: int = 64
) -> VariantResult:
    return measured(
        variant_id,
        (global_batch // 2, global_batch // 2),
        split_name="even",
        status=status,
        rounds=28,
        launches=len(medians_ms),
        step_ms=StepTime(sorted(medians_ms)[len(medians_ms) // 2], None) if medians_ms else None,
        samples_per_s=1.0 if medians_ms else None,
        launch_ms=tuple(medians_ms),
    )


def run(
    *results: VariantResult, host: dict[str, Any] | None = None, job: dict[str, Any] | None = None
) -> Comparison:
    return Comparison(
        1, "job", job or {}, host or {}, "v", None, Noise(None, None, None), results, None, True
    )


def under_load(run: Comparison) -> Comparison:
    """The same, whose rank waited for cores."""
    (measured,) = run.variants
    ranks = (replace(RankFigures(0, "cpu:0", 1, None, {}, None, None), queue_percent=8.0),)
    return replace(run, variants=(replace(measured, ranks=ranks),))


A = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]
B = [110.0, 111.0, 108.0, 110.5, 109.5, 110.0]


def test_percent_of_b_against_a_with_welchs_interval() -> None:
    (change,) = diff_runs(run(result("v", A)), run(result("v", B))).variants
    logs = [[math.log(ms) for ms in medians] for medians in (B, A)]
    expected = scipy.stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert change.difference.ci == pytest.approx(tuple(100 * math.expm1(end) for end in expected))
    assert change.difference.percent == pytest.approx(9.83, abs=0.01)
    assert (change.difference.verdict, change.note, change.label) == ("slower", None, "ddp 32/32")
    assert known(change.b_ms) / known(change.a_ms) - 1 == pytest.approx(
        known(change.difference.percent) / 100
    )


def loaded(measured: VariantResult, queue_percent: float, throttled: str | None = None) -> VariantResult:
    rank = RankFigures(
        0, "cpu:0", 32, 100.0, {}, None, None, queue_percent=queue_percent, throttled=throttled
    )
    return replace(measured, ranks=(rank,))


def test_a_low_clock_leaves_past_runs_without_a_verdict() -> None:
    (change,) = diff_runs(run(result("v", A)), run(loaded(result("v", B), 0.0, "hot"))).variants
    assert (change.difference.verdict, change.note) == ("inconclusive", "the clock of a GPU was throttled")
    assert change.difference.ci is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [(A, B), (B, A), (A, A), (A[:1], B[:1])],
    ids=["slower", "faster", "the same", "one launch"],
)
def test_the_answer_is_what_changed_most(a: list[float], b: list[float], wording: Wording) -> None:
    found = diff_runs(run(result("v", a)), run(result("v", b))).findings
    wording(*(f"{each.level}: {each.text}" for each in found))


def test_without_the_same_work_nothing_is_compared(wording: Wording) -> None:
    other = replace(result("v", B), precision="bf16")
    wording(*(f"{each.level}: {each.text}" for each in diff_runs(run(result("v", A)), run(other)).findings))


def test_a_cause_in_the_traces_is_named_with_what_it_grew_by(wording: Wording) -> None:
    before, after = (
        replace(result("v", times), ranks=(rank(0, 32, work_ms, input=work_ms - 60),))
        for times, work_ms in ((A, 100.0), (B, 110.0))
    )
    found = diff_runs(run(before), run(after)).findings
    assert [each.code for each in found] == ["changed", "input-stall", "act-on-cause"]
    wording(found[1].text)


def test_the_level_is_shared_among_variants() -> None:
    diff = diff_runs(run(result("v", A), result("w", A)), run(result("v", B), result("w", A)))
    assert diff.ci_level == 0.975
    (alone,) = diff_runs(run(result("v", A)), run(result("v", B))).variants
    assert known(diff.variants[0].difference.ci)[0] < known(alone.difference.ci)[0]
    assert diff.variants[1].difference.percent == pytest.approx(0)


def gate(a: Comparison, b: Comparison, percent: float = 3.0) -> Gate:
    return known(gated(diff_runs(a, b), a, b, percent).gate)


def said(a: Comparison, b: Comparison, percent: float = 3.0) -> list[str]:
    """What the gate says, the answer first."""
    return [each.sentence for each in gated(diff_runs(a, b), a, b, percent).findings]


SCATTERED = [80.0, 120.0, 95.0, 110.0, 85.0, 105.0]
V_OF_A, W_OF_A, V_OF_B = result("v", A), result("w", A), result("v", B)
FAILED = result("v", [], status="oom")


@pytest.mark.parametrize(
    ("in_a", "in_b", "percent", "outcome", "rows"),
    [
        ((V_OF_A,), (V_OF_B,), 3.0, "slower", {"v": "slower"}),
        ((V_OF_A,), (V_OF_B,), 8.0, "slower", {"v": "slower"}),
        ((V_OF_A,), (V_OF_B,), 9.8, "undecided", {"v": "undecided"}),
        ((V_OF_A,), (V_OF_B,), 12.0, "not slower", {"v": "not slower"}),
        ((V_OF_B,), (V_OF_A,), 0.0, "not slower", {"v": "not slower"}),
        ((V_OF_A, W_OF_A), (V_OF_B, W_OF_A), 3.0, "slower", {"v": "slower", "w": "not slower"}),
        ((V_OF_A, W_OF_A), (V_OF_A, W_OF_A), 3.0, "not slower", {"v": "not slower", "w": "not slower"}),
        ((FAILED, W_OF_A), (FAILED, W_OF_A), 3.0, "not slower", {"w": "not slower"}),
        (  # 5 % on average is neither slower than 3 % nor not
            (result("v", SCATTERED),),
            (result("v", [1.05 * ms for ms in SCATTERED]),),
            3.0,
            "undecided",
            {"v": "undecided"},
        ),
        ((result("v", [100.0]),), (result("v", [150.0]),), 3.0, "undecided", {"v": "undecided"}),
        ((V_OF_A,), (result("v", [], status="failed"),), 3.0, "undecided", {"v": "undecided"}),
        ((V_OF_A,), (result("v", A, global_batch=128),), 3.0, "undecided", {"v": "undecided"}),
        ((result("x", A),), (result("y", A),), 3.0, "undecided", {}),
    ],
)
def test_a_gate_has_three_outcomes(
    in_a: tuple[VariantResult, ...],
    in_b: tuple[VariantResult, ...],
    percent: float,
    outcome: str,
    rows: dict[str, str],
    wording: Wording,
) -> None:
    """One slower variant is enough, and all must pass; what failed in run A already is not for the gate."""
    a, b = run(*in_a), run(*in_b)
    found = gate(a, b, percent)
    assert (found.outcome, {row.a: row.outcome for row in found.rows}) == (outcome, rows)
    wording(said(a, b, percent))


def test_an_interval_that_reaches_minus_100_percent_has_an_opposite() -> None:
    """Of an early look at launches that scatter by much: −40 of logarithms is −100 % as a float."""
    found = opposite(Difference(-50.0, (-100.0, 100.0), "inconclusive"))
    assert (found.percent, known(found.ci)[0]) == (100.0, -50.0)
    assert 1e12 < known(found.ci)[1] < math.inf
    assert percent_from_log(1000.0) < math.inf


def test_a_gate_has_no_step_where_waiting_begins_to_be_refused() -> None:
    """Bounds get wider with it, by 5 % where runs are refused."""
    widths = []
    for percent in (0.0, 2.0, 4.9):
        (row,) = gate(run(result("v", A)), run(loaded(result("v", B), percent))).rows
        low, high = known(row.ci)
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[1] - widths[0] < 2.5
    assert widths[2] - widths[0] > 9


def test_runs_with_other_load_are_refused(wording: Wording) -> None:
    """Identical code gave "21 % slower beyond doubt", though the second run had refused to rank."""
    a, b = run(result("v", A)), run(result("v", [1.3 * ms for ms in A]))
    assert gate(a, b).outcome == "slower"
    busy = under_load(b)
    for pair in ((a, busy), (busy, a)):
        assert gate(*pair).outcome == "undecided"
        wording(said(*pair))
        assert any(each.startswith("Stop other programs") for each in said(*pair))


def test_the_command_ends_by_the_outcome(wording: Wording) -> None:
    a, b = run(result("v", A)), run(result("v", B))
    with wording.raises(GateError) as failed:
        check_gate(gate(a, b))
    with pytest.raises(UndecidedError, match="so it doesn't pass") as undecided:
        check_gate(gate(a, b, 9.8))
    check_gate(gate(a, a))
    assert (failed.value.exit_code, undecided.value.exit_code) == (5, 6)


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=8))
def test_a_run_against_itself_never_differs(medians_ms: list[float]) -> None:
    diff = diff_runs(run(result("v", medians_ms)), run(result("v", medians_ms)))
    assert diff.variants[0].difference.verdict in ("same", "inconclusive")
    assert diff.variants[0].difference.percent == pytest.approx(0)
    assert gate(run(result("v", medians_ms)), run(result("v", medians_ms)), 0.0).outcome != "slower"
    assert diff.marks == ()


def test_below_six_launches_there_is_no_verdict(wording: Wording) -> None:
    (change,) = diff_runs(run(result("v", A[:5])), run(result("v", B))).variants
    assert (change.difference.ci, change.difference.verdict) == (None, "inconclusive")
    wording(change.note)


def test_waiting_for_cores_in_either_run_widens_the_interval() -> None:
    ranks = (RankFigures(0, "cpu:0", 32, 100.0, {}, None, None, queue_percent=4.0),)
    busy = replace(result("v", A), ranks=ranks)
    (change,) = diff_runs(run(result("v", A)), run(result("v", B))).variants
    for runs in ((run(busy), run(result("v", B))), (run(result("v", B)), run(busy))):
        (wider,) = diff_runs(*runs).variants
        logs = [[math.log1p(end / 100) for end in known(it.difference.ci)] for it in (change, wider)]
        widths = [high - low for low, high in logs]
        assert widths[1] - widths[0] == pytest.approx(-2 * math.log1p(-4.0 * 4.0 / 5.0 / 100))


def test_one_launch_has_no_interval_and_the_note_says_how_to_get_one(wording: Wording) -> None:
    (change,) = diff_runs(run(result("v", [100.0])), run(result("v", [150.0]))).variants
    assert change.difference.percent == pytest.approx(50.0)
    assert (change.difference.ci, change.difference.verdict) == (None, "inconclusive")
    wording(change.note)
    decided = run(result("v", [150.0]), job={"until": "decided"})
    (change,) = diff_runs(run(result("v", A)), decided).variants
    wording(known(change.note))
    assert known(change.note).endswith("set a larger `budget`")


def test_a_variant_that_failed_in_one_run_is_not_compared() -> None:
    (change,) = diff_runs(run(result("v", A)), run(result("v", B, status="failed"))).variants
    assert change.difference == Difference(None, None, "inconclusive")
    assert change.note == "failed in run B"
    (change,) = diff_runs(run(result("v", [], status="oom")), run(result("v", B))).variants
    assert (change.a_ms, change.b_ms, change.note) == (None, pytest.approx(109.83, abs=0.01), "oom in run A")


def test_variants_of_one_run_only_are_listed() -> None:
    diff = diff_runs(run(result("v", A), result("x", A)), run(result("y", A), result("v", A)))
    assert [(each.id, each.label) for each in diff.only_in_a] == [("x", "ddp 32/32")]
    assert [each.id for each in diff.only_in_b] == ["y"]
    assert [variant.id for variant in diff.variants] == ["v"]
    assert diff_runs(run(result("x", A)), run(result("y", A))).ci_level is None


@pytest.mark.parametrize(
    ("job", "change", "reason"),
    [
        ({}, {"global_batch": 128}, "global_batch: 64 → 128"),
        ({}, {"split": (48, 16)}, f"split: {value_text((32, 32))} → {value_text((48, 16))}"),
        ({}, {"precision": "bf16"}, "precision: fp32 → bf16"),
        ({}, {"accumulate": 2}, "accumulate: 1 → 2"),
        ({"workload": "gpt"}, {}, "workload: sleep → gpt"),
        ({"params": {"layers": 4}}, {}, "params: none → layers=4"),
        ({}, {"varied": {"params": {"layers": 2}}}, "params: none → layers=2"),
    ],
)
def test_variants_of_one_name_that_do_other_work_are_not_compared(
    job: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    a = run(result("v", A), result("w", A), job={"workload": "sleep"})
    other = replace(result("v", B), **change)
    b = run(other, *([] if job else [result("w", B)]), job={"workload": "sleep", **job})
    diff = diff_runs(a, b)
    (unlike,) = diff.not_comparable
    assert (unlike.id, unlike.reason) == ("v", reason)
    assert [variant.id for variant in diff.variants] == ([] if job else ["w"])
    assert diff.ci_level == (None if job else 0.95)


def test_differences_of_host_versions_and_job_are_marked(wording: Wording) -> None:
    host = {
        "hostname": "n1",
        "versions": {"torch": "2.12.1"},
        "gpus": [{"name": "H200", "used_gib": 1.0, "processes": [{"pid": 1}]}],
        "load_average": [1, 2, 3],
    }
    other = {
        "hostname": "n1",
        "versions": {"torch": "2.13.0", "numpy": "2.1"},
        "gpus": [{"name": "H100", "used_gib": 2.0, "processes": [{"pid": 2}]}],
        "load_average": [4, 5, 6],
    }
    a = run(result("v", A), host=host, job={"steps": {"rounds": 28}, "args": [1, 2]})
    b = replace(a, host=other, job={"steps": {"rounds": 14}, "args": [1, 3]})
    wording(diff_runs(a, b).marks)


def test_a_setting_at_its_default_is_no_difference(wording: Wording) -> None:
    a = run(result("v", A), job={})
    assert diff_runs(a, replace(a, job={"bucket_mb": 25})).marks == ()
    wording(diff_runs(a, replace(a, job={"bucket_mb": 50})).marks)


def test_a_run_that_could_not_be_ranked_is_marked(wording: Wording) -> None:
    a = run(result("v", A))
    b = under_load(a)
    (mark,) = diff_runs(a, b).marks
    wording(mark)


def test_a_balanced_split_that_moves_by_one_sample_is_the_same_work() -> None:
    balanced, other = (
        replace(result("v", A), split_name="balanced", split=split) for split in ((40, 24), (41, 23))
    )
    assert not diff_runs(run(balanced), run(other)).not_comparable
    assert diff_runs(run(balanced), run(replace(other, split_name="even"))).not_comparable


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        *(("compile", False, True), ("channels_last", False, True), ("threads", 2, 4), ("seed", 0, 1)),
        ("params", {"layers": 2}, {"layers": 4}),
    ],
)
def test_settings_that_change_the_work_can_be_allowed_to_differ(key: str, old: Any, new: Any) -> None:
    a, b = (run(result("v", A), job={"workload": "gpt", key: value}) for value in (old, new))
    (unlike,) = diff_runs(a, b).not_comparable
    assert unlike.reason == f"{key}: {value_text(old)} → {value_text(new)}"
    allowed = diff_runs(a, b, may_differ=(key,))
    assert (allowed.not_comparable, len(allowed.variants)) == ((), 1)
    assert any(mark.startswith(f"job {key}") for mark in allowed.marks)


def test_the_code_of_both_runs_is_compared(wording: Wording) -> None:
    before, other = (
        replace(result("v", A), code=code)
        for code in ({"train.py": "1", "model.py": "2"}, {"train.py": "3", "model.py": "2", "new.py": "4"})
    )
    a = replace(run(before), code=CodeVersion("/x", "1" * 40, False))
    b = replace(run(other), code=CodeVersion("/y", "1" * 40, True))
    wording(diff_runs(a, b).marks)
    assert diff_runs(a, replace(a, code=CodeVersion("/y", "1" * 40, False))).marks == ()
    assert diff_runs(a, run(result("v", A))).marks == ()
