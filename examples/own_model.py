"""A model of your own, named in a job file as `workload: own_model.py:build`."""

import torch

from gpurun import Workload


def build(width: int = 256) -> Workload:
    """The job's `params` arrive here as arguments."""
    model = torch.nn.Sequential(torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

    def batch(size: int, generator: torch.Generator):
        x = torch.randn(size, 784, generator=generator)
        return x, x.sum(1).gt(0).long()

    return Workload(model, batch, loss=torch.nn.functional.cross_entropy)
