"""What a fifth reading of the CUDA paths against torch's sources found; the jobs of `make gpu-test`."""

from pathlib import Path

import pytest
import torch

from gpurun.launcher.jobfile.load import load_text
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.worker.accelerators.clock import EventStamps
from gpurun.launcher.worker.selftest import device_program
from tests.gpu.machine import LIMITS, Devices
from tests.gpu.test_jobs_here import largest_job, matrix_job

# `make gpu-test`


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", LIMITS)
def test_the_jobs_of_gpu_test_are_valid(precision: str, kind: str, tmp_path: Path) -> None:
    """They run on machines with GPUs only, where a key that is gone would be the first thing to be seen."""
    devices = Devices(kind, 2)
    for text in (matrix_job(devices, 1, precision), matrix_job(devices, 2, precision), largest_job(devices)):
        if precision != "tf32" or kind == "cuda":
            assert load_text(text, "job.yaml", (), tmp_path).workload == "gpt"


# Ranks


def test_a_rank_whose_torch_sees_no_gpu_fails_with_torchs_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch/cuda/__init__.py, `device_count`: 0 where the driver can't be used, without an error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = device_program.own_device(CUDA)
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        torch.zeros(1, device=device)


class LateEvent:
    """c10/cuda/CUDAEvent.h, `elapsed_time`: both events have to be done."""

    elapsed_ms = 0.0

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: "LateEvent") -> float:
        if not (self.is_done and end.is_done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return self.elapsed_ms


@pytest.mark.parametrize(
    ("done", "elapsed_ms", "step_ns"),
    [((True, True), 2.0, 2_000_000), ((False, True), 2.0, None), ((True, True), 0.0, 1)],
)
def test_a_step_that_began_on_another_stream_is_waited_for(
    done: tuple[bool, bool], elapsed_ms: float, step_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may begin a step on a stream of its own and end it on the default one, which doesn't wait.

    Where it has submitted nothing in between, torch says 0, and a step of no time has no rate.
    """
    monkeypatch.setattr(LateEvent, "elapsed_ms", elapsed_ms)
    stamps = EventStamps(torch.device("cuda", 0), LateEvent, lambda event: None, lambda: None)  # type: ignore[arg-type]
    start, end = map(LateEvent, done)
    assert stamps.elapsed_ns(start, end) == step_ns
