"""Hand-made run directories with known answers."""

import math
from pathlib import Path

import msgspec
import pytest

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.recorded import round_times
from gpurun.launcher.compare.figures.variant import ablation_interval_ms
from gpurun.launcher.compare.model import Comparison, Difference
from gpurun.launcher.compare.ranking import EARLY_ROUNDS_SHARE
from gpurun.launcher.errors import MachineError
from gpurun.launcher.plan.model import SkippedCombination
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import Kind, MemoryPeak, RoundTime, StepRecord, VariantFacts
from gpurun.launcher.stats.estimates import (
    hodges_lehmann,
    median_interval,
    percent_interval,
    wilcoxon_interval,
)
from tests.known import known
from tests.said import notes_of, warnings_of
from tests.unit.compare import hand_made
from tests.unit.compare.hand_made import (
    DP,
    EVEN,
    SINGLE,
    UNEVEN,
    Files,
    by_id,
    launch,
    plan,
    splits_plan,
    variant,
    wobble,
    write_splits,
)
from tests.wording import Wording

files = hand_made.files


def test_figures_of_two_splits_in_one_launch(files: Files) -> None:
    write_splits(files)
    comparison = compare_run(files.run)
    even, uneven = by_id(comparison)["ddp-2-even"], by_id(comparison)["ddp-2-48-16"]
    drift = [100.0 + 2 * i for i in range(28)]
    even_ms = known(even.step_ms).estimate
    assert even_ms == pytest.approx(math.exp(known(hodges_lehmann([math.log(ms) for ms in drift]))), rel=2e-3)
    assert known(even.step_ms).ci == pytest.approx(median_interval(drift))
    assert even.samples_per_s == pytest.approx(64e3 / even_ms)
    assert even.vs_baseline == Difference(None, None, "baseline")
    assert known(uneven.vs_baseline).verdict == "slower"
    assert known(uneven.vs_baseline).percent == pytest.approx(20, abs=0.2)
    differences = [math.log(1.2 * (1 + wobble(i))) for i in range(28)]
    assert known(uneven.vs_baseline).ci == pytest.approx(
        percent_interval(wilcoxon_interval(differences, 0.05)), abs=1e-4
    )
    assert (even.rounds, even.launches, even.launch_ms) == (28, 1, pytest.approx((even_ms,)))
    assert (comparison.ci_level, comparison.unit) == (0.95, "round")
    assert comparison.noise.aa_percent == pytest.approx(0, abs=0.1)
    low, high = known(comparison.noise.ci)
    assert low < 0 < high
    assert comparison.noise.launch_scatter_percent is None
    assert comparison.fastest == "ddp-2-even"
    assert comparison.complete
    assert (even.scaling_efficiency, even.gradient_error) == (None, None)


def test_a_run_that_could_end_after_any_look_has_a_lower_level(files: Files) -> None:
    """As single launches could in runs that are older than `until`."""
    write_splits(files)
    write_json(files.run.spec, {"steps": {"early_stop": True}})
    comparison = compare_run(files.run)
    assert comparison.ci_level == 0.95
    assert comparison.job == {"steps": {"early_stop": True}}
    differences = [math.log(1.2 * (1 + wobble(i))) for i in range(28)]
    expected = percent_interval(wilcoxon_interval(differences, 0.05 * EARLY_ROUNDS_SHARE))
    assert known(by_id(comparison)["ddp-2-48-16"].vs_baseline).ci == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rounds", [0, 1, 5, 8, 13])
