"""Fully connected networks with sigmoids, FCN-S and FCN-R of Shi et al. 2016.

Source: https://arxiv.org/abs/1608.07249
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.data.images import classified

FCN_S = (26752, 2048, 2048, 2048, 26752)
FCN_R = (784, 2048, 4096, 1024, 10)


def fcn_s() -> Workload:
    """26752-2048-2048-2048-26752; 117,997,696 parameters, published with batches of 64."""
    return fully_connected(FCN_S)


def fcn_r() -> Workload:
    """784-2048-4096-1024-10, as for MNIST; 14,205,962 parameters, published with batches of 1024."""
    return fully_connected(FCN_R)


def fully_connected(widths: Sequence[int]) -> Workload:
    """Linear layers of these widths with sigmoids between them; the last width is the number of classes."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Sigmoid()]
    return Workload(nn.Sequential(*layers[:-1]), classified((widths[0],), widths[-1]), F.cross_entropy)
