"""The smaller networks of Shi et al. 2016: FCN-S and FCN-R, AlexNet in two sizes, a recurrent language model.

AlexNet has no local normalisation, groups or dropout. The fully connected networks have sigmoids.

Source: https://arxiv.org/abs/1608.07249
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.images import classified
from gpurun.workloads.limits import check

FCN_S = (26752, 2048, 2048, 2048, 26752)
FCN_R = (784, 2048, 4096, 1024, 10)
VOCABULARY = 10_000
WIDTH = 256
LAYERS = 2
"""Of the language model."""


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


class LanguageModel(nn.Module):
    """Words (samples, length) to logits (samples, vocabulary, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def lstm(length: int = 32) -> Workload:
    """Two layers of 256 over `length` random words of 10,000; 6,182,672 parameters, batches of 128.

    Args:
        length: words per sample.

    Raises:
        ValueError: the length is not positive.
    """
    check(length=length)

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        words = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        return words[:, :-1], words[:, 1:]

    return Workload(LanguageModel(), batch, F.cross_entropy)
