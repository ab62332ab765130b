"""What reports say of balanced splits: how they were found, and their name where they were not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpurun.launcher.balance import balance_of, fit_curve
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.size_curves import DeviceCost, could_be_best
from gpurun.launcher.compare.label import split_label
from gpurun.launcher.report.terminal.table import balanced_lines, render_table
from gpurun.launcher.rundir.files import write_json
from tests.known import known
from tests.unit.compare import hand_made
from tests.wording import Wording

files = hand_made.files

BALANCED = hand_made.variant(
    "ddp-2-balanced", (), devices=("cpu:0", "cpu:1"), split_name="balanced", global_batch=64
)


def compared(
    files: Any,
    *lines: tuple[float, float],
    caps: tuple[int | None, ...] = (None, None),
    bend_ms: float = 0.0,
    step_ms: float = 90.0,
) -> Any:
    """A run of `even` and `balanced`; by the devices' (α, β) if there are any, else it failed before that."""
    launch = hand_made.launch("01-ddp-2", "ddp-2", 0, (hand_made.EVEN, BALANCED))
    write_json(files.run.plan, hand_made.plan((hand_made.EVEN, BALANCED), [launch]))
    files.rounds(hand_made.EVEN, "01-ddp-2", [100.0] * 28)
    files.close(hand_made.EVEN)
    if lines:
        curves = tuple(
            fit_curve({size: [a + b * size + bend_ms * (size > 16)] * 6 for size in (8, 16, 32, 64)}, cap)
            for (a, b), cap in zip(lines, caps, strict=False)
        )
        write_json(files.run.balance(BALANCED.id), balance_of(curves, (40, 24), 1.0))
        files.rounds(BALANCED, "01-ddp-2", [step_ms] * 28)
        files.close(BALANCED)
    else:
        files.close(BALANCED, status="failed", reason="device 1 broke")
    return compare_run(files.run)


@pytest.mark.parametrize(
    ("name", "lines", "more"),
    [
        ("cheap-samples", ((5, 0), (3, 0)), {}),
        ("not-measured", ((5, 1), (3, 3)), {}),
        ("little-memory", ((5, 1), (3, 3)), {"caps": (None, 24)}),
        ("bent-curves", ((5, 1), (3, 1)), {"bend_ms": 40}),  # no optimum of lines, so none is claimed
        ("even-is-faster", ((5, 1), (3, 1)), {"step_ms": 110.0}),
    ],
)
def test_how_a_split_was_found(
    files: Any,
    name: str,
    lines: tuple[tuple[float, float], ...],
    more: dict[str, Any],
    snapshot: Callable[[str, str], None],
) -> None:
    said = balanced_lines(compared(files, *lines, **more).variants)
    snapshot(f"balanced-{name}.txt", "\n".join(said) + "\n")


def test_a_balanced_split_that_was_never_found_keeps_its_name(files: Any) -> None:
    comparison = compared(files)
    assert split_label(BALANCED) == "balanced"
    assert "ddp      balanced  failed" in render_table(comparison, 120, plain=True)


def test_a_faster_split_takes_the_claim_back_though_all_drift_together(files: Any, wording: Wording) -> None:
    """Steps differ by 4 % in pairs, while launches scatter by 15 %, which is in each step's own interval."""
    variants = (BALANCED, hand_made.UNEVEN)
    launches = [hand_made.launch(f"{r + 1:02d}-ddp-2", "ddp-2", r, variants, 5) for r in range(6)]
    write_json(files.run.plan, hand_made.plan(variants, launches, baseline=BALANCED.id))
    curves = tuple(
        fit_curve({n: [a + b * n] * 6 for n in (8, 16, 32, 64)}, None) for a, b in ((5, 1), (3, 1))
    )
    write_json(files.run.balance(BALANCED.id), balance_of(curves, (40, 24), 1.0))
    for launch, level_ms in zip(launches, (80.0, 95.0, 110.0, 88.0, 120.0, 101.0), strict=True):
        files.rounds(BALANCED, launch.id, [level_ms] * 5)
        files.rounds(hand_made.UNEVEN, launch.id, [level_ms * 0.96 * (1 + 0.001 * launch.repetition)] * 5)
    files.close(*variants)
    comparison = compare_run(files.run)
    balanced, other = comparison.variants
    assert known(known(balanced.step_ms).ci)[0] < known(known(other.step_ms).ci)[1]  # these overlap
    assert known(balanced.balanced).beaten_by == (other.id,)
    text = "\n".join(balanced_lines(comparison.variants))
    assert "the minimum over all splits" not in text
    wording(text)


def cost(alpha_ms: float, beta_ms: float, error_ms: float = 0.0) -> DeviceCost:
    """A straight curve, whose α is known to `error_ms`."""
    ci = (alpha_ms - error_ms, alpha_ms + error_ms)
    return DeviceCost(alpha_ms, ci, beta_ms, (beta_ms, beta_ms), True, ((8, 0.0), (64, 0.0)), device="cpu:0")


def test_what_could_be_the_best_split_too_is_within_the_error_of_the_prediction() -> None:
    """T* and 2 ms: the first of two equal devices computes 34 samples by then, and so does the other."""
    exact = could_be_best((cost(5, 1), cost(5, 1)), (32, 32))
    assert exact == []
    assert could_be_best((cost(5, 1, 2.0), cost(5, 1)), (32, 32)) == [(30, 34), (30, 34)]
    assert could_be_best((cost(5, 1, 2.0), cost(3, 3)), (48, 16)) == [(47, 50), (14, 17)]
    three = could_be_best((cost(0, 1, 1.0), cost(0, 2), cost(0, 2)), (32, 16, 16))
    assert three == [(32, 33), (15, 16), (15, 16)]


def test_all_splits_are_alike_where_samples_cost_nothing() -> None:
    assert could_be_best((cost(5, 0), cost(3, 0)), (40, 24)) == [(0, 64), (0, 64)]


def test_a_curve_that_bends_has_no_such_error() -> None:
    bent = replace(cost(5, 1, 2.0), straight=False)
    assert could_be_best((bent, cost(5, 1)), (32, 32)) == []


@pytest.mark.parametrize("has_even", [True, False])
def test_a_balanced_split_is_no_rival_of_the_split_whose_samples_it_found(
    files: Any, has_even: bool, wording: Wording
) -> None:
    """Unless the job has no other split."""
    named = hand_made.variant("ddp-2-40-24", (40, 24))
    variants = (*([hand_made.EVEN] if has_even else []), named, BALANCED)
    launches = [hand_made.launch(f"{r + 1:02d}-ddp-2", "ddp-2", r, variants, 5) for r in range(6)]
    write_json(files.run.plan, hand_made.plan(variants, launches, variants[0].id))
    curves = tuple(fit_curve({n: [a + n] * 6 for n in (8, 16, 32, 64)}, None) for a in (5, 3))
    write_json(files.run.balance(BALANCED.id), balance_of(curves, (40, 24), 1.0))
    times_ms = {hand_made.EVEN.id: (100.0, 1.0), named.id: (60.0, 0.5), BALANCED.id: (60.0, -0.5)}
    for launch in launches:
        sign = 1 if launch.repetition % 2 else -1
        for variant in variants:
            files.rounds(variant, launch.id, [times_ms[variant.id][0] + sign * times_ms[variant.id][1]] * 5)
    files.close(*variants)
    comparison = compare_run(files.run)
    assert known(comparison.variants[-1].balanced).same_as == (named.id,)
    assert (comparison.fastest in (named.id, BALANCED.id)) == has_even
    assert "no other variant was measured" not in comparison.headline
    wording(comparison.headline)
