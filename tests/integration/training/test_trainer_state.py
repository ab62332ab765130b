"""Coming back to a saved state, whatever steps were made since and however the model saves itself."""

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpurun import Workload
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.training.batches import DatasetSource
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import model_warnings
from gpurun.launcher.worker.training.trainer import Trainer
from tests.integration.training.gradient_worker import config, workload


class Stubborn(nn.Module):
    """Counts its calls in a buffer that is not saved, normalises by batch, and can't be saved at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.norm(self.layer(x))
        return result

    def state_dict(self, *args: Any, **named: Any) -> Any:
        raise RuntimeError("this model can't be saved")


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=generator)
    return x, x.sum(1).gt(0).long()


def test_weights_buffers_and_optimizer_come_back() -> None:
    model = Stubborn()
    variant = VariantConfig("single-1", (8,), 1)
    job = Workload(model, batch, nn.functional.cross_entropy, optimizer=torch.optim.Adam)
    trainer = Trainer(job, config("single", 1, (variant,)), 0)

    def seen() -> list[Tensor]:
        moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*model.parameters(), *model.buffers(), *moments)]

    def step(number: int) -> list[Tensor]:
        trainer.step(trainer.prepare(variant, number), NoClock(), sync=False)
        return seen()

    before = step(0)
    state = trainer.save_state()
    for _ in range(2):  # a state can be come back to more than once
        after = step(1)
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        trainer.restore_state(state)
        assert all(torch.equal(a, b) for a, b in zip(before, seen(), strict=True))
    again = step(1)
    assert all(torch.equal(a, b) for a, b in zip(after, again, strict=True))
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "processes", "ahead"), [({}, 1, 2), ({"workers": 2, "prefetch": 3}, 2, 3)]
)
def test_a_dataset_is_read_by_so_many_processes_so_far_ahead(
    changes: dict[str, Any], processes: int, ahead: int
) -> None:
    variant = VariantConfig("single-1", (4,), 1)
    launch = replace(config("single", 1, (variant,)), **changes)
    trainer = Trainer(workload("dataset", num_workers=1), launch, 0)
    trainer.step(trainer.prepare(variant, 0), NoClock())
    source = trainer.source
    assert isinstance(source, DatasetSource)
    assert (source.loader.num_workers, source.loader.prefetch_factor) == (processes, ahead)
    assert len(multiprocessing.active_children()) == processes
    assert model_warnings(trainer) == []
    trainer.close()


@pytest.mark.parametrize(
    ("kind", "changes", "notes"),
    [
        ("mean", {"workers": 2}, ["workers changes nothing: the workload has no dataset"]),
        (
            "dataset",
            {"workers": 0, "prefetch": 3},
            ["prefetch changes nothing: no other process reads the dataset"],
        ),
    ],
)
def test_what_changes_nothing_about_reading_is_noted(
    kind: str, changes: dict[str, Any], notes: list[str]
) -> None:
    variant = VariantConfig("single-1", (4,), 1)
    trainer = Trainer(workload(kind), replace(config("single", 1, (variant,)), **changes), 0)
    assert model_warnings(trainer) == notes
    trainer.close()
