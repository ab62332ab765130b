"""Trains with the split that `gpurun` found, in your own DDP loop, on devices of unequal speed.

    torchrun --nproc-per-node 2 examples/uneven_training.py 46,18

The gradients, and so the weights, are those of one device that computes the whole batch.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gpurun.uneven import UnevenBatches

EPOCHS = 3


def dataset() -> TensorDataset:
    """1,000 points and the class of each; no multiple of any batch, so that the last one is smaller."""
    x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1).gt(0).long())


def train(split: tuple[int, ...]) -> Tensor:
    """The loss of the last step, over the whole global batch."""
    rank, data = dist.get_rank(), dataset()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = UnevenBatches(data, split, rank)
    loader = DataLoader(data, batch_sampler=batches)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for (inputs, targets), weight in zip(loader, batches.weights(), strict=True):
            loss = weight * nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    last = loss.detach() / dist.get_world_size()
    dist.all_reduce(last)
    return last


def main() -> None:
    split = tuple(int(samples) for samples in sys.argv[1].split(","))
    dist.init_process_group("gloo")
    last = train(split)
    if dist.get_rank() == 0:
        print(f"trained with {split}, last loss {float(last):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