def test_a_run_may_be_read_at_any_time(files: Files, rounds: int) -> None:
    write_splits(files, rounds)
    for one in (EVEN, UNEVEN):
        files.run.status(one.id).unlink()
    files.block(EVEN, "01-ddp-2", rounds + 1, 5e9, ranks=1)  # a round that only rank 0 has finished
    comparison = compare_run(files.run)
    uneven = by_id(comparison)["ddp-2-48-16"]
    assert not comparison.complete
    assert uneven.rounds == by_id(comparison)["ddp-2-even"].rounds == rounds
    assert uneven.status == ("ok" if rounds else "skipped")
    if rounds == 0:
        assert (uneven.step_ms, uneven.vs_baseline, uneven.reason) == (None, None, "not measured yet")
        assert comparison.fastest is None
    elif rounds < 7:
        assert known(uneven.vs_baseline).ci is None
        assert known(uneven.vs_baseline).verdict == "inconclusive"
        assert known(uneven.vs_baseline).percent == pytest.approx(20, abs=0.7)
    else:
        assert known(uneven.vs_baseline).verdict == "slower"


def test_a_step_never_takes_less_than_no_time(files: Files, wording: Wording) -> None:
    """Three rounds of which one has a step that waited for long: most steps, so the median, are short."""
    write_json(files.run.plan, splits_plan())
    files.rounds(EVEN, "01-ddp-2", [2, 2, 2])
    for number, slowest_ms in enumerate((1.5, 40, 9), 1):
        files.block(UNEVEN, "01-ddp-2", number, 1.5e6, steps=3)
        files.block(UNEVEN, "01-ddp-2", number, slowest_ms * 1e6, steps=1)
    files.close(EVEN, UNEVEN)
    comparison = compare_run(files.run)
    found = by_id(comparison)[UNEVEN.id]
    low, high = known(known(found.step_ms).ci)
    assert 0 < low < known(found.step_ms).estimate < high
    wording(warnings_of(comparison, found))


def test_a_directory_without_a_plan_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"plan\.json"):
        compare_run(RunDir(tmp_path))


def test_a_failed_variant_keeps_its_times_and_costs_no_other_result(files: Files, wording: Wording) -> None:
    write_splits(files)
    files.close(
        UNEVEN, status="oom", reason="cuda:0 had 139.8 of 140.0 GiB in use", log="launches/x/log/rank0.log"
    )
    comparison = compare_run(files.run)
    uneven = by_id(comparison)["ddp-2-48-16"]
    wording(uneven.reason)
    assert uneven.status == "oom"
    assert uneven.log == "launches/x/log/rank0.log"
    assert uneven.step_ms is not None
    assert uneven.vs_baseline is None
    assert comparison.fastest == "ddp-2-even"
    assert comparison.complete


def test_without_its_baseline_nothing_is_compared(files: Files, wording: Wording) -> None:
    write_splits(files)
    files.close(EVEN, status="failed", reason="rank 1 was killed by SIGSEGV")
    comparison = compare_run(files.run)
    assert [result.vs_baseline for result in comparison.variants] == [None, None]
    wording(notes_of(comparison))
    assert comparison.fastest == "ddp-2-48-16"


def test_facts_notes_and_combinations_left_out_are_carried(files: Files, wording: Wording) -> None:
    left_out = SkippedCombination({"strategy": "single", "device_count": 2}, "single has one device")
    write_splits(files)
    write_json(files.run.plan, splits_plan(left_out=(left_out,), notes=("two ranks share cuda:0",)))
    facts = VariantFacts(
        1e-7,
        "one device",
        ("BatchNorm",),
        unsteady="the step time did not settle",
        gradient_warning="the gradient differs",
    )
    write_json(files.run.facts(UNEVEN.id), facts)
    write_json(files.run.host, {"hostname": "h"})
    comparison = compare_run(files.run)
    uneven = by_id(comparison)["ddp-2-48-16"]
    assert (uneven.gradient_error, uneven.gradient_reference) == (1e-7, "one device")
    assert warnings_of(comparison, uneven) == (
        "the gradient differs",
        "unsteady: the step time did not settle",
        "BatchNorm",
    )
    wording([each.text for each in comparison.findings if each.level == "danger"])
    wording(uneven.reason)
    assert uneven.status == "unsteady"
    assert known(uneven.vs_baseline).verdict == "slower"
    assert comparison.host == {"hostname": "h"}
    wording(notes_of(comparison))


