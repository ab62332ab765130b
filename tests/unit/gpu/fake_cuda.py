"""What `torch.cuda` does as far as gpurun relies on it, by torch 2.13's sources, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime


@dataclass(frozen=True)
class Stream:
    device: int
    captures: bool = False


@dataclass
class Event:
    """torch/cuda/streams.py:199, `Event.record`: without a stream it takes that of the current device."""

    cuda: FakeCuda
    stream: Stream | None = None
    at_ms: float = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.cuda.current_stream()
        self.at_ms = self.cuda.now_ms
        if self.stream.captures:
            self.at_ms = float("nan")

    def query(self) -> bool:
        """c10/cuda/CUDAEvent.h:103, `query`: a captured event, or asking during a capture, is an error."""
        if self.stream is None or self.stream.captures or self.cuda.current_stream().captures:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return True

    def elapsed_time(self, end: Event) -> float:
        """c10/cuda/CUDAEvent.h:195, `elapsed_time`: both events have to be of one device."""
        if self.stream is None or end.stream is None or self.stream.device != end.stream.device:
            raise RuntimeError("Events were not recorded on one device")
        return end.at_ms - self.at_ms


@dataclass
class FakeCuda:
    """The module `torch.cuda` on a machine with so many GPUs; `current` is this thread's current device."""

    count: int = 2
    current: int = 0
    now_ms: float = 0.0
    initialized: bool = True
    allocated: dict[int, int] = field(default_factory=dict)
    retries: dict[int, int] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    capturing: bool = False
    captured_device: int = 0
    """The only one with a stream that is captured meanwhile."""
    synchronized: list[Any] = field(default_factory=list)
    fractions: list[tuple[int, float]] = field(default_factory=list)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        self.initialized = True  # torch/cuda/__init__.py:501: `_lazy_init`
        return self.current

    def index(self, device: Any) -> int:
        if device is None:
            return self.current
        index = device.index if isinstance(device, torch.device) else int(device)
        return self.current if index is None else index

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index(device)
        return Stream(index, self.capturing and index == self.captured_device)

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)

    def synchronize(self, device: Any = None) -> None:
        self.synchronized.append(self.index(device))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self.index(device)
        yield
        self.current = before

    def memory_allocated(self, device: Any = None) -> int:
        return self.allocated.get(self.index(device), 0)

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peaks.get(self.index(device), 0)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """torch/cuda/memory.py:396, `_cuda_resetPeakMemoryStats`: c10's `assertValidDevice` refuses it."""
        if not self.initialized:
            raise RuntimeError(f"Invalid device argument {self.index(device)}: did you call init?")
        self.peaks[self.index(device)] = 0

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """torch/cuda/memory.py:354, `is_initialized`: empty before that."""
        if not self.initialized:
            return {}
        return {"num_alloc_retries": self.retries.get(self.index(device), 0)}

    def is_current_stream_capturing(self) -> bool:
        """c10/cuda/CUDAGraphsC10Utils.h:72, `currentStreamCaptureStatusMayInitCtx`: of the current device."""
        return self.current_stream().captures

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=80 << 30)

    def set_per_process_memory_fraction(self, fraction: float, device: Any) -> None:
        self.fractions.append((self.index(device), fraction))

    def empty_cache(self) -> None:
        return


@pytest.fixture(name="cuda")
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replaces `torch.cuda` wherever gpurun uses it."""
    cuda = FakeCuda()
    monkeypatch.setattr(CudaRuntime, "module", cuda)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", cuda.is_current_stream_capturing)
    return cuda


def launch(directory: Path, **changes: Any) -> LaunchConfig:
    fields: dict[str, Any] = {
        "launch": "01-ddp-2", "run_dir": str(directory), "workload": "mlp",
        "job_dir": str(directory), "params": {},
        "strategy": "ddp", "devices": ("cpu", "cpu"), "backend": "gloo", "precision": "fp32", "seed": 0,
        "threads": 1, "variants": (VariantConfig("a", (4, 4), 1),), "baseline": None, "warmup": 10,
        "rounds": 1,
    }  # fmt: skip
    return LaunchConfig(**{**fields, **changes})
