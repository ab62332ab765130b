"""Small programs as users write them, each with something that a recorder of steps may stumble over.

None calls `set_device`. The arguments are the kind of the devices and a name of `PROGRAMS`.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.stepping import step as marked_step
from gpurun.launcher.worker.selftest.device_program import own_device

STEPS, SKIPPED = 30, 5
EPOCHS, BATCHES, BATCH = 3, 8, 32
WIDTH = 128


class Training:
    """A model on the rank's device, and its optimizer."""

    def __init__(self, kind_name: str) -> None:
        self.device = own_device(accelerator_of(kind_name))
        layers = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x.to(self.device)).square().mean()
        return loss

    def step(self, x: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.loss(x))
        self.optimizer.step()


def without_set_device(training: Training) -> None:
    for _ in range(STEPS):
        training.step(torch.randn(BATCH, WIDTH))


def loader_workers(training: Training) -> None:
    """A program with loader workers, which are forked again in every epoch from a process with a device."""
    data = TensorDataset(torch.randn(BATCHES * BATCH, WIDTH))
    for _ in range(EPOCHS):
        for (x,) in DataLoader(data, batch_size=BATCH, num_workers=1):
            training.step(x)


def skipped_step(training: Training) -> None:
    """One loss is infinite: the GradScaler leaves that step out."""
    scaler = torch.amp.GradScaler(training.device.type, init_scale=1.0)
    for number in range(STEPS):
        training.optimizer.zero_grad()
        factor = float("inf") if number == SKIPPED else 1.0
        torch.autograd.backward(scaler.scale(training.loss(torch.randn(BATCH, WIDTH)) * factor))
        scaler.step(training.optimizer)
        scaler.update()


def captured_graph(training: Training) -> None:
    """The optimizer steps while the graph is captured; what is replayed has marked steps."""
    module, x = torch.get_device_module(training.device), torch.randn(BATCH, WIDTH, device=training.device)
    graph = captured(training, x, module.device(training.device))
    for _ in range(STEPS):
        with marked_step():
            graph.replay()


def captured(training: Training, x: Tensor, current: AbstractContextManager[object]) -> Any:
    """A graph of one step, after some on another stream, as torch's documentation asks for."""
    with current:
        module = torch.get_device_module(training.device)
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for _ in range(3):
                training.step(x)
        module.current_stream().wait_stream(side)
        graph = module.CUDAGraph()
        training.optimizer.zero_grad(set_to_none=True)
        with module.graph(graph):
            torch.autograd.backward(training.loss(x))
            training.optimizer.step()
    return graph


PROGRAMS = {
    "no-set-device": without_set_device,
    "loader-workers": loader_workers,
    "skipped-step": skipped_step,
    "graph": captured_graph,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[2]](Training(sys.argv[1]))
