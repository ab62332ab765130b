"""What examples/cuda_semantics.py says is so."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda_semantics.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("cuda_semantics", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_semantics"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cuda_semantics"]


class Gate:
    """Work that is done only when the host waits for it, and takes 5 s of a clock that only it moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.open = threading.Event()

    def work(self) -> None:
        assert self.open.wait(10)
        self.now_s += 5.0


def test_without_synchronising_only_the_hand_over_is_timed(example: ModuleType) -> None:
    gate = Gate()
    queue = example.ThreadQueue(lambda: gate.now_s)
    wait = queue.synchronize

    def synchronize() -> None:
        gate.open.set()
        wait()
        gate.open.clear()

    queue.synchronize = synchronize
    try:
        times = example.timed_three_ways(queue, gate.work, lambda: gate.now_s)
    finally:
        gate.open.set()
        queue.close()
    assert (times.without_sync, times.with_sync, times.by_events) == (0.0, 5.0, 5.0)


def test_a_step_stays_on_its_device(example: ModuleType) -> None:
    for name in ("cpu", "meta"):
        assert example.train_step(torch.device(name)).type == name


def test_tensors_of_two_devices_cannot_be_added(example: ModuleType) -> None:
    assert "device" in example.tensors_apart(torch.device("cpu"))


def test_moving_costs_something(example: ModuleType) -> None:
    moved = example.cost_of_moving(torch.device("cpu"), 1 << 12)
    assert moved.num_bytes == 4096
    assert moved.copy > 0
    assert moved.compute > 0


def test_fifty_samples_on_two_devices_are_25_and_25(example: ModuleType) -> None:
    assert example.two_devices(50) == [25, 25]


def test_on_the_cpu_the_stock_class_runs_the_bare_module(example: ModuleType) -> None:
    if torch.cuda.is_available():
        pytest.skip("shows what happens without a GPU")
    assert example.stock_data_parallel(50) == [50]
