"""The one sentence, word for word, for every way in which a run can end."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.compare.headline import Conclusion, conclude, ranking_conclusion
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, ExposedComm, Status, StepTime, VariantResult
from gpurun.launcher.compare.ranking import standings
from gpurun.launcher.compare.variant_difference import opposite
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.stats.schedule import only_warmup_text

NOTHING = Difference(None, None, "inconclusive")


def result(
    variant_id: str,
    split: tuple[int, ...],
    ms: float | None,
    strategy: str = "ddp",
    status: Status = "ok",
    vs: Difference | None = None,
    launches: int = 1,
    **more: Any,
) -> VariantResult:
    return VariantResult(
        id=variant_id,
        strategy=strategy,
        devices=("cpu:0", "cpu:1"),
        split=split,
        split_name="even",
        global_batch=64,
        precision="fp32",
        accumulate=1,
        varied=more.get("varied", {}),
        status=status,
        reason=None,
        log=None,
        rounds=more.get("rounds", 28),
        launches=launches,
        step_ms=StepTime(ms, None) if ms else None,
        samples_per_s=64e3 / ms if ms else None,
        vs_baseline=vs,
        scaling_efficiency=None,
        gradient_error=None,
        gradient_reference=None,
        exposed_comm_ms=ExposedComm(),
        warnings=(),
        ranks=(),
    )


@dataclass
class Table:
    """Differences by (id, other's id); strategies name the launches."""

    known: dict[tuple[str, str], Difference]

    def between(self, variant: str, other: str) -> Difference:
        if (other, variant) in self.known:
            return opposite(self.known[other, variant])
        return self.known.get((variant, other), NOTHING)

    def all_against(self, other: str, variants: Iterable[str]) -> dict[str, Difference]:
        return {variant: self.between(variant, other) for variant in variants}

    def share_launches(self, variant: str, other: str) -> bool:
        return variant.partition("-")[0] == other.partition("-")[0]


def sentence(
    results: Sequence[VariantResult], known: dict[tuple[str, str], Difference], baseline: str = "ddp-even"
) -> str:
    return conclusion(results, known, baseline).summary


def conclusion(
    results: Sequence[VariantResult], known: dict[tuple[str, str], Difference], baseline: str = "ddp-even"
) -> Conclusion:
    return ranking_conclusion(standings(results, Table(known)), baseline)


SLOWER = Difference(13.78, (12.9, 14.6), "slower")
EVEN = result("ddp-even", (32, 32), 42.1, vs=Difference(None, None, "baseline"))


def test_the_baseline_leads() -> None:
    results = [result("ddp-40-24", (40, 24), 47.9, vs=SLOWER), EVEN]
    known = {("ddp-40-24", "ddp-even"): SLOWER}
    assert sentence(results, known) == "Fastest: ddp 32/32; ddp 40/24 is 13.8 % slower (12.9 to 14.6)."


def test_another_than_the_baseline_leads() -> None:
    faster = Difference(-12.04, (-13.2, -11.1), "faster")
    results = [EVEN, result("dp-48-16", (48, 16), 37.0, "dp", vs=faster)]
    known = {("dp-48-16", "ddp-even"): faster}
    assert (
        sentence(results, known) == "Fastest: dp 48/16, 12 % faster than the baseline ddp 32/32 (11 to 13)."
    )


def test_a_leader_over_two_names_the_next_as_well() -> None:
    faster = Difference(-12.04, (-12.4, -11.7), "faster")
    behind = Difference(3.04, (2.1, 3.9), "slower")
    results = [EVEN, result("ddp-36-28", (36, 28), 37.0, vs=faster), result("ddp-40-24", (40, 24), 38.1)]
    known = {
        ("ddp-36-28", "ddp-even"): faster,
        ("ddp-40-24", "ddp-36-28"): behind,
    }
    assert sentence(results, known) == (
        "Fastest: ddp 36/28, 12.0 % faster than the baseline ddp 32/32 (11.7 to 12.4)."
        " ddp 40/24 is 3.0 % slower (2.1 to 3.9)."
    )


def test_a_close_race_has_no_winner() -> None:
    close = Difference(0.3, (-0.4, 0.9), "same")
    results = [EVEN, result("ddp-36-28", (36, 28), 42.3, vs=close)]
    known = {("ddp-36-28", "ddp-even"): close}
    assert sentence(results, known) == (
        "No split is clearly fastest: ddp 32/32 and ddp 36/28 are equally fast (+0.3 %, −0.4 to +0.9)."
    )


def test_one_undecided_rival_is_enough_even_if_it_is_not_the_next() -> None:
    unclear = Difference(20.0, (-3.0, 48.0), "inconclusive")
    results = [EVEN, result("ddp-36-28", (36, 28), 47.9), result("dp-even", (32, 32), 50.0, "dp", launches=6)]
    known = {("ddp-36-28", "ddp-even"): SLOWER, ("dp-even", "ddp-even"): unclear}
    assert sentence(results, known) == (
        "No split is clearly fastest: ddp 32/32 and dp 32/32 can't be distinguished (+20 %, −3 to +48)."
    )


def test_further_undecided_rivals_are_counted() -> None:
    close = Difference(0.3, (-0.4, 0.9), "same")
    others = [result(f"ddp-{n}", (n, 64 - n), 42.0 + n / 100) for n in (33, 34, 35)]
    known = {(other.id, "ddp-even"): close for other in others}
    assert sentence([EVEN, *others], known).endswith(
        "are equally fast (+0.3 %, −0.4 to +0.9), and so are 2 others."
    )
    unclear = Difference(0.3, (-4.0, 4.9), "inconclusive")
    known |= {("ddp-35", "ddp-even"): unclear, ("ddp-34", "ddp-even"): unclear}
    assert sentence([EVEN, *others], known).endswith(
        "can't be distinguished (0 %, −4 to +5), nor can 1 other from ddp 32/32."
    )


def test_too_few_launches_leave_the_lead_unproven() -> None:
    results = [EVEN, result("ddp-40-24", (40, 24), 47.9), result("dp-even", (32, 32), 61.3, "dp")]
    known = {("ddp-40-24", "ddp-even"): SLOWER}
    assert sentence(results, known) == (
        "Fastest on average: ddp 32/32; dp 32/32 can't be ranked"
        " (+46 % on average, but 1 launch can't tell that from chance)."
        " ddp 40/24 is 13.8 % slower (12.9 to 14.6)."
    )


def test_too_few_rounds_leave_the_lead_unproven() -> None:
    results = [EVEN, result("ddp-40-24", (40, 24), 47.9, rounds=5)]
    assert sentence(results, {}) == (
        "Fastest on average: ddp 32/32; ddp 40/24 can't be ranked"
        " (+14 % on average, but 5 rounds can't tell that from chance)."
    )


def test_an_established_lead_counts_more_than_times_of_other_rounds() -> None:
    drifted = result("ddp-40-24", (40, 24), 40.0)
    known = {("ddp-40-24", "ddp-even"): SLOWER}
    assert sentence([drifted, EVEN], known).startswith("Fastest: ddp 32/32;")


def test_what_failed_is_not_fast() -> None:
    results = [EVEN, result("ddp-40-24", (40, 24), 10.0, status="failed")]
    assert sentence(results, {}) == "Fastest: ddp 32/32, 42.1 ms per step; no other variant was measured."
    assert sentence([result("ddp-40-24", (40, 24), None, status="oom")], {}) == (
        "No variant could be measured, so none is fastest."
    )


@pytest.mark.parametrize(
    ("strategy", "split", "varied", "label"),
    [
        ("ddp", (48, 16), {}, "ddp 48/16"),
        ("single", (64,), {}, "single"),
        ("dp", (32, 32), {"precision": "bf16"}, "dp 32/32 precision=bf16"),
        ("ddp", (9,) * 8 + (6,), {}, "ddp 8×9/6"),
        ("ddp", (61, 89, 58, 163, 50, 66), {}, "ddp 61/89/58/163/50/66"),
        (
            "ddp",
            (32, 32),
            {"params": {"width": 256}, "env": {"A": True}},
            "ddp 32/32 params=width=256 env=A=true",
        ),
    ],
)
def test_labels(strategy: str, split: tuple[int, ...], varied: dict[str, Any], label: str) -> None:
    assert variant_label(result("x", split, 1.0, strategy, varied=varied)) == label


def test_the_opposite_finding() -> None:
    difference = opposite(Difference(25.0, (0.0, 100.0), "slower"))
    assert (difference.percent, difference.ci, difference.verdict) == (-20.0, (-50.0, 0.0), "faster")
    assert opposite(NOTHING) == NOTHING


def test_programs_without_steps_have_run_all_the_same() -> None:
    program = Variant(
        id="script-2", strategy="script", devices=("cpu:0",), split=(), split_name="-", varied={}
    )
    plan: Any = SimpleNamespace(variants=(program,), baseline=program.id, workload="train.py")
    failed = result("script-1", (), None, "script", status="failed")
    one = replace(failed, id="script-2", status="ok", wall_s=3.14)
    assert conclude(plan, [failed, one], None).summary == (
        "train.py on 2 devices ran for 3.1 s; no steps were recorded."
    )
    short = replace(one, reason=only_warmup_text(19, 10))
    assert conclude(plan, [short], None).summary == (
        "train.py on 2 devices: 19 steps, all warm-up; nothing was timed. Run more than 30 steps."
    )
    assert conclude(plan, [one, one], None).summary == (
        "2 variants ran to their end; no steps were timed, so none is fastest."
    )
    assert conclude(plan, [failed], None).summary == "No variant could be measured, so none is fastest."
    waiting = conclude(plan, [failed], None, complete=False)
    assert waiting.headline == "No variant has been measured yet, so none is fastest."


def test_a_lead_over_the_baseline_alone_is_no_headline() -> None:
    """The tab once named a winner here: faster than the baseline, but not than the next."""
    faster, close = Difference(-12.0, (-12.4, -11.7), "faster"), Difference(0.3, (-0.4, 0.9), "same")
    results = [
        EVEN,
        result("ddp-36-28", (36, 28), 37.0, vs=faster),
        result("ddp-40-24", (40, 24), 37.1, vs=faster),
    ]
    known = {("ddp-36-28", "ddp-even"): faster, ("ddp-40-24", "ddp-36-28"): close}
    assert conclusion(results, known).headline.startswith(
        "No split is clearly fastest: ddp 36/28 and ddp 40/24 "
    )
