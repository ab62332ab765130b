"""Two runs against each other, and the gate for CI."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from gpurun.launcher.cli.commands.diff import check_gate
from gpurun.launcher.compare.diff import Gate, diff_runs, gated, why_undecided
from gpurun.launcher.compare.label import value_text
from gpurun.launcher.compare.model import (
    Comparison,
    Difference,
    ExposedComm,
    Noise,
    Status,
    StepTime,
    VariantResult,
)
from gpurun.launcher.errors import GateError, SpecError
from tests.known import known


def result(
    variant_id: str, medians_ms: list[float], status: Status = "ok", global_batch: int = 64
) -> VariantResult:
    return VariantResult(
        id=variant_id,
        strategy="ddp",
        devices=("cpu:0", "cpu:1"),
        split=(global_batch // 2, global_batch // 2),
        split_name="even",
        global_batch=global_batch,
        precision="fp32",
        accumulate=1,
        varied={},
        status=status,
        reason=None,
        log=None,
        rounds=28,
        launches=len(medians_ms),
        step_ms=StepTime(sorted(medians_ms)[len(medians_ms) // 2], None) if medians_ms else None,
        samples_per_s=1.0 if medians_ms else None,
        vs_baseline=None,
        scaling_efficiency=None,
        gradient_error=None,
        gradient_reference=None,
        exposed_comm_ms=ExposedComm(),
        warnings=(),
        ranks=(),
        launch_ms=tuple(medians_ms),
    )


def run(
    *results: VariantResult, host: dict[str, Any] | None = None, job: dict[str, Any] | None = None
) -> Comparison:
    return Comparison(
        1, "job", job or {}, host or {}, "v", None, Noise(None, None, None), results, None, "", (), True
    )


A = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0]
B = [110.0, 111.0, 108.0, 110.5, 109.5, 110.0]


def test_percent_of_b_against_a_with_welchs_interval() -> None:
    (one,) = diff_runs(run(result("v", A)), run(result("v", B))).variants
    logs = [[math.log(ms) for ms in medians] for medians in (B, A)]
    expected = ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    assert one.difference.ci == pytest.approx(tuple(100 * math.expm1(end) for end in expected))
    assert one.difference.percent == pytest.approx(9.83, abs=0.01)
    assert (one.difference.verdict, one.note, one.label) == ("slower", None, "ddp 32/32")
    assert (one.a_ms, one.b_ms) == (100.0, 110.0)


def test_the_level_is_shared_among_variants() -> None:
    diff = diff_runs(run(result("v", A), result("w", A)), run(result("v", B), result("w", A)))
    assert diff.ci_level == 0.975
    (alone,) = diff_runs(run(result("v", A)), run(result("v", B))).variants
    assert known(diff.variants[0].difference.ci)[0] < known(alone.difference.ci)[0]
    assert diff.variants[1].difference.percent == pytest.approx(0)


@pytest.mark.parametrize(("percent", "trips"), [(3.0, True), (8.0, True), (9.5, False), (20.0, False)])
def test_the_gate_trips_when_the_lower_end_is_above_it(percent: float, trips: bool) -> None:
    diff = diff_runs(run(result("v", A)), run(result("v", B)))
    assert 8.0 < known(diff.variants[0].difference.ci)[0] < 9.5 < known(diff.variants[0].difference.percent)
    assert gated(diff, percent).gate == Gate(percent, ("v",) if trips else (), ())
    assert diff.gate is None


def test_the_gate_lets_faster_runs_pass() -> None:
    assert gated(diff_runs(run(result("v", B)), run(result("v", A))), 0.0).gate == Gate(0.0, (), ())


@pytest.mark.parametrize(
    ("in_a", "in_b", "words"),
    [
        (result("v", [100.0]), result("v", [150.0]), "set steps: {launches: 6}"),
        (result("v", A), result("v", [], status="failed"), "failed in run b"),
        (result("v", A), result("v", A, global_batch=128), "global_batch: 64 → 128"),
    ],
)
def test_what_has_no_interval_leaves_the_gate_undecided(
    in_a: VariantResult, in_b: VariantResult, words: str
) -> None:
    diff = gated(diff_runs(run(in_a), run(in_b)), 3.0)
    assert diff.gate == Gate(3.0, (), ("v",))
    (reason,) = why_undecided(diff)
    assert words in reason


def test_a_variant_that_already_failed_in_run_a_is_not_for_the_gate() -> None:
    diff = gated(diff_runs(run(result("v", [], status="oom")), run(result("v", [], status="oom"))), 3.0)
    assert diff.gate == Gate(3.0, (), ())
    assert why_undecided(diff) == []


def test_the_command_fails_where_the_gate_trips_and_where_it_is_undecided() -> None:
    slower, unknown = (result("v", A), result("v", B)), (result("w", [1.0]), result("w", [1.0]))
    both = [run(*pair) for pair in zip(slower, unknown, strict=True)]
    with pytest.raises(GateError, match=r"beyond doubt: ddp 32/32\n--fail-slower 3% could not be decided"):
        check_gate(gated(diff_runs(both[0], both[1]), 3.0))
    with pytest.raises(SpecError, match=r"could not be decided\n    ddp 32/32: both runs have only one"):
        check_gate(gated(diff_runs(run(unknown[0]), run(unknown[1])), 3.0))
    check_gate(gated(diff_runs(run(slower[0]), run(slower[0])), 3.0))
    check_gate(diff_runs(run(unknown[0]), run(unknown[1])))


def test_a_gate_over_nothing_is_undecided() -> None:
    diff = gated(diff_runs(run(result("x", A)), run(result("y", A))), 3.0)
    assert why_undecided(diff) == ["no variant is in both runs"]


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=8))
def test_a_run_against_itself_never_differs(medians_ms: list[float]) -> None:
    diff = diff_runs(run(result("v", medians_ms)), run(result("v", medians_ms)))
    assert diff.variants[0].difference.verdict in ("same", "inconclusive")
    assert diff.variants[0].difference.percent == pytest.approx(0)
    assert known(gated(diff, 0.0).gate).tripped == ()
    assert diff.marks == ()


def test_one_launch_has_no_interval_and_the_note_says_how_to_get_one() -> None:
    (one,) = diff_runs(run(result("v", [100.0])), run(result("v", [150.0]))).variants
    assert one.difference.percent == pytest.approx(50.0)
    assert (one.difference.ci, one.difference.verdict) == (None, "inconclusive")
    assert one.note == (
        "both runs have only one launch, so the variation between launches is unknown: "
        "set steps: {launches: 6}"
    )
    (one,) = diff_runs(run(result("v", A)), run(result("v", [150.0]))).variants
    assert known(one.note).startswith("run b has only one launch")


def test_a_variant_that_failed_in_one_run_is_not_compared() -> None:
    (one,) = diff_runs(run(result("v", A)), run(result("v", B, status="failed"))).variants
    assert one.difference == Difference(None, None, "inconclusive")
    assert one.note == "failed in run b"
    (one,) = diff_runs(run(result("v", [], status="oom")), run(result("v", B))).variants
    assert (one.a_ms, one.b_ms, one.note) == (None, 110.0, "oom in run a")


def test_variants_of_one_run_only_are_listed() -> None:
    diff = diff_runs(run(result("v", A), result("x", A)), run(result("y", A), result("v", A)))
    assert (diff.only_in_a, diff.only_in_b) == (("x",), ("y",))
    assert [one.id for one in diff.variants] == ["v"]
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
    assert [one.id for one in diff.variants] == ([] if job else ["w"])
    assert diff.ci_level == (None if job else 0.95)


def test_differences_of_host_versions_and_job_are_marked() -> None:
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
    assert diff_runs(a, b).marks == (
        "host versions.torch: 2.12.1 → 2.13.0",
        "host gpus.0.name: H200 → H100",
        "host versions.numpy: not there → 2.1",
        "job steps.rounds: 28 → 14",
        "job args: [1, 2] → [1, 3]",
    )


def test_a_run_that_could_not_be_ranked_is_marked() -> None:
    a = run(result("v", A))
    b = replace(a, interference=("rank 0 of ddp 4/4 waited for a free core in 8 % of its step",))
    (mark,) = diff_runs(a, b).marks
    assert mark.startswith("run b ran with other load on the machine: rank 0 of ddp 4/4 waited for")
