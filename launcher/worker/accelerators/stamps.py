"""Points in time that cost a step next to nothing: read later, when they are known."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Stamps(Protocol):
    """A clock whose readings are compared afterwards."""

    device: torch.device

    def now(self) -> Any:
        """This moment; on a GPU the moment at which the work submitted so far will be done."""

    def elapsed_ns(self, start: Any, end: Any) -> int | None:
        """Nanoseconds between two moments; `None` while the later one lies ahead."""

    def wait(self) -> None:
        """Until no moment lies ahead."""


class CpuStamps:
    """`time.perf_counter_ns`."""

    device = torch.device("cpu")

    def now(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, start: int, end: int) -> int | None:
        return end - start

    def wait(self) -> None:
        pass


class CudaStamps:
    """CUDA events on the current stream; asked for, not waited for."""

    device = torch.device("cuda")

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self._new_event = new_event or new_cuda_event

    def now(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def elapsed_ns(self, start: Any, end: Any) -> int | None:
        return round(start.elapsed_time(end) * 1e6) if end.query() else None

    def wait(self) -> None:
        torch.cuda.synchronize()


def new_cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def stamps_for_program() -> Stamps:
    """By what the program uses: CUDA's, once it has begun to use it."""
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return CudaStamps() if uses_cuda else CpuStamps()
