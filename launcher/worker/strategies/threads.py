"""One thread per replica, each in the state of the thread that starts them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from gpurun.launcher.machine.accelerators import ACCELERATORS
from gpurun.launcher.worker.meters import memory
from gpurun.launcher.worker.meters.cpu_time import note_end
from gpurun.workloads.base import on_device

T = TypeVar("T")


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps per thread, and a new thread would therefore not have: grad mode and autocast.

    The stock parallel apply carries whether autocast is on but not its dtype: bf16 becomes fp16 there.
    """

    grad_enabled: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Device types for which autocast is on, and in what."""

    @classmethod
    def current(cls) -> "ThreadState":
        active = [device for device in ACCELERATORS if torch.is_autocast_enabled(device)]
        return cls(torch.is_grad_enabled(), tuple((d, torch.get_autocast_dtype(d)) for d in active))

    @contextmanager
    def restored(self, index: int) -> Iterator[None]:
        """Within it, the calling thread is in this state and computes for device `index`."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(on_device(index))
            stack.enter_context(memory.in_this_thread())
            yield


@dataclass
class ReplicaCall(Generic[T]):
    """One replica's work, and what came of it."""

    index: int
    function: Callable[[], T]
    result: T | None = None
    error: BaseException | None = None

    def run(self, state: ThreadState) -> None:
        try:
            with state.restored(self.index):
                self.result = self.function()
        except BaseException as error:  # raised again in the thread that waits
            error.add_note(f"in replica {self.index}")
            self.error = error
        finally:
            note_end()


def run_replicas(functions: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
    """Results of all functions, given with their replica's index, each run in a thread of its own.

    No thread is left when it returns. If several fail, the error of the first replica is raised, as it was,
    with its traceback and a note that names the replica.
    """
    calls = [ReplicaCall(index, function) for index, function in functions]
    state = ThreadState.current()
    threads = [
        threading.Thread(target=call.run, args=(state,), name=f"replica{call.index}") for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for call in calls:
        if call.error is not None:
            raise call.error
    return [call.result for call in calls]  # type: ignore[misc]
