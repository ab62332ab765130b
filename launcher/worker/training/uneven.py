"""Samples and loss weights of an uneven split, for the user's own training loop; see `gpurun.uneven`.

DDP averages gradients over ranks. The mean loss of nᵢ of a step's N samples, weighted by W·nᵢ/N on W ranks,
makes that average the gradient of the mean loss over all N. The last batch of an epoch has fewer samples; it
is divided in the same proportion, and weighted by what each rank got of it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from gpurun.launcher.splits import split_proportional
from gpurun.launcher.worker.training import forward_backward

Reduction = Literal["mean", "sum"]


def loss_weight(count: int, total: int, world_size: int, reduction: Reduction = "mean") -> float:
    """The factor on this rank's loss: W·count/total for a mean, W for a sum.

    With masked targets, `count` and `total` are valid targets: of this rank, and of all ranks.
    """
    return float(forward_backward.loss_weight(reduction, count, total, world_size))


@dataclass(frozen=True)
class Share:
    """This rank's part of one global batch."""

    start: int
    """Position of the first sample within the global batch."""
    stop: int
    """One past its last."""
    weight: float

    @property
    def rows(self) -> slice:
        """The rows to load. A rank without samples loads one too, with weight 0: DDP waits for it."""
        return slice(self.start, self.stop) if self.stop > self.start else slice(0, 1)


def share_of(split: Sequence[int], rank: int, num_samples: int, reduction: Reduction = "mean") -> Share:
    """The part of `rank` in a global batch of `num_samples`, which the last of an epoch may fall short of."""
    samples = split_proportional(num_samples, split)
    start = sum(samples[:rank])
    weight = loss_weight(samples[rank], num_samples, len(split), reduction) if samples[rank] else 0.0
    return Share(start, start + samples[rank], weight)


class UnevenBatches:
    """A `batch_sampler` for a map-style dataset: this rank's part of every global batch.

    All ranks shuffle alike, so that together they read each sample once an epoch.
    """

    def __init__(
        self,
        dataset: Sized,
        split: Sequence[int],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        reduction: Reduction = "mean",
    ) -> None:
        """A sampler for one rank.

        Args:
            dataset: anything with a length.
            split: samples of each rank in a step, as `gpurun` found them.
            rank: of this process; `torch.distributed.get_rank()`.
            shuffle: whether to draw a fresh order for each epoch, from `seed` and the epoch alone.
            seed: the same on all ranks.
            drop_last: leaves out an incomplete last batch.
            reduction: of the loss, over its samples.

        Raises:
            ValueError: the split is no list of samples for this rank.
        """
        check_split(split, rank)
        self.num_samples, self.split, self.rank = len(dataset), tuple(split), rank
        self.shuffle, self.seed, self.drop_last, self.reduction = shuffle, seed, drop_last, reduction
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begins another order; call it before each epoch, on all ranks."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        for number, share in enumerate(self._shares()):
            first = number * sum(self.split)
            yield order[first : first + sum(self.split)][share.rows]

    def weights(self) -> Iterator[float]:
        """The loss weight of each batch, in order."""
        return (share.weight for share in self._shares())

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order

    def _shares(self) -> list[Share]:
        return [share_of(self.split, self.rank, size, self.reduction) for size in self._sizes()]

    def _sizes(self) -> list[int]:
        """Samples of each global batch."""
        whole, rest = divmod(self.num_samples, sum(self.split))
        return [sum(self.split)] * whole + ([rest] if rest and not self.drop_last else [])


class UnevenStream(IterableDataset[tuple[Any, float]]):
    """An iterable dataset as (batch, loss weight) pairs of this rank, for `DataLoader(…, batch_size=None)`.

    Every rank reads the whole stream, which must be the same on all, and collates its own part of each
    global batch. With several loader workers each makes every n-th batch of n workers; they come in order.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        split: Sequence[int],
        rank: int,
        *,
        drop_last: bool = False,
        reduction: Reduction = "mean",
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """A stream for one rank; arguments as for `UnevenBatches`.

        Raises:
            ValueError: the split is no list of samples for this rank.
        """
        check_split(split, rank)
        self.dataset, self.split, self.rank = dataset, tuple(split), rank
        self.drop_last, self.reduction, self.collate = drop_last, reduction, collate

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        for samples in itertools.islice(self._global_batches(), number, None, count):
            share = share_of(self.split, self.rank, len(samples), self.reduction)
            yield self.collate(samples[share.rows]), share.weight

    def _global_batches(self) -> Iterator[list[Any]]:
        stream, size = iter(self.dataset), sum(self.split)
        while samples := list(itertools.islice(stream, size)):
            if len(samples) == size or not self.drop_last:
                yield samples


def check_split(split: Sequence[int], rank: int) -> None:
    """Raises `ValueError` unless `split` has samples for every rank, and this is one of them."""
    if not split or any(not isinstance(size, int) or size < 1 for size in split):
        raise ValueError(f"split must hold the samples of each rank, at least 1, but is {split!r}")
    if not 0 <= rank < len(split):
        raise ValueError(f"the split {tuple(split)} is for {len(split)} ranks, but this is rank {rank}")
