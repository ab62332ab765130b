"""What reports say of balanced splits: how they were found, and their name where they were not."""

from typing import Any

from gpurun.launcher.balance.calibrate import balance_of
from gpurun.launcher.balance.curve import fit_curve
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.label import split_label
from gpurun.launcher.report.terminal.curves import balanced_lines
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.rundir.files import write_json
from tests.unit.compare import test_compare as hand_made

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


def test_without_a_cost_per_sample_no_split_is_in_proportion_to_speed(files: Any) -> None:
    said = "\n".join(balanced_lines(compared(files, (5, 0), (3, 0)).variants))
    assert "By the same figures even would take (32/32) 6.00 ms." in said
    assert "No split is in proportion to speed: samples cost nothing on cpu:0, cpu:1." in said


def test_what_was_not_measured_is_reported_too(files: Any) -> None:
    said = "\n".join(balanced_lines(compared(files, (5, 1), (3, 3)).variants))
    assert "even would take (32/32) 100 ms, in proportion to speed (48/16) 54.0 ms." in said
    assert "which no split of whole samples beats" in said
    assert "samples cost nothing" not in said


def test_what_does_not_fit_is_reported_with_the_device_that_it_is_too_large_for(files: Any) -> None:
    comparison = compared(files, (5, 1), (3, 3), caps=(None, 24))
    said = "\n".join(balanced_lines(comparison.variants))
    assert "straight, memory for 24" in said
    assert "By the same figures in proportion to speed (48/16) 54.0 ms." in said
    assert "Even (32/32) does not fit cpu:1." in said
    assert comparison.variants[1].balanced.even is None


def test_of_curves_that_are_not_straight_no_more_is_said_than_was_measured(files: Any) -> None:
    said = "\n".join(balanced_lines(compared(files, (5, 1), (3, 1), bend_ms=40).variants))
    assert "the best by the measured points, + 1.00 overhead" in said
    assert "beats" not in said
    assert "proportion" not in said
    rows = [line.split() for line in said.splitlines() if "by its points" in line]
    assert [row[:3] for row in rows] == [["cpu:0", "–", "–"], ["cpu:1", "–", "–"]]


def test_nothing_claims_to_be_best_next_to_a_split_that_was_measured_faster(files: Any) -> None:
    lines = balanced_lines(compared(files, (5, 1), (3, 1), step_ms=110.0).variants)
    assert any("T* = 45.0 + 1.00 overhead; measured 110" in line for line in lines)
    assert "  Measured faster than that: ddp 32/32 100 ms." in lines


def test_a_balanced_split_that_was_never_found_keeps_its_name(files: Any) -> None:
    comparison = compared(files)
    assert split_label(BALANCED) == "balanced"
    assert "ddp      balanced  failed" in render_table(comparison, 120, plain=True)
