"""What every CUDA program has to know, shown by running it: python examples/cuda_semantics.py

Each function shows one thing and returns what it saw; `main` prints that. Without a GPU, a queue of our own
replaces a CUDA stream (work is submitted at once and done later), and torch's `meta` device for a
second device; what only a GPU can show is said to be left out.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Queue(Protocol):
    """A device's queue of work: a CUDA stream, or its stand-in."""

    def submit(self, work: Callable[[], object]) -> None:
        """Hands `work` over and returns, whether it is done or not."""

    def synchronize(self) -> None:
        """Returns when all work that was submitted is done."""

    def event(self) -> Callable[[], float]:
        """A mark in the queue; called later, it gives the time in seconds at which the queue got there."""


class CudaQueue:
    """The current CUDA stream."""

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.start.record()

    def submit(self, work: Callable[[], object]) -> None:
        work()  # the launch of a kernel doesn't wait for it

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def event(self) -> Callable[[], float]:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return lambda: self.start.elapsed_time(mark) / 1e3


class ThreadQueue:
    """One thread that works through what it is given, in order, as a stream does."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.pool, self.clock = ThreadPoolExecutor(1), clock
        self.last: Future[Any] = self.pool.submit(lambda: None)

    def submit(self, work: Callable[[], object]) -> None:
        self.last = self.pool.submit(work)

    def synchronize(self) -> None:
        self.last.result()

    def event(self) -> Callable[[], float]:
        return self.pool.submit(self.clock).result

    def close(self) -> None:
        self.pool.shutdown()


@dataclass(frozen=True)
class ThreeTimes:
    """The same work timed three ways, in seconds."""

    without_sync: float
    """Wrong: how long it took to hand the work over."""
    with_sync: float
    """Correct, but the host is blocked meanwhile."""
    by_events: float
    """Right, and the host may go on."""


def timed_three_ways(
    queue: Queue, work: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> ThreeTimes:
    """Why timing without synchronising is wrong."""
    queue.submit(work)  # a first time, which may have to load something
    queue.synchronize()

    start = clock()
    queue.submit(work)
    without_sync = clock() - start
    queue.synchronize()

    start = clock()
    queue.submit(work)
    queue.synchronize()
    with_sync = clock() - start

    first = queue.event()
    queue.submit(work)
    second = queue.event()
    queue.synchronize()
    return ThreeTimes(without_sync, with_sync, second() - first())


def best_device() -> torch.device:
    """Device-agnostic code names its device once, here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train_step(device: torch.device) -> torch.device:
    """One step that runs unchanged on any device; returns where its loss is.

    The model is moved, inputs are made on the device; constants of a model are buffers, which move with it.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    x = torch.ones(8, 4, device=device)
    loss = model(x).square().mean()
    loss.backward()
    return loss.device


def tensors_apart(device: torch.device) -> str:
    """What torch says when an operator gets tensors of two devices."""
    other = torch.device("cpu" if device.type == "cuda" else "meta")
    try:
        torch.ones(2, device=device) + torch.ones(2, device=other)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing"


@dataclass(frozen=True)
class Moved:
    """What one use of some data costs, in seconds."""

    num_bytes: int
    copy: float
    compute: float
    """Adding it up where it lies."""


def cost_of_moving(device: torch.device, num_bytes: int = 64 << 20) -> Moved:
    """Moving data to a device against using it there; on the CPU, a copy within memory."""
    host = torch.ones(num_bytes // 4, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    copy = timed(lambda: there.copy_(host, non_blocking=True), device)
    return Moved(num_bytes, copy, timed(there.sum, device))


def timed(work: Callable[[], object], device: torch.device, repetitions: int = 5) -> float:
    """Mean seconds, with the device waited for at both ends."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    work()
    wait()
    start = time.perf_counter()
    for _ in range(repetitions):
        work()
    wait()
    return (time.perf_counter() - start) / repetitions


class Counted(nn.Module):
    """Notes how many samples it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 1), list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))  # replicas share the list
        outputs: torch.Tensor = self.layer(x)
        return outputs


def stock_data_parallel(num_samples: int = 50) -> list[int]:
    """What each replica of `torch.nn.DataParallel` gets: 25 and 25 on two GPUs, 50 on one.

    On the CPU it says nothing and runs the bare module.
    """
    model = Counted().to(best_device())
    nn.DataParallel(model)(torch.ones(num_samples, 3, device=best_device()))
    return sorted(model.seen)


def two_devices(num_samples: int = 50) -> list[int]:
    """The same by gpurun's own DataParallel, which works on CPU devices too: 25 and 25."""
    from gpurun.launcher.splits import split_even
    from gpurun.launcher.worker.strategies.dp import CpuDataParallel

    model = Counted()
    CpuDataParallel(model)(torch.ones(num_samples, 3), split_even(num_samples, 2))
    return sorted(model.seen)


def some_work(device: torch.device) -> Callable[[], object]:
    """Some milliseconds of matrix products."""
    matrix = torch.ones(4096, 4096, device=device) if device.type == "cuda" else torch.ones(512, 512)
    return lambda: matrix @ matrix


def main() -> None:
    device = best_device()
    is_cuda = device.type == "cuda"
    queue = CudaQueue() if is_cuda else ThreadQueue()
    times = timed_three_ways(queue, some_work(device))
    print(f"1. Timing, on {'a CUDA stream' if is_cuda else 'a thread in place of a CUDA stream'}:")
    print(f"   host clock without synchronising  {1e3 * times.without_sync:8.3f} ms  <- wrong")
    print(f"   host clock with synchronising     {1e3 * times.with_sync:8.3f} ms")
    print(f"   events in the queue               {1e3 * times.by_events:8.3f} ms")
    print(f"2. Device-agnostic code: the loss is on {train_step(device)}")
    print(f"3. Tensors on different devices: {tensors_apart(device)}")
    moved = cost_of_moving(device)
    where = "to the GPU" if is_cuda else "within memory (no GPU here)"
    costs = f"takes {1e3 * moved.copy:.2f} ms, using it {1e3 * moved.compute:.2f} ms"
    print(f"4. Moving {moved.num_bytes >> 20} MiB {where} {costs}")
    count = max(1, torch.cuda.device_count())
    print(f"5. DataParallel, 50 samples: torch's on {count} device(s) {stock_data_parallel()}")
    print(f"   gpurun's on two CPU devices: {two_devices()}")
    if not is_cuda:
        print("Left out without a GPU: CUDA events, transfers over PCIe, DataParallel on two GPUs.")
    if isinstance(queue, ThreadQueue):
        queue.close()


if __name__ == "__main__":
    main()
