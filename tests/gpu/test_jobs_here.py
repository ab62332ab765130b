"""Jobs on 1 to n devices: every strategy, precision and split, and what may go wrong in one."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.rundir.records import MEASURED
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES
from tests.gpu.machine import LIMITS, LONGEST_S, Devices, Report
from tests.integration.command import Result, gpurun, write

MATRIX = """
    workload: gpt
    params: {{layers: 2, width: 64, heads: 2, context: 64}}
    devices: {devices}
    global_batch: 24
    precision: {precision}
    compare:
      strategy: {strategies}
      split: {splits}
    steps: {{rounds: 1, launches: 1, warmup: 0}}
    profile: {{steps: 1}}
"""
FEW = ("single", "ddp", "dp")
"""Strategies on fewer than all devices."""
LARGEST = """
    workload: gpt
    params: {{layers: 2, width: 256, heads: 4, context: 256}}
    devices: {devices}
    global_batch: max
    compare: {{strategy: [ddp, dp]}}
    steps: {{rounds: 1, launches: 1}}
    profile: {{steps: 0}}
"""


def splits_of(count: int, is_all: bool) -> list[str]:
    """Even, twice as much on the first as on any other; on all devices also what they themselves come to."""
    uneven = [":".join(["2", *["1"] * (count - 1)])] if count > 1 else []
    return ["even", *uneven, *(["balanced"] if is_all and count > 1 else [])]


def matrix_job(devices: Devices, count: int, precision: str) -> str:
    """On the first devices; on all of them every strategy that computes in this precision."""
    is_all = count == devices.count
    able = [name for name in IN_JOBS if precision not in STRATEGIES[name].precision_refusals]
    return MATRIX.format(
        devices=devices.first(count),
        precision=precision,
        strategies=json.dumps([name for name in able if is_all or name in FEW]),
        splits=json.dumps(splits_of(count, is_all)),
    )


def largest_job(devices: Devices) -> str:
    return LARGEST.format(devices=devices.first(devices.count))


def run(directory: Path, text: str, *args: str) -> Result:
    write(directory, "job.yaml", text)
    result = gpurun(directory, "job.yaml", "--out", "run", *args, timeout_s=LONGEST_S)
    assert (directory / "run/comparison.json").exists(), (
        result.err
    )  # also where variants fail, as they should here
    return result


@pytest.mark.parametrize("precision", LIMITS)
def test_every_strategy_and_split(precision: str, devices: Devices, report: Report, tmp_path: Path) -> None:
    """Each is steady enough to be timed, computes one device's gradient, and leaves a trace with its work."""
    if precision == "tf32" and not devices.is_gpu:
        pytest.skip("tf32 needs an NVIDIA GPU")
    for count in range(1, devices.count + 1):
        directory = tmp_path / str(count)
        directory.mkdir()
        result = run(directory, matrix_job(devices, count, precision)).ended()
        for variant in result.comparison["variants"]:
            hold_variant(variant, precision, devices, report)


def hold_variant(variant: dict[str, Any], precision: str, devices: Devices, report: Report) -> None:
    name = f"{precision} {variant['id']} on {len(variant['devices'])}"
    assert variant["status"] in MEASURED, f"{name}: {variant}"
    step_ms = variant["step_ms"]["estimate"]
    error = variant["gradient_error"]
    report.found(name, f"{step_ms:.3f} ms, gradient off by {error}")
    assert error is None or error <= LIMITS[precision], name
    for rank in variant["ranks"]:
        assert rank["peak_gib"] is not None or not devices.is_gpu, name
    traced = [rank for rank in variant["ranks"] if rank["trace"]]
    assert traced, f"{name} has no trace"
    assert all((rank["compute_ms"] or 0) > 0 for rank in traced), f"{name}: a trace without work"


def test_a_batch_as_large_as_memory_allows(devices: Devices, report: Report, tmp_path: Path) -> None:
    """What was found also runs, under `dp` too, whose first device gathers what all have made."""
    if not devices.is_gpu:
        pytest.skip("takes all memory, which a GPU has to itself")
    result = run(tmp_path, largest_job(devices))
    report.found("largest batch", next(line for line in result.err.splitlines() if "max is" in line))
    assert result.code == 0, result.err
    assert all(variant["status"] in MEASURED for variant in result.comparison["variants"])
