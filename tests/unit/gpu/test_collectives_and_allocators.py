"""Collectives that run as one, what NCCL's algorithms can do, allocators of a program's own, exact times."""

import json
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
from gpurun.launcher.worker.entry.zygote import remember_collectives
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps
from tests.unit.gpu.fake_cuda import FakeCuda, fake_cuda  # noqa: F401 - a fixture
from tests.unit.plan.machines import FakeGpu, FakeMachine
from tests.unit.plan.test_plan_expand import spec_of
from tests.unit.trace.trace_files import launch, rank_info, span, write
from tests.unit.worker.test_program_steps import program_config

# 51: the variable of the flight recorder


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
def recorder(tmp_path: Path, pluggable: Pluggable) -> Iterator[StepRecorder]:
    made = StepRecorder(program_config(tmp_path), 1, RunDir(tmp_path))
    with watch_steps(made):
        yield made


def test_a_program_with_its_own_allocator_is_timed_without_a_peak(
    recorder: StepRecorder, pluggable: Pluggable, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with RAPIDS' memory manager, by `torch.cuda.memory.change_current_allocator`."""
    for _ in range(3):
        with gpurun.step():
            pluggable.now_ms += 4.0
    recorder.close(wait=True)
    steps = recorder.run.read_steps("script-1")[1]
    assert [(step.step_ns, step.peak_bytes) for step in steps] == [(4_000_000, None)] * 3
    assert recorder.stamps is not None
    assert recorder.stamps.device == torch.device("cuda", 1)
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