def test_figures_of_ranks(files: Files) -> None:
    write_json(files.run.plan, splits_plan())
    for number in range(1, 8):
        blocks: tuple[tuple[Kind, tuple[float, ...]], ...]
        blocks = ("timed", (20e6, 10e6)), ("ablation", (18e6, 7e6))
        for kind, ns in blocks:
            files.block(
                UNEVEN, "01-ddp-2", number, ns, kind, phases={"forward": number * 10**6}, peak=number * 2**30
            )
    files.block(UNEVEN, "01-ddp-2", 0, (9e9, 9e9), "warmup", phases={"forward": 10**12}, peak=10**12)
    files.run.trace(UNEVEN.id, 1).write_bytes(b"")
    write_json(files.run.memory(UNEVEN.id, 0), MemoryPeak(parameters=2**30, activations=3 * 2**30))
    write_json(files.run.spec, {"memory": 5 * 2**30})
    comparison = compare_run(files.run)
    fits = known(comparison.fitting)
    assert fits.fastest == UNEVEN.id
    assert "fits-in-memory" in [each.code for each in comparison.findings]
    result = by_id(comparison)["ddp-2-48-16"]
    first, second = result.ranks
    assert known(result.step_ms).estimate == pytest.approx(20)  # the slowest rank
    assert (first.rank, first.device, first.local_batch, first.step_ms) == (0, "cpu:0", 48, pytest.approx(20))
    assert (second.rank, second.device, second.local_batch, second.step_ms) == (
        1,
        "cpu:1",
        16,
        pytest.approx(10),
    )
    assert first.phases_ms == {"forward": pytest.approx(4.0)}
    assert first.memory_gib["parameters"] == 1
    assert first.peak_gib == result.peak_gib == 4  # of live tensors, not the process's 7
    assert second.peak_gib is None
    assert (first.trace, second.trace) == (None, "variants/ddp-2-48-16/rank1.pt.trace.json.gz")
    assert second.span_ms is None  # the trace is an empty file
    assert any("rank1.pt.trace.json.gz: empty" in warning for warning in warnings_of(comparison, result))
    assert first.exposed_comm_ms.ablation == pytest.approx(2)
    assert second.exposed_comm_ms.ablation == pytest.approx(3)
    assert result.exposed_comm_ms.ablation == pytest.approx(2)  # of the rank that computes longest


def test_how_sure_the_ablation_is() -> None:
    def block(number: int, ms: float, kind: Kind) -> list[StepRecord]:
        return [StepRecord("a", number, 0, i, kind, round((ms + i) * 1e6), {}, None) for i in range(3)]

    def steps(*savings_ms: float) -> list[StepRecord]:
        rounds = [
            (block(i, 20, "timed"), block(i, 20 - ms, "ablation")) for i, ms in enumerate(savings_ms, 1)
        ]
        return [step for pair in rounds for one in pair for step in one]

    assert ablation_interval_ms(steps(1, 2, 3, 4, 5, 6)) == (1, 6)
    assert ablation_interval_ms([*steps(2, 2, 2), *block(9, 50, "timed")]) == (2, 2)
    assert ablation_interval_ms(steps(2)) is None


def test_the_replicas_of_dp_share_one_process(files: Files) -> None:
    write_json(files.run.plan, plan([DP], [launch("01-dp-2", "dp-2", 0, [DP])], baseline=DP.id))
    files.rounds(DP, "01-dp-2", [30.0] * 28)
    files.close(DP)
    comparison = compare_run(files.run)
    (result,) = comparison.variants
    assert [figures.local_batch for figures in result.ranks] == [32, 32]
    assert [figures.step_ms for figures in result.ranks] == [pytest.approx(30), None]
    assert result.rounds == 28
    assert comparison.ci_level is None


