"""An uneven split in your own loop, also by the lines that a report prints, trains as one device does."""

import os
import subprocess
import sys
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
from gpurun.uneven import UnevenBatches, UnevenStream, loss_weight
from tests.integration.command import gpurun, write
from tests.integration.ranks import run_ranks
from tests.integration.training.own_loop import own_loop_worker as worker
from tests.whole import first

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "uneven_training.py"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks trained, by case."""
    directory = tmp_path_factory.mktemp("own_loop")
    run_ranks(worker.__name__, 2, directory)
    return [torch.load(directory / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", first(1, worker.ALL_LOOPS))
def test_every_step_gives_the_weights_of_one_device(weights: list[dict[str, Any]], case: str) -> None:
    torch.set_num_threads(1)
    network = worker.new_model()
    batches = worker.LOOPS["map-style" if case == "map-style" else "iterable"]
    expected = worker.train(network, network, batches((sum(worker.SPLIT),), 0))
    assert len(expected) == worker.EPOCHS * 4  # the incomplete last batch is one of them
    for rank in (0, 1):
        assert len(weights[rank][case]) == len(expected)
        for step, one_device in zip(weights[rank][case], expected, strict=True):
            assert torch.linalg.vector_norm(step - one_device) <= 1e-12 * torch.linalg.vector_norm(one_device)


def test_plain_ddp_would_not(weights: list[dict[str, Any]]) -> None:
    """What the weights are for: without them the gradients of the two ranks count alike."""
    batches = UnevenBatches(range(28), (11, 3), 1)
    assert list(batches.weights()) == [pytest.approx(2 * 3 / 14)] * 2


def test_together_the_ranks_read_every_sample_once_an_epoch() -> None:
    split = (5, 2, 3)
    samplers = [UnevenBatches(range(47), split, rank, seed=1) for rank in range(3)]
    assert sorted(index for sampler in samplers for batch in sampler for index in batch) == list(range(47))
    assert [len(sampler) for sampler in samplers] == [5, 5, 5]
    before = [list(sampler) for sampler in samplers]
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [list(sampler) for sampler in samplers] != before
    assert len(UnevenBatches(range(47), split, 0, drop_last=True)) == 4


def test_a_rank_without_samples_takes_part_with_weight_0() -> None:
    last = [UnevenBatches(range(15), (11, 3), rank, shuffle=False) for rank in (0, 1)]
    assert [list(sampler)[-1] for sampler in last] == [[14], [14]]
    assert [list(sampler.weights())[-1] for sampler in last] == [2.0, 0.0]


def test_weights_of_sums_and_of_masked_targets() -> None:
    assert loss_weight(3, 14, 2, "sum") == 2
    assert loss_weight(0, 5, 2) == 0
    assert list(UnevenBatches(range(15), (11, 3), 1, reduction="sum").weights()) == [2.0, 0.0]


def test_a_wrong_split_is_reported() -> None:
    with pytest.raises(ValueError, match=r"2 ranks, but .* rank 2"):
        UnevenBatches(range(9), (2, 1), 2)
    with pytest.raises(ValueError, match="at least 1"):
        UnevenStream([], (2, 0), 0)


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    argv += ["--nproc-per-node=2", str(EXAMPLE), "46,18"]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # torchrun leaves a directory there
    done = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert "trained with (46, 18), last loss 0.2411" in done.stdout, done.stderr


# The lines that a report prints run unchanged


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


def batches_of(data: Any, kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """All global batches."""
    sampler = UnevenBatches(data, (sum(worker.SPLIT),), 0, shuffle=kind == "map-style")
    for epoch in range(worker.EPOCHS):
        sampler.set_epoch(epoch)
        yield from (data[batch] for batch in sampler)


def one_device(over: LossOver, kind: str) -> Tensor:
    """The weights of an ordinary loop over whole batches."""
    network, loss_function = worker.new_model(), worker.loss_function(over)
    optimizer = torch.optim.SGD(network.parameters(), lr=worker.LEARNING_RATE)
    for inputs, targets in batches_of(worker.dataset(over), kind):
        optimizer.zero_grad()
        if worker.count_targets(targets):
            loss_function(network(inputs), targets).backward()
        optimizer.step()
    return worker.weights_of(network)


@pytest.mark.parametrize(("over", "kind", "which"), first(4, worker.ALL_LINES))
def test_the_printed_lines_train_as_one_device(
    weights: list[dict[str, Any]], over: LossOver, kind: str, which: str
) -> None:
    torch.set_num_threads(1)
    expected = one_device(over, kind)
    start = worker.weights_of(worker.new_model())
    for rank in (0, 1):
        off = torch.linalg.vector_norm(weights[rank][f"{over} {kind} {which}"] - expected)
        assert off <= 1e-12 * torch.linalg.vector_norm(expected - start)
