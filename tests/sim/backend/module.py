"""`torch.sim`: the counterpart of `torch.cuda`, as far as gpurun and torch's strategies use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.sim.backend.devices import Device, devices
from tests.sim.backend.tensor import current, index_of
from tests.sim.clock import Event, Stream


class SimEvent(Event):
    """An event that reports, when it is asked, what a launch before it has failed with."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()

    def record(self, stream: Stream | None = None) -> None:
        super().record(stream or device_of(None).compute)

    def query(self) -> bool:
        if self.stream is not None:
            devices()[self.stream.device].check()
        return super().query()


def device_of(device: torch.device | int | None) -> Device:
    """The device of that name or index; by default the thread's current one."""
    return devices()[device if isinstance(device, int) else index_of(device)]


class SimModule:
    """What `torch.get_device_module("sim")` gives."""

    Event = SimEvent

    def is_available(self) -> bool:
        return bool(devices())

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return len(devices())

    def current_device(self) -> int:
        return current.index

    @contextmanager
    def device(self, device: torch.device | int | None) -> Iterator[None]:
        before, current.index = current.index, device_of(device).index
        try:
            yield
        finally:
            current.index = before

    def current_stream(self, device: torch.device | int | None = None) -> Stream:
        return device_of(device).compute

    def synchronize(self, device: torch.device | int | None = None) -> None:
        device_of(device).synchronize()

    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        return device_of(device).memory.allocated_bytes

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        return device_of(device).memory.peak_bytes

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        memory = device_of(device).memory
        memory.peak_bytes = memory.allocated_bytes

    def memory_reserved(self, device: torch.device | int | None = None) -> int:
        return device_of(device).memory.allocated_bytes

    def memory_stats(self, device: torch.device | int | None = None) -> dict[str, int]:
        return {"num_alloc_retries": 0}

    def empty_cache(self) -> None:
        return

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Devices draw from the CPU's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        return

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
