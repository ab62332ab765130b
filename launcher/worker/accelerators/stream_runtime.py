"""What all GPUs have in common through `torch.get_device_module`: streams, events, a caching allocator.

Another kind, such as `xpu`, is a subclass that says what its profiler records and which sensors it has.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gpurun.launcher.worker.accelerators.clock import Clock, EventClock, EventStamps, Stamps
from gpurun.launcher.worker.accelerators.runtime import Runtime, Write


class StreamRuntime(Runtime):
    """A kind of device whose work is submitted to streams, and done later."""

    kind: str
    """torch's device type."""

    @property
    def module(self) -> Any:
        """`torch.cuda` or its counterpart."""
        return torch.get_device_module(self.kind)

    def is_available(self) -> bool:
        return bool(self.module.is_available())

    def is_initialized(self) -> bool:
        return bool(self.module.is_initialized())

    def synchronize(self, device: torch.device | None = None) -> None:
        self.module.synchronize(device)

    def clock(self, device: torch.device) -> Clock:
        return EventClock(self.new_event, self.recorder(device), lambda: self.synchronize(device))

    def stamps(self, device: torch.device) -> Stamps:
        return EventStamps(device, self.new_event, self.recorder(device), lambda: self.synchronize(device))

    def new_event(self) -> Any:
        return self.module.Event(enable_timing=True)

    def recorder(self, device: torch.device) -> Any:
        """Records an event on the current stream of `device`.

        By itself an event goes to the current device, where work of another one can't be seen.
        Source: torch/cuda/streams.py, `Event.record`.
        """
        return lambda event: event.record(self.module.current_stream(device))

    def used_devices(self) -> Sequence[torch.device]:
        if not self.is_initialized():
            return ()
        held = {index: self.module.memory_allocated(index) for index in range(self.module.device_count())}
        used = sorted((index for index in held if held[index]), key=lambda index: -held[index])
        return [torch.device(self.kind, index) for index in used]

    def is_capturing(self, device: torch.device) -> bool:
        return False

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        guard: AbstractContextManager[object] = self.module.device(device)
        return guard

    def reset_peak(self, device: torch.device) -> None:
        self.module.reset_peak_memory_stats(device)

    def peak_bytes(self, device: torch.device) -> int | None:
        """Memory that tensors had allocated at the peak."""
        return int(self.module.max_memory_allocated(device))

    def alloc_retries(self, device: torch.device) -> int:
        return int(self.module.memory_stats(device).get("num_alloc_retries", 0))

    def release_memory(self) -> None:
        self.module.empty_cache()

    @contextmanager
    def memory_history(self, max_entries: int) -> Iterator[Write | None]:
        yield None

    def random_state(self, device: torch.device) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state(device)
        return state

    def set_convolution_search(self, searches: bool) -> None:
        return
