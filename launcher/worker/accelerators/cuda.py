"""GPUs that torch calls `cuda`: NVIDIA's, and AMD's under ROCm."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpurun.launcher.machine.gpu import EnergyMeter
from gpurun.launcher.machine.nvml import VISIBLE, energy_meter, throttling_of
from gpurun.launcher.worker.accelerators.clock import Clock, EventClock, EventStamps, Stamps
from gpurun.launcher.worker.accelerators.runtime import Runtime, Write


def new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CudaRuntime(Runtime):
    """Streams, events and the caching allocator of `torch.cuda`; energy and throttling by NVML."""

    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def clock(self, device: torch.device) -> Clock:
        return EventClock(new_event, lambda: torch.cuda.synchronize(device))

    def stamps(self) -> Stamps:
        return EventStamps(torch.device("cuda"), new_event, torch.cuda.synchronize)

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self, device: torch.device) -> int | None:
        """Memory that tensors had allocated at the peak."""
        return int(torch.cuda.max_memory_allocated(device))

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    @contextmanager
    def memory_history(self, max_entries: int) -> Iterator[Write | None]:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=max_entries)
        try:
            yield torch.cuda.memory._dump_snapshot
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def allow_tf32(self, allowed: bool) -> None:
        mode = "tf32" if allowed else "ieee"
        torch.backends.cuda.matmul.fp32_precision = mode
        torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]

    def energy_meter(self, devices: Sequence[torch.device]) -> EnergyMeter:
        indices = sorted({device.index or 0 for device in devices})
        return energy_meter(indices, os.environ.get(VISIBLE))

    def throttling(self, device: torch.device) -> Callable[[], str | None]:
        return throttling_of(lambda: str(torch.cuda.get_device_properties(device).uuid))
