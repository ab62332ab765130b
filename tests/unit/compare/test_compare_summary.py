"""The one sentence, word for word, for every way in which a run can end."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.launcher.compare.headline import conclude, ranking_findings
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Difference, StepTime, VariantResult
from gpurun.launcher.compare.notes import dangers
from gpurun.launcher.compare.ranking import opposite, standings
from gpurun.launcher.findings.finding import Finding
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.rundir.records import Status
from gpurun.launcher.stats.schedule import only_warmup_text
from tests.measured import measured
from tests.wording import Wording

NOTHING = Difference(None, None, "inconclusive")
ONE_LAUNCH = "1 launch is too few to rule out chance"
FIVE_ROUNDS = "5 rounds are too few to rule out chance"


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
    return measured(
        variant_id,
        split,
        **{"rounds": 28, **more},
        strategy=strategy,
        devices=("cpu:0", "cpu:1"),
        split_name="even",
        global_batch=64,
        status=status,
        launches=launches,
        step_ms=StepTime(ms, None) if ms else None,
        samples_per_s=64e3 / ms if ms else None,
        vs_baseline=vs,
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


def sentence(
    results: Sequence[VariantResult], known: dict[tuple[str, str], Difference], baseline: str = "ddp-even"
) -> str:
    return said(conclusion(results, known, baseline))


def said(findings: Sequence[Finding]) -> str:
    first, *others = findings
    return "\n".join((first.headline, *(each.sentence for each in others)))


def conclusion(
    results: Sequence[VariantResult], known: dict[tuple[str, str], Difference], baseline: str = "ddp-even"
) -> tuple[Finding, ...]:
    found = standings(results, Table(known))
    assert found is not None
    return ranking_findings(found, baseline)


SLOWER = Difference(13.78, (12.9, 14.6), "slower")
EVEN = result("ddp-even", (32, 32), 42.1, vs=Difference(None, None, "baseline"))


FASTER = Difference(-12.04, (-12.4, -11.7), "faster")
CLOSE = Difference(0.3, (-0.4, 0.9), "same")
UNCLEAR = Difference(0.3, (-4.0, 4.9), "inconclusive")
LEADER = result("ddp-36-28", (36, 28), 37.0, vs=FASTER)
SLOW = result("ddp-40-24", (40, 24), 47.9, vs=SLOWER)
DP = result("dp-even", (32, 32), 61.3, "dp", launches=6)
ALIKE = [EVEN, *(result(f"ddp-{n}", (n, 64 - n), 42.0 + n / 100) for n in (33, 34, 35))]
ALL_CLOSE = {(other.id, "ddp-even"): CLOSE for other in ALIKE[1:]}

ENDS: dict[str, tuple[Sequence[VariantResult], dict[tuple[str, str], Difference]]] = {
    "the baseline leads": ([SLOW, EVEN], {("ddp-40-24", "ddp-even"): SLOWER}),
    "another leads": ([EVEN, LEADER], {("ddp-36-28", "ddp-even"): FASTER}),
    "another leads, over two": (
        [EVEN, LEADER, result("ddp-40-24", (40, 24), 38.1)],
        {
            ("ddp-36-28", "ddp-even"): FASTER,
            ("ddp-40-24", "ddp-36-28"): Difference(3.04, (2.1, 3.9), "slower"),
        },
    ),
    "another leads over the baseline, but not over the next": (
        [EVEN, LEADER, result("ddp-40-24", (40, 24), 37.1, vs=FASTER)],
        {("ddp-36-28", "ddp-even"): FASTER, ("ddp-40-24", "ddp-36-28"): CLOSE},
    ),
    "two are equally fast": (ALIKE[:2], ALL_CLOSE),
    "four are equally fast": (ALIKE, ALL_CLOSE),
    "of four, two can't be distinguished": (
        ALIKE,
        ALL_CLOSE | {("ddp-35", "ddp-even"): UNCLEAR, ("ddp-34", "ddp-even"): UNCLEAR},
    ),
    "a difference below 1 % that isn't 0": (
        ALIKE,
        ALL_CLOSE
        | {
            (ALIKE[1].id, "ddp-even"): Difference(0.8, (0.3, 1.3), "inconclusive"),
            ("ddp-34", "ddp-even"): UNCLEAR,
        },
    ),
    "a rival that isn't the next can't be distinguished": (
        [EVEN, SLOW, DP],
        {
            ("ddp-40-24", "ddp-even"): SLOWER,
            ("dp-even", "ddp-even"): Difference(20.0, (-3.0, 48.0), "inconclusive"),
        },
    ),
    "too few launches": (
        [EVEN, SLOW, DP],
        {("ddp-40-24", "ddp-even"): SLOWER, ("dp-even", "ddp-even"): replace(NOTHING, why=ONE_LAUNCH)},
    ),
    "too few rounds": ([EVEN, SLOW], {("ddp-40-24", "ddp-even"): replace(NOTHING, why=FIVE_ROUNDS)}),
    "established, though other rounds had other times": (
        [result("ddp-40-24", (40, 24), 40.0), EVEN],
        {("ddp-40-24", "ddp-even"): SLOWER},
    ),
    "two ranks share a GPU": (
        [replace(each, devices=("cuda:0", "cuda:0")) for each in (SLOW, EVEN)],
        {("ddp-40-24", "ddp-even"): SLOWER},
    ),
    "the other failed": ([EVEN, replace(SLOW, status="failed")], {}),
}


def test_every_end_of_a_run(snapshot: Callable[[str, str], None]) -> None:
    """The headline begins the summary."""
    shown = []
    for name, (results, known) in ENDS.items():
        found = conclusion(results, known)
        shown.append(f"{name}\n> {said(found)}\n")
    snapshot("headlines.txt", "\n".join(shown))


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
            "ddp 32/32 params=width=256 A=true",
        ),
        ("script", (), {"options": {"workers": "0", "+a.b": "c"}}, "workers=0 a.b=c"),
        ("script", (), {"options": {}, "env": {}}, "no options no env"),
        (
            "script",
            (),
            {"calls": {"DataLoader": {"num_workers": 2, "pin_memory": True}, "compile": {}}},
            "DataLoader(num_workers=2, pin_memory=True) compile()",
        ),
        ("script", (), {"calls": {}}, "no calls changed"),
        ("script", (), {"params": {"args": 1, "options": 2}}, "params=args=1,options=2"),
    ],
)
def test_labels(strategy: str, split: tuple[int, ...], varied: dict[str, Any], label: str) -> None:
    assert variant_label(result("x", split, 1.0, strategy, varied=varied)) == label


def test_the_opposite_finding() -> None:
    difference = opposite(Difference(25.0, (0.0, 100.0), "slower"))
    assert (difference.percent, difference.ci, difference.verdict) == (-20.0, (-50.0, 0.0), "faster")
    assert opposite(NOTHING) == NOTHING


def test_programs_without_steps_have_run_all_the_same(wording: Wording) -> None:
    program = Variant(
        id="script-2", strategy="script", devices=("cpu:0",), split=(), split_name="-", varied={}
    )
    plan: Any = SimpleNamespace(variants=(program,), baseline=program.id, workload="train.py")
    failed = result("script-1", (), None, "script", status="failed")
    measured = replace(failed, id="script-2", status="ok", wall_s=3.14)
    wording(said(conclude(plan, [failed, measured], None)))
    short = replace(measured, reason=only_warmup_text(19, 10))
    wording(said(conclude(plan, [short], None)))
    wording(said(conclude(plan, [measured, measured], None)))
    plan.variants = (program, program)
    wording(said(conclude(plan, [failed, failed], None)))
    plan.variants = (program,)
    wording(said(conclude(plan, [failed], None)))
    waiting = conclude(plan, [failed], None, complete=False)
    wording(said(waiting))


def test_what_failed_comes_before_what_ran_out_of_memory() -> None:
    """The latter is a result, and of many only the first are written out."""
    found = dangers([EVEN, replace(SLOW, status="oom"), replace(DP, status="failed")])
    assert [each.variant for each in found if each.code == "variant-failed"] == [DP.id, SLOW.id]
