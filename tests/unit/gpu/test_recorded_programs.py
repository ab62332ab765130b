"""What the recorder of steps, collectives and allocators do on GPUs, with a made-up `torch.cuda`."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import gpurun
from gpurun.launcher.errors import SpecError
from gpurun.launcher.inspect.snapshot import find_pending, parse_history
from gpurun.launcher.plan.expand import expand
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.strategies import NCCL_ALGORITHMS
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.kineto.classify import dtype_bytes
from gpurun.launcher.worker.accelerators.clock import EventClock, StepTiming
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base.failure import is_secondary
from gpurun.launcher.worker.base.process_group import nccl_variables
from gpurun.launcher.worker.entry.zygote import ASK_THE_DRIVER, ForkServer, remember_collectives
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps
from tests.known import known
from tests.unit.gpu.fake_cuda import FakeCuda, Stream, fake_cuda  # noqa: F401 - a fixture
from tests.unit.plan.machines import FakeGpu, FakeMachine
from tests.unit.plan.test_plan_expand import spec_of
from tests.unit.trace.trace_files import launch, rank_info, span, write
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


# Collectives that run as one, what NCCL's algorithms can do, allocators of a program's own, exact times


# 51: the variable of the flight own_recorder


@pytest.mark.parametrize(
    ("version", "given", "name", "number"),
    [
        ("2.13.0+cu130", {}, "TORCH_FR_BUFFER_SIZE", "2000"),
        ("2.10.0", {}, "TORCH_FR_BUFFER_SIZE", "2000"),
        ("2.6.0+cu124", {}, "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("2.13.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, "TORCH_NCCL_TRACE_BUFFER_SIZE", "9"),
        ("2.6.0", {"TORCH_FR_BUFFER_SIZE": "9"}, "TORCH_FR_BUFFER_SIZE", "9"),
    ],
)
def test_every_torch_remembers_collectives(
    version: str, given: dict[str, str], name: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch/csrc/distributed/c10d/FlightRecorder.hpp:111, `TORCH_FR_BUFFER_SIZE`:
    torch 2.6 knows the older name only.

    torch 2.13 takes the newer one first, and warns of the older. By default torch 2.6 remembers none.
    """
    environ = dict(given)
    monkeypatch.setattr(os, "environ", environ)
    torchs = SimpleNamespace(__version__=torch.torch_version.TorchVersion(version))
    monkeypatch.setitem(sys.modules, "torch", torchs)
    remember_collectives()
    assert environ == {name: number}


# 52: 32 bits of a time


class Event:
    """c10/cuda/CUDAEvent.h:195, `elapsed_time`: a float, in ms."""

    at_ns = 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        (rounded,) = struct.unpack("f", struct.pack("f", (end.at_ns - self.at_ns) / 1e6))
        return float(rounded)


def test_a_time_late_in_a_long_block_is_as_exact_as_an_early_one() -> None:
    now_ns = 0

    def record(event: Event) -> None:
        event.at_ns = now_ns

    clock = EventClock(Event, record, lambda: None)
    clock.start()
    for copy_ns, step_ns in ((100_000, 100_000_000_000), (100_000, 2_000_000)):
        now_ns += copy_ns
        clock.mark("h2d")
        now_ns += step_ns - copy_ns
        clock.end_step()
    late = clock.read()[1]
    assert late == StepTiming(2_000_000, {"h2d": 100_000})


# 53: a program with an allocator of its own


class Pluggable(FakeCuda):
    """torch/csrc/cuda/CUDAPluggableAllocator.cpp:207, `getDeviceStats`, and 222, `resetPeakStats`: errors."""

    def memory_stats(self, device: Any = None) -> Any:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    memory_allocated = max_memory_allocated = memory_reserved = reset_peak_memory_stats = memory_stats


