"""The interface to a kind of device, and which class implements it: the table is `machine.accelerators`."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity

from gpurun.launcher.machine.accelerators import CPU, Accelerator, accelerator_of, gpu_kinds
from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.worker.accelerators.clock import Clock, EventClock, EventStamps, Stamps

Write = Callable[[str], object]
T = TypeVar("T")


class Runtime(ABC):
    """One kind of device, as this process uses it. All devices passed to it are of that kind.

    What isn't overridden is so where work is done when its call returns, and torch caches no memory.
    """

    activities: Sequence[ProfilerActivity]
    """The activities that `torch.profiler` records."""

    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether this process has used such a device."""

    def synchronize(self, device: torch.device | None = None) -> None:
        """Waits for all work submitted to `device`, by default the current one."""
        return

    @abstractmethod
    def clock(self, device: torch.device) -> Clock:
        """A clock that measures when work on `device` is done, not when it was submitted."""

    @abstractmethod
    def stamps(self, device: torch.device) -> Stamps:
        """Points in time on the current stream of `device`, whichever device is current."""

    @abstractmethod
    def used_devices(self) -> Sequence[torch.device]:
        """The devices on which this process holds memory, the one with most first."""

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of `device` records a graph: what is submitted does not run then."""
        return False

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes `device` the current one of this thread within it."""
        return nullcontext()

    @abstractmethod
    def reset_peak(self, device: torch.device) -> None:
        """Begins a new memory peak at what is in use now."""

    @abstractmethod
    def peak_bytes(self, device: torch.device) -> int | None:
        """Peak memory since `reset_peak`, in bytes; `None` where it can't be measured."""

    @abstractmethod
    def limit_memory(self, device: torch.device, num_bytes: int) -> None:
        """Lets this process take so many bytes of the device's memory; more is out of memory."""

    def reserved_bytes(self, device: torch.device) -> int | None:
        """The bytes that torch's allocator holds now, in use or not; `None` where it keeps nothing."""
        return None

    def alloc_retries(self, device: torch.device) -> int:
        """How often so far an allocation succeeded only after cached memory was released, which waits."""
        return 0

    def release_memory(self) -> None:
        """Returns memory that torch's allocator caches but no tensor uses."""
        return

    def memory_history(self, max_entries: int) -> AbstractContextManager[Write | None]:
        """Records allocations inside the context.

        Yields a function that writes them to a file; `None` where torch can't record them.
        """
        return nullcontext()

    @abstractmethod
    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of the generator that random layers on `device` draw from."""

    @contextmanager
    def forked_random_state(self, device: torch.device) -> Iterator[None]:
        """Restores the random state of `device` and of the CPU afterwards."""
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield

    def allow_tf32(self, allowed: bool) -> None:
        """Whether float32 products on this kind may round their inputs to 10 bits; one mode per process."""
        return

    def set_convolution_search(self, searches: bool) -> None:
        """Whether convolutions try their algorithms for each new shape, and keep the fastest."""
        return

    def sensors(self, devices: Sequence[torch.device]) -> Sequence[Sensors]:
        """The driver's sensors of each of the devices."""
        return ()


class StreamRuntime(Runtime):
    """A kind of device whose work is submitted to streams and done later, by `torch.get_device_module`.

    Another kind, such as `xpu`, is a subclass that says what its profiler records and which sensors it has.
    """

    kind: str
    """torch's device type."""

    @property
    def module(self) -> Any:
        """`torch.cuda` or its counterpart."""
        return torch.get_device_module(self.kind)

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
        held = [counted(self.module.memory_allocated, index) for index in range(self.module.device_count())]
        if None in held:
            return [torch.device(self.kind, self.module.current_device())]
        used = [(-(num_bytes or 0), index) for index, num_bytes in enumerate(held) if num_bytes]
        return [torch.device(self.kind, index) for _, index in sorted(used)]

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        guard: AbstractContextManager[object] = self.module.device(device)
        return guard

    def reset_peak(self, device: torch.device) -> None:
        # The allocator is an error until the first use of a device; there is no peak then either.
        if self.is_initialized():
            counted(self.module.reset_peak_memory_stats, device)

    def peak_bytes(self, device: torch.device) -> int | None:
        """Memory that tensors had allocated at the peak."""
        return counted(self.module.max_memory_allocated, device)

    def limit_memory(self, device: torch.device, num_bytes: int) -> None:
        total = self.module.get_device_properties(device).total_memory
        self.module.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)

    def reserved_bytes(self, device: torch.device) -> int | None:
        return counted(self.module.memory_reserved, device)

    def alloc_retries(self, device: torch.device) -> int:
        return int((counted(self.module.memory_stats, device) or {}).get("num_alloc_retries", 0))

    def release_memory(self) -> None:
        self.module.empty_cache()

    def random_state(self, device: torch.device) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state(device)
        return state

    def sensors(self, devices: Sequence[torch.device]) -> Sequence[Sensors]:
        return accelerator_of(self.kind).sensors([device.index or 0 for device in devices], os.environ)


def counted(ask: Callable[[Any], T], device: Any) -> T | None:
    """The counters of torch's allocator on a device; `None` where a program has put another in its place.

    Source: torch/csrc/cuda/CUDAPluggableAllocator.cpp, `getDeviceStats`.
    """
    try:
        return ask(device)
    except RuntimeError:
        return None


@cache
def runtime_of_kind(kind: str) -> Runtime:
    """The runtime of a row of the table.

    Raises:
        SpecError: there is no such row.
    """
    return load(accelerator_of(kind))


def load(kind: Accelerator) -> Runtime:
    module, _, name = kind.runtime.partition(":")
    runtime: Runtime = getattr(import_module(module), name)()
    return runtime


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a device's kind."""
    return runtime_of_kind(device.type)


def used_runtime() -> Runtime:
    """The runtime of the GPUs that this process has used; of the CPU where it has used none."""
    found = (runtime_of_kind(kind.name) for kind in gpu_kinds())
    return next((runtime for runtime in found if runtime.is_initialized()), runtime_of_kind(CPU.name))
