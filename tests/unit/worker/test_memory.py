"""What memory holds when it is fullest: known answers, and torch's own counter of allocations."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity

from gpurun.launcher.rundir.records import MEMORY_PARTS, MemoryPart
from gpurun.launcher.worker.meters.memory import MemoryLog, fullest, peak_of_step
from gpurun.launcher.worker.strategies.dp import CpuDataParallel

SAMPLES, FEATURES, HIDDEN, CLASSES = 32, 100, 200, 10
WEIGHTS = 4 * (FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)
"""Bytes of the parameters."""

storages = st.lists(st.tuples(st.sampled_from(MEMORY_PARTS), st.integers(0, 100)), max_size=6)


@given(storages, storages, st.randoms())
def test_the_fullest_moment_is_the_largest_of_all(at_start, later, random) -> None:  # type: ignore[no-untyped-def]
    parts = [part for part, _ in (*at_start, *later)]
    changes = [(n, size) for n, (_, size) in enumerate(later, len(at_start))]
    for storage, num_bytes in list(changes):
        freed = random.randrange(changes.index((storage, num_bytes)) + 1, len(changes) + 1)
        changes.insert(freed, (storage, -num_bytes))
    held: Counter[MemoryPart] = Counter()
    for part, size in at_start:
        held[part] += size
    moments = [held.copy()]
    for storage, num_bytes in changes:
        held[parts[storage]] += num_bytes
        moments.append(held.copy())
    best = max(moments, key=Counter.total)  # the first of equals
    start = {number: size for number, (_, size) in enumerate(at_start)}
    found = fullest(start, changes, parts.__getitem__)
    assert Counter(found) == best


class Model:
    """Two layers, and the optimizer of which nothing is made in a step: SGD without momentum, in place."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.network = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.network
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.1, momentum=momentum, foreach=False)
        self.inputs = torch.randn(SAMPLES, FEATURES)

    def step(self, log: MemoryLog) -> None:
        loss = self.run(self.inputs).sum()
        log.mark("forward")
        loss.backward()
        log.mark("backward")
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        log.mark("optimizer")


def test_parts_of_two_layers() -> None:
    model = Model(momentum=0.9)
    model.step(MemoryLog("cpu", ()))
    peak = peak_of_step(model.step, model.network, model.optimizer, "cpu")
    assert peak.parameters == peak.gradients == peak.optimizer == WEIGHTS
    # At the end of the backward pass: the inputs, and the gradient of the first layer's outputs twice, as
    # it leaves and enters the ReLU, or once of the three; the outputs' own are small.
    assert model.inputs.nbytes <= peak.activations <= model.inputs.nbytes + 3 * 4 * SAMPLES * HIDDEN
    assert peak.communication == 0
    assert peak.reserved is None


def test_the_first_step_makes_the_optimizers_state() -> None:
    model = Model(momentum=0.9)
    peak = peak_of_step(model.step, model.network, model.optimizer, "cpu")
    assert peak.optimizer == WEIGHTS


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_replicas_hold_parameters_and_gradients_of_their_own(num_devices: int) -> None:
    model = Model()
    replicas = CpuDataParallel(model.network)
    chunks = [SAMPLES // num_devices] * num_devices
    model.inputs = model.inputs[: sum(chunks)].clone()
    model.run = lambda inputs: replicas(inputs, chunks)
    peak = peak_of_step(model.step, model.network, model.optimizer, "cpu")
    assert peak.parameters == num_devices * WEIGHTS
    assert num_devices * WEIGHTS <= peak.gradients <= (num_devices + 1) * WEIGHTS


def test_torch_counts_as_many_bytes() -> None:
    model = Model(momentum=0.9)
    model.step(MemoryLog("cpu", ()))
    log = MemoryLog("cpu", ())
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model.step(log)
    made = [
        event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = most = 0
    for num_bytes in made:
        held += num_bytes
        most = max(most, held)
    peak = peak_of_step(model.step, model.network, model.optimizer, "cpu")
    at_start = 2 * WEIGHTS + model.inputs.nbytes
    # Workspaces of libraries and scalars aren't tensors of the step.
    assert peak.total == pytest.approx(at_start + most, rel=0.02)


def test_a_storage_that_is_resized_counts_as_what_it_has() -> None:
    model = Model()
    gathered = torch.empty(1000)
    gathered.untyped_storage().resize_(0)

    def step(log: MemoryLog) -> None:
        gathered.untyped_storage().resize_(4 << 20)
        gathered.untyped_storage().resize_(0)
        model.step(log)

    resize = torch.UntypedStorage.resize_
    peak = peak_of_step(step, model.network, model.optimizer, "cpu")
    assert peak.total == WEIGHTS + (4 << 20)  # inputs come later
    assert torch.UntypedStorage.resize_ is resize


def test_threads_number_no_two_storages_alike() -> None:
    log, interval = MemoryLog("cpu", ()), sys.getswitchinterval()
    made = [[torch.empty(1) for _ in range(2_000)] for _ in range(4)]
    calls = [threading.Thread(target=log.label, args=(tensors, "gradients")) for tensors in made]
    sys.setswitchinterval(1e-6)
    try:
        for call in calls:
            call.start()
        for call in calls:
            call.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(number for number, _ in log.alive.values()) == list(range(8_000))


def test_a_bucket_that_is_first_seen_late_was_there_all_the_time() -> None:
    """DDP copies gradients to its buckets when activations are gone already, and they hold most."""
    model, bucket = Model(), torch.empty(WEIGHTS // 4)

    def step(log: MemoryLog) -> None:
        model.step(log)
        bucket.zero_()
        log.label([bucket], "communication")

    alone = peak_of_step(model.step, model.network, model.optimizer, "cpu")
    peak = peak_of_step(step, model.network, model.optimizer, "cpu")
    assert peak == replace(alone, communication=bucket.nbytes)
