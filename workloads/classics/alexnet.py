"""AlexNet in the two sizes of Shi et al. 2016: without local normalisation, groups and dropout.

Source: https://arxiv.org/abs/1608.07249
"""

from torch import nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.data.images import classified


def alexnet_s() -> Workload:
    """For images of 224² and 1000 classes; 62,378,344 parameters, published with batches of 16."""
    model = nn.Sequential(
        *convolution(3, 96, size=11, stride=4, padding=2),
        nn.MaxPool2d(3, 2),
        *convolution(96, 256, size=5),
        nn.MaxPool2d(3, 2),
        *convolution(256, 384, size=3),
        *convolution(384, 384, size=3),
        *convolution(384, 256, size=3),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    )
    return Workload(model, classified((3, 224, 224), 1000), F.cross_entropy)


def alexnet_r() -> Workload:
    """For images of 32² and 10 classes; 85,098 parameters, published with batches of 1024."""
    model = nn.Sequential(
        *convolution(3, 32, size=5),
        nn.MaxPool2d(3, 2),
        *convolution(32, 32, size=5),
        nn.MaxPool2d(3, 2),
        *convolution(32, 64, size=5),
        nn.AvgPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 10),
    )
    return Workload(model, classified((3, 32, 32), 10), F.cross_entropy)


def convolution(
    channels_in: int, channels_out: int, size: int, stride: int = 1, padding: int | None = None
) -> tuple[nn.Module, nn.Module]:
    """A convolution and its ReLU; without `padding`, images keep their size."""
    padding = size // 2 if padding is None else padding
    return nn.Conv2d(channels_in, channels_out, size, stride, padding), nn.ReLU()
