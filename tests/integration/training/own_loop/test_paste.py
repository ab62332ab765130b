"""The lines that a report prints for an uneven split run unchanged, and train as one device does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets an environment variable
from torch import Tensor

from gpurun import Workload
from gpurun.launcher.rundir.records import LossOver
from gpurun.launcher.worker.entry.workload_rank import loss_over
from gpurun.uneven import UnevenBatches
from tests.integration.command import gpurun, write
from tests.integration.ranks import run_ranks
from tests.integration.training.own_loop import paste_worker as worker
from tests.integration.training.own_loop.uneven_worker import SPLIT, new_model
from tests.whole import first

SUM = """
import torch
from gpurun import Workload

def build():
    def batch(size, generator):
        inputs = torch.randn(size, 4, generator=generator)
        return inputs, inputs.sum(1).gt(0).long()
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    return Workload(torch.nn.Linear(4, 2), batch, loss=loss, reduction="sum")
"""
JOB = """
    workload: sums.py:build
    devices: cpu:2
    global_batch: 8
    split: [5, 3]
    steps: {rounds: 2, warmup: 1}
    profile: {steps: 0}
"""


@pytest.mark.slow
def test_a_run_records_that_the_loss_is_a_sum(tmp_path: Path) -> None:
    write(tmp_path, "sums.py", SUM)
    write(tmp_path, "job.yaml", JOB)
    gpurun(tmp_path, "job.yaml", "--out", "run").ended()
    said = gpurun(tmp_path, "report", "run", "--details").out
    assert 'split=(5, 3), rank=torch.distributed.get_rank(), reduction="sum")' in said
    assert "a mean over" not in said


def test_loss_over() -> None:
    workload = Workload(torch.nn.Linear(1, 1), None, loss=torch.nn.MSELoss())
    assert loss_over(workload) == "mean"
    assert loss_over(replace(workload, count=len)) == "counted"
    assert loss_over(replace(workload, count=len, reduction="sum")) == "sum"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks came to, by case."""
    directory = tmp_path_factory.mktemp("paste")
    run_ranks(worker.__name__, 2, directory)
    return [torch.load(directory / f"{rank}.pt") for rank in (0, 1)]


def batches_of(data: Any, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """All global batches."""
    sampler = UnevenBatches(data, (sum(SPLIT),), 0, shuffle=kind == "map-style")
    for epoch in range(worker.EPOCHS):
        sampler.set_epoch(epoch)
        yield from (data[batch] for batch in sampler)


def one_device(over: LossOver, kind: str) -> Tensor:
    """The weights of an ordinary loop over whole batches."""
    network, loss_function = new_model(), worker.loss_function(over)
    optimizer = torch.optim.SGD(network.parameters(), lr=worker.LEARNING_RATE)
    for inputs, targets in batches_of(worker.dataset(over), kind):
        optimizer.zero_grad()
        if worker.count_targets(targets):
            loss_function(network(inputs), targets).backward()
        optimizer.step()
    return worker.weights_of(network)


@pytest.mark.parametrize(("over", "kind", "which"), first(4, worker.ALL_CASES))
def test_the_printed_lines_train_as_one_device(
    weights: list[dict[str, Any]], over: LossOver, kind: str, which: str
) -> None:
    torch.set_num_threads(1)
    expected = one_device(over, kind)
    start = worker.weights_of(new_model())
    for rank in (0, 1):
        off = torch.linalg.vector_norm(weights[rank][f"{over} {kind} {which}"] - expected)
        assert off <= 1e-12 * torch.linalg.vector_norm(expected - start)
