"""What the recorder of a program's steps does on GPUs, with a made-up `torch.cuda`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import gpurun
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.worker.entry.zygote import ASK_THE_DRIVER, ForkServer
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps
from tests.known import known
from tests.unit.gpu.fake_cuda import FakeCuda, Stream, fake_cuda  # noqa: F401 - a fixture
from tests.unit.worker.test_program_steps import program_config


class OnGpu(torch.optim.SGD):
    """An optimizer whose weights say that they are on a GPU."""

    def __init__(self, index: int) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.device = torch.device("cuda", index)
        self.param_groups[0]["params"] = [WeightOn(self.device)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


class WeightOn:
    """A weight on a device."""

    grad = None

    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture
def recorder(tmp_path: Path, cuda: FakeCuda) -> Iterator[StepRecorder]:
    made = StepRecorder(program_config(tmp_path), 1, RunDir(tmp_path))
    with watch_steps(made):
        yield made


def times_of(recorder: StepRecorder) -> list[int]:
    """Nanoseconds of the steps that were recorded."""
    recorder.close(wait=True)
    return [step.step_ns for step in recorder.run.read_steps("script-1")[1]]


def device_of(recorder: StepRecorder) -> torch.device:
    """Where its clock runs."""
    return known(recorder.stamps).device


# 1: events in a forked process

FORKING = """
import os, sys
from collections import deque
from gpurun.launcher.worker.program.program_rank import StepRecorder

class Event:
    def __del__(self):
        if os.getpid() != parent:
            os.write(2, b"an event was destroyed in the child")
            os._exit(9)

parent = os.getpid()
recorder = StepRecorder.__new__(StepRecorder)
recorder._ended, recorder._start = deque([(Event(), Event(), "timed")]), Event()
recorder.tracer, recorder.capture = Event(), Event()
os.register_at_fork(after_in_child=recorder.abandon)
pid = os.fork()
if pid == 0:
    assert recorder._closed and not recorder._ended
    sys.exit(0)  # as a program that forks by itself: the interpreter is torn down
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
def test_no_event_is_destroyed_in_a_forked_process() -> None:
    """torch 2.13, c10/cuda/CUDAEvent.h:50: `~CUDAEvent` makes a CUDAGuard before it destroys the event; in a
    forked process that throws, and a throwing destructor is `std::terminate`."""
    done = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_imported_before_the_fork_asks_the_driver_instead_of_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13, torch/cuda/__init__.py:165, `_nvml_based_avail`: it is NVML that is asked then."""
    (tmp_path / "an_extension.py").write_text(
        "import os\nASKED = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(ASK_THE_DRIVER, raising=False)
    ForkServer._preload(cast(Any, None), ["an_extension"])
    assert sys.modules.pop("an_extension").ASKED == "1"
    assert ASK_THE_DRIVER not in os.environ


# 2: graph capture, and errors in the recorder


@pytest.mark.parametrize("gpu", [0, 1], ids=["the current GPU", "the program's own"])
def test_steps_in_a_graph_capture_are_no_steps(recorder: StepRecorder, cuda: FakeCuda, gpu: int) -> None:
    """torch's whole-network capture calls `optimizer.step()` within `torch.cuda.graph`."""
    cuda.captured_device = gpu
    optimizer = OnGpu(gpu)
    for capturing in (False, False, True, False, False):
        cuda.capturing = capturing
        cuda.now_ms += 5.0
        optimizer.step()
    cuda.capturing = False
    assert cuda.current == 0
    # from call to call, the captured one apart
    assert times_of(recorder) == [5_000_000, 10_000_000, 5_000_000]


@pytest.mark.parametrize("begins_within", [False, True])
def test_a_marked_step_that_captures_a_graph_is_none(
    recorder: StepRecorder, cuda: FakeCuda, begins_within: bool
) -> None:
    cuda.allocated[0] = 1
    for capturing in (False, True, False):
        cuda.capturing = capturing and not begins_within
        with gpurun.step():
            cuda.now_ms += 3.0
            cuda.capturing = capturing
        cuda.capturing = False
    assert times_of(recorder) == [3_000_000, 3_000_000]


def test_nothing_of_the_recorder_raises_into_the_program(
    recorder: StepRecorder,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    optimizer = OnGpu(0)
    optimizer.step()

    def fails(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(cuda, "current_stream", fails)
    for _ in range(3):
        optimizer.step()
        with gpurun.step():
            pass
    recorder.close(wait=True)
    said = capsys.readouterr()
    assert (said.out + said.err).count("no more steps are recorded: CUDA error") == 1


# 7: programs that don't make their GPU the current one


def test_a_program_without_set_device_is_timed_on_its_own_gpu(recorder: StepRecorder, cuda: FakeCuda) -> None:
    """torch 2.13, torch/cuda/streams.py:199: `Event.record()` takes the stream of the current device."""
    cuda.peaks = {0: 5, 1: 99}
    optimizer = OnGpu(1)
    for _ in range(3):
        cuda.now_ms += 4.0
        optimizer.step()
    assert cuda.current == 0
    assert known(recorder.stamps).now().stream == Stream(device=1)
    recorder.close(wait=True)
    steps = recorder.run.read_steps("script-1")[1]
    assert [(step.step_ns, step.peak_bytes) for step in steps] == [(4_000_000, 99)] * 2
    assert cuda.synchronized == [1]


def test_without_an_optimizer_the_gpu_that_holds_memory_is_timed(
    recorder: StepRecorder, cuda: FakeCuda
) -> None:
    cuda.allocated = {1: 1 << 30}
    with gpurun.step():
        pass
    assert device_of(recorder) == torch.device("cuda", 1)


def test_a_program_on_the_cpu_makes_no_context_on_a_gpu(recorder: StepRecorder, cuda: FakeCuda) -> None:
    cuda.initialized = False
    torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).step()
    assert not cuda.initialized
    assert device_of(recorder) == torch.device("cpu")