@pytest.fixture
def pluggable(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Pluggable:
    made = Pluggable(current=1)
    monkeypatch.setattr(CudaRuntime, "module", made)
    return made


@pytest.fixture
def own_recorder(tmp_path: Path, pluggable: Pluggable) -> Iterator[StepRecorder]:
    made = StepRecorder(program_config(tmp_path), 1, RunDir(tmp_path))
    with watch_steps(made):
        yield made


def test_a_program_with_its_own_allocator_is_timed_without_a_peak(
    own_recorder: StepRecorder, pluggable: Pluggable, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with RAPIDS' memory manager, by `torch.cuda.memory.change_current_allocator`."""
    for _ in range(3):
        with gpurun.step():
            pluggable.now_ms += 4.0
    own_recorder.close(wait=True)
    steps = own_recorder.run.read_steps("script-1")[1]
    assert [(step.step_ns, step.peak_bytes) for step in steps] == [(4_000_000, None)] * 3
    assert own_recorder.stamps is not None
    assert own_recorder.stamps.device == torch.device("cuda", 1)
    assert capsys.readouterr().err == ""


def test_what_no_allocator_counts_is_not_known(pluggable: Pluggable) -> None:
    runtime, device = CudaRuntime(), torch.device("cuda", 0)
    runtime.reset_peak(device)
    assert (runtime.peak_bytes(device), runtime.reserved_bytes(device)) == (None, None)
    assert runtime.alloc_retries(device) == 0


# 54: collectives that NCCL runs as one


def entry(seq: int, name: str, state: str) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "process_group": ("0", "default_pg"),
        "profiling_name": f"nccl:{name}",
        "state": state,
    }


@pytest.mark.parametrize(("state", "stuck"), [("completed", "all_reduce #3"), ("scheduled", "all_gather #2")])
def test_collectives_that_run_as_one_are_completed_with_it(state: str, stuck: str) -> None:
    """torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3830, `collective`: coalesced ones have no events by
    which their state would change; the entry that `endCoalescing` (3664) adds has them.
    """
    entries = [
        entry(1, "all_reduce", "completed"),
        entry(2, "all_gather", "scheduled"),
        entry(2, "all_gather", "scheduled"),
        entry(2, "coalesced", state),
        entry(3, "all_reduce", "started"),
    ]
    history = parse_history(json.dumps({"entries": entries}).encode())
    assert str(find_pending({0: history, 1: history})) == stuck


# 55: an algorithm of NCCL's that can't do every collective

COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")


def allowed_since_2_24(text: str) -> dict[str, set[str]]:
    """NCCL 2.24 to 2.30, src/graph/tuning.cc, `parseList`: one list for all collectives, or one for each that
    is named, which leaves the others as they are; a name that it doesn't know is an error.
    """
    allowed = {collective: set(NCCL_ALGORITHMS) for collective in COLLECTIVES}
    for entry in text.split(";"):
        collective, _, names = entry.rpartition(":")
        assert set(names.split(",")) <= set(NCCL_ALGORITHMS)
        allowed |= {each: set(names.split(",")) for each in ([collective] if collective else COLLECTIVES)}
    assert set(allowed) == set(COLLECTIVES)
    return allowed


def allowed_before_2_24(text: str) -> set[str]:
    """NCCL 2.21, of torch 2.6, at the same place: one list for all, in which unknown names are ignored; a
    collective that has none of it takes the ring.
    """
    return set(text.split(",")) & set(NCCL_ALGORITHMS)


@pytest.mark.parametrize("algorithm", NCCL_ALGORITHMS)
def test_an_algorithm_is_for_the_collectives_that_it_can_do(algorithm: str) -> None:
    """NCCL 2.27, src/enqueue.cc, `topoGetAlgoInfo`: without any it fails, as in the broadcasts of `ddp`."""
    text = nccl_variables({"algorithm": algorithm})["NCCL_ALGO"]
    for collective, allowed in allowed_since_2_24(text).items():
        able = {name for name, collectives in NCCL_ALGORITHMS.items() if collective in collectives}
        assert allowed & able == ({algorithm} if algorithm in able else able)
    assert allowed_before_2_24(text) == {algorithm}


@pytest.mark.parametrize(
    ("strategy", "chosen", "problem"),
    [
        ("ddp", {"algorithm": "nvls", "protocol": "ll"}, "NCCL's nvls has no protocol but `simple`"),
        ("ddp", {"algorithm": "pat"}, "ddp communicates by allreduce, which NCCL's pat can't do"),
        (
            "fsdp",
            {"algorithm": "tree"},
            "fsdp communicates by allgather and reducescatter, which NCCL's tree",
        ),
        ("hsdp", {"algorithm": "tree", "protocol": "ll128"}, None),
        ("zero1", {"algorithm": "nvlstree", "protocol": "simple"}, None),
    ],
)
def test_what_nccl_cannot_do_is_refused(strategy: str, chosen: dict[str, str], problem: str | None) -> None:
    """NCCL 2.27, src/graph/tuning.cc, `ncclTopoTuneModel`: 0 GB/s means that there is no such combination."""
    gpus = tuple(FakeGpu(f"GPU-{number}", bus=str(number)) for number in range(4))
    text = f"strategy: {strategy}\nnccl: {json.dumps(chosen)}\ndevices: auto\nglobal_batch: 64\n"
    with pytest.raises(SpecError, match=problem) if problem else nullcontext():
        expand(spec_of(text + "shard_size: 2\n" * (strategy == "hsdp")), FakeMachine(gpus=gpus))


# 56: allocators that keep no history


class Async(FakeCuda):
    """c10/cuda/CUDAMallocAsyncAllocator.cpp:651, `recordHistory`; torch/csrc/cuda/memory_snapshot.cpp:279,
    `_record_memory_history`: its callbacks come before the allocator's error, and go likewise.
    """

    callbacks = 0

    def record(self, enabled: str | None = "all", **_: Any) -> None:
        self.callbacks = int(enabled is not None)
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory.")


def test_an_allocator_without_a_history_costs_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync`, or as in 53."""
    allocator = Async()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", allocator.record)
    with CudaRuntime().memory_history(1000) as write:
        assert write is None
    assert allocator.callbacks == 0


# 57: the limit of a communicator that doesn't block


def test_a_rank_whose_peers_never_connected_is_no_cause() -> None:
    """torch/csrc/distributed/c10d/NCCLUtils.hpp:87, `C10D_CHECK_TIMEOUT`: always half an hour."""
    error = RuntimeError("NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:134")
    assert is_secondary(error)


# 58: bytes of elements


@pytest.mark.parametrize(
    ("names", "num_bytes"),
    [
        (("Float8_e4m3fn", "c10::Float8_e4m3fn", "c10::Float8_e5m2", "Float8_e4m3fnuz", "Byte", "Char"), 1),
        (("c10::Float8_e5m2fnuz", "c10::Float8_e8m0fnu", "c10::Float4_e2m1fn_x2", "Bool", "bool"), 1),
        (("Half", "c10::Half", "c10::BFloat16", "UInt16", "short unsigned int"), 2),
        (("Float", "float", "UInt32", "unsigned int", "ComplexHalf", "c10::complex<c10::Half>"), 4),
        (("Long", "long int", "UInt64", "long unsigned int", "c10::complex<float>"), 8),
        (("ComplexDouble", "c10::complex<double>"), 16),
        (("Undefined", "c10::dummy_int1_7_t<4>", ""), None),
    ],
)
def test_every_type_that_is_sent_has_a_size(names: tuple[str, ...], num_bytes: int | None) -> None:
    """torch/headeronly/core/ScalarType.h:320, `toString`, and its list in line 103: the names in
    `dtype`. `Input type` has what GCC calls them, as torch 2.13 wrote them here for a tensor of each."""
    assert {dtype_bytes(name) for name in names} == {num_bytes}


# 59: streams with one number on several GPUs of a process


@pytest.mark.parametrize(("device", "computed_us"), [(0, 110), (1, 30)])
def test_a_wait_is_for_a_stream_of_its_own_gpu(tmp_path: Path, device: int, computed_us: float) -> None:
    """Kineto's libkineto/src/CuptiActivity.h, `CudaSyncActivity::visitTypedMetadata` (main of August 2026): a
    wait has its device and its stream, which every GPU counts for itself."""

    def kernel(on: int, start_us: float, length_us: float, correlation: int) -> dict[str, object]:
        places = {"device": on, "stream": 7, "correlation": correlation}
        return span("kernel", f"k{correlation}", start_us, length_us, 7, **places) | {"pid": on}

    facts = {"device": device, "stream": 7, "correlation": 3}
    events = [
        *(launch(0, 1, 1), kernel(0, 10, 90, 1), launch(2, 1, 2), kernel(1, 12, 10, 2)),
        span("cuda_runtime", "cudaStreamSynchronize", 3, 97, correlation=3),
        span("cuda_sync", "Stream Sync", 3, 97, 7, **facts) | {"pid": device},
        *(launch(101, 1, 4), kernel(1, 110, 20, 4)),
    ]
    write(tmp_path / "rank0.json", events, **rank_info(0, 1))
    found = analyse_paths([tmp_path], None, frozenset({"critical-path"})).critical_path
    assert found is not None
    assert [each.path_us for each in found.parts if each.part == "compute"] == [computed_us]


# 60: sends and receives that NCCL runs as one


@pytest.mark.parametrize(("state", "stuck"), [("completed", None), ("started", "coalesced #3")])
def test_messages_that_run_as_one_after_a_collective_may_be_stuck(state: str, stuck: str | None) -> None:
    """torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3636, `endCoalescing`: its entry isn't
    called one of messages (3497, `initWork`), and has the number of the last collective."""
    entries = [entry(3, "all_reduce", "completed"), entry(3, "coalesced", state)]
    history = parse_history(json.dumps({"entries": entries}).encode())
    pending = find_pending({0: history, 1: history})
    assert (None if pending is None else str(pending)) == stuck
