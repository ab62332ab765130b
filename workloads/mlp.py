"""A multi-layer perceptron on random vectors: small, dense, and without surprises."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload


def build(width: int = 512, layers: int = 3, inputs: int = 784, classes: int = 10) -> Workload:
    """`layers` linear layers with ReLU between them; the class is the largest of some inputs.

    Args:
        width: width of the hidden layers.
        layers: number of linear layers, including the first and the last.
        inputs: features per sample.
        classes: number of classes.
    """
    sizes = [inputs, *[width] * (layers - 1), classes]
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        modules += [nn.Linear(fan_in, fan_out), nn.ReLU()]

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, inputs, generator=generator)
        return x, x[:, :classes].argmax(1)

    return Workload(nn.Sequential(*modules[:-1]), batch, F.cross_entropy)
