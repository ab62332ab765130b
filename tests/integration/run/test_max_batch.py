"""`global_batch: max`: batches are tried in processes that die of them."""

from pathlib import Path

import pytest

from tests.integration.command import gpurun, misbehaving

JOB = """
    workload: model.py:build
    devices: cpu:2
    global_batch: max
    compare: {split: [even, balanced]}
    steps: {rounds: 2}
    profile: {steps: 0}
    gradient_check: false
"""
UNEQUAL = """
    from gpurun import device_index
    if device_index() == 0 and x.shape[0] > 21: torch.empty(1 << 50)
    if device_index() == 1 and x.shape[0] > 5: os.kill(os.getpid(), signal.SIGKILL)
"""
"""Device 0 is refused memory for more than 21 samples; who takes more than 5 on device 1 is killed."""


def test_unequal_devices_get_what_all_splits_can_hold_and_resuming_keeps_it(tmp_path: Path) -> None:
    misbehaving(tmp_path, UNEQUAL, JOB)
    result = gpurun(
        tmp_path, "job.yaml", "--out", "run", "--set", "split=even", "--set", "compare={}"
    ).ended()
    # 95 % of 21 and of 5 are 19 and 4: evenly split, 4 on each.
    assert "max is 8: " in result.err
    assert "19 on cpu:0, 4 on" in result.err
    assert result.comparison["variants"][0]["split"] == [4, 4]
    assert result.comparison["complete"]
    again = gpurun(
        tmp_path, "job.yaml", "--resume", "run", "--set", "split=even", "--set", "compare={}"
    ).ended()
    assert "trying batches" not in again.err


@pytest.mark.slow
def test_a_device_has_room_for_its_micro_batches_one_after_the_other(tmp_path: Path) -> None:
    misbehaving(tmp_path, UNEQUAL, JOB)
    result = gpurun(
        tmp_path, "job.yaml", "--out", "run", "--set", "compare.split=[even]", "--set", "accumulate=4"
    ).ended()
    # 95 % of about 4 * 21, and of 4 * 5 = 20.
    assert "cpu:1, in 4 micro-batches" in result.err
    assert result.comparison["variants"][0]["split"] == [19, 19]


@pytest.mark.slow
def test_alone_a_balanced_split_may_fill_every_device(tmp_path: Path) -> None:
    misbehaving(
        tmp_path, UNEQUAL.replace("os.kill(os.getpid(), signal.SIGKILL)", "torch.empty(1 << 50)"), JOB
    )
    result = gpurun(tmp_path, "job.yaml", "--out", "run", "--set", "compare.split=[balanced]").ended()
    assert result.variant("ddp-2-balanced")["split"] == [19, 4]


def test_a_model_that_does_not_fit_at_all_is_reported(tmp_path: Path) -> None:
    misbehaving(tmp_path, "torch.empty(1 << 50)", JOB)
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended(3)
    assert "cpu:0 can't hold" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_workload_that_fails_otherwise_is_reported_as_such(tmp_path: Path) -> None:
    misbehaving(tmp_path, "raise ValueError('broken')", JOB)
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended(4)
    assert "broken" in result.err
    assert "Traceback" not in result.err
