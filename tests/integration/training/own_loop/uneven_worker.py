"""One of two ranks that train with an uneven split; run by `test_uneven.py`.

The weights after every step go to DIRECTORY/RANK.pt, by case.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpurun.uneven import UnevenBatches, UnevenStream
from tests.integration.ranks import in_group
from tests.whole import IS_WHOLE

SPLIT = (11, 3)
NUM_SAMPLES = 43
"""Three batches of 14, and one sample that rank 0 gets alone."""
EPOCHS = 2

Batch = tuple[tuple[Tensor, Tensor], float]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples, in their order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(samples())


def samples() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x * torch.linspace(1, 4, NUM_SAMPLES).unsqueeze(1), x.sum(1).gt(0).long())


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def train(model: nn.Module, network: nn.Module, batches: Iterator[Batch]) -> list[Tensor]:
    """The weights after each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    steps = []
    for (inputs, targets), weight in batches:
        optimizer.zero_grad()
        (weight * nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        steps.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).clone())
    return steps


def map_style(split: tuple[int, ...], rank: int) -> Iterator[Batch]:
    batches = UnevenBatches(samples(), split, rank, seed=3)
    loader = DataLoader(samples(), batch_sampler=batches)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        yield from zip(loader, batches.weights(), strict=True)


def iterable(
    split: tuple[int, ...], rank: int, workers: int = 0
) -> Iterator[tuple[tuple[Tensor, Tensor], float]]:
    for _ in range(EPOCHS):
        yield from DataLoader(UnevenStream(Stream(), split, rank), batch_size=None, num_workers=workers)


ALL_CASES: dict[str, Callable[[tuple[int, ...], int], Any]] = {
    "map-style": map_style,
    "iterable": iterable,
    "iterable, 2 workers": partial(iterable, workers=2),
}
CASES = ALL_CASES if IS_WHOLE else {"map-style": map_style}


def main(rank: int, directory: Path) -> None:
    with in_group(rank, 2, directory):
        found = {}
        for name, batches in CASES.items():
            network = new_model()
            found[name] = train(DistributedDataParallel(network), network, batches(SPLIT, rank))
        torch.save(found, directory / f"{rank}.pt")
