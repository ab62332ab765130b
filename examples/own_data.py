"""Several inputs, and a stream of samples: `workload: own_data.py:ratings` or `own_data.py:stream`."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gpurun import Workload

USERS, ITEMS = 1000, 5000


class Rating(nn.Module):
    """Says how much a user likes an item."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, width), nn.Embedding(ITEMS, width)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(1)


def ratings(width: int = 64) -> Workload:
    """Two inputs: a tuple is passed to `forward` as positional arguments, a dict by the names of its keys."""

    def batch(size: int, generator: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
        users = torch.randint(USERS, (size,), generator=generator)
        items = torch.randint(ITEMS, (size,), generator=generator)
        return (users, items), (users + items) % 5 + 1.0

    return Workload(Rating(width), batch, loss=nn.functional.mse_loss)


class Points(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """An endless stream: there is no sample number k that one could ask for."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(32, generator=generator)
            yield x, x.sum().gt(0).long()


def stream(samples: int = 4096) -> Workload:
    """The first samples of a stream, as a list, so that every split trains on the same ones."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
    dataset = list(itertools.islice(Points(), samples))
    return Workload(model, dataset=dataset, loss=nn.functional.cross_entropy)