def test_efficiency_is_against_the_single_variant_of_the_same_work(files: Files) -> None:
    half = variant("single-1-half", (32,), "single")
    variants = [EVEN, half, SINGLE]
    launches = [launch("01-ddp-2", "ddp-2", 0, [EVEN]), launch("02-single", "single", 0, [half, SINGLE])]
    write_json(files.run.plan, plan(variants, launches))
    files.rounds(EVEN, "01-ddp-2", [60.0] * 28)
    files.rounds(half, "02-single", [50.0] * 28)
    files.rounds(SINGLE, "02-single", [90.0] * 28)
    files.close(*variants)
    comparison = compare_run(files.run)
    efficiency = {result.id: result.scaling_efficiency for result in comparison.variants}
    assert efficiency == {
        EVEN.id: pytest.approx(0.75),
        half.id: pytest.approx(1),
        SINGLE.id: pytest.approx(1),
    }
    # One pair of launches: 32 samples in 50 ms against 64 in 60 ms, by time per sample.
    assert known(by_id(comparison)[half.id].vs_baseline).percent == pytest.approx(100 * (100 / 60 - 1))
    assert any("time per sample" in note for note in notes_of(comparison))


def test_throughput_not_step_time_ranks_different_batches(files: Files, wording: Wording) -> None:
    large = variant("ddp-2-even-large", (64, 64), varied={"global_batch": 128})
    write_json(files.run.plan, plan([EVEN, large], [launch("01-ddp-2", "ddp-2", 0, [EVEN, large])]))
    files.rounds(EVEN, "01-ddp-2", [100.0] * 28)
    files.rounds(large, "01-ddp-2", [150.0] * 28)
    files.close(EVEN, large)
    comparison = compare_run(files.run)
    found = known(by_id(comparison)[large.id].vs_baseline)
    assert (found.percent, found.verdict) == (pytest.approx(-25), "faster")
    assert found.ci == pytest.approx((-25, -25))
    assert comparison.fastest == large.id
    wording(comparison.summary)


def test_a_comparison_survives_its_file(files: Files) -> None:
    write_splits(files)
    comparison = compare_run(files.run)
    write_json(files.run.comparison, comparison)
    again = msgspec.json.decode(files.run.comparison.read_bytes(), type=Comparison)
    assert msgspec.json.encode(again) == msgspec.json.encode(comparison)
    assert again.variants[1].vs_baseline == comparison.variants[1].vs_baseline


@pytest.mark.parametrize("rounds", [3, 8, 20, 28])
def test_identical_variants_never_differ(files: Files, rounds: int) -> None:
    write_splits(files, rounds, ratio=1.0)
    verdict = known(by_id(compare_run(files.run))["ddp-2-48-16"].vs_baseline).verdict
    assert verdict == ("inconclusive" if rounds == 3 else "same")


def step(number: int, step_ns: int, kind: Kind = "timed", launch_id: str = "a") -> StepRecord:
    return StepRecord(launch_id, number, 0, 0, kind, step_ns, {}, None)


def test_a_round_counts_if_all_ranks_have_all_its_steps() -> None:
    ranks = {
        0: [step(1, 10), step(1, 20), step(2, 10), step(2, 10), step(3, 7), step(3, 7, "aa")],
        1: [step(1, 40), step(1, 10), step(2, 10), step(3, 5)],
    }
    assert round_times(ranks, 2, "timed") == (RoundTime("a", 1, 25), RoundTime("a", 3, 7))
    assert round_times(ranks, 2, "aa") == ()
    assert round_times({0: ranks[0]}, 2, "timed") == ()
    assert len(round_times(ranks, 1, "timed")) == 3


def test_damaged_step_records_are_reported_and_never_called_ok(files: Files, wording: Wording) -> None:
    write_splits(files)
    with files.run.steps(EVEN.id, 0).open("ab") as file:
        file.write(b"garbage{\n")
    files.run.steps(UNEVEN.id, 1).write_bytes(b"\x00\xff\n" * 3)
    comparison = compare_run(files.run)
    found = by_id(comparison)
    assert found[EVEN.id].status == "ok"
    wording(warnings_of(comparison, found[EVEN.id]))
    assert found[UNEVEN.id].status == "failed"
    wording(found[UNEVEN.id].reason)
