"""The networks of Shi et al. 2016, with the batch sizes that were published.

ResNet-50 for images of 224², in its first and its usual later form, and ResNet-56 for images of 32²; FCN-S
and FCN-R, AlexNet in two sizes, a recurrent language model. AlexNet has no local normalisation, groups or
dropout. The fully connected networks have sigmoids.

Sources: https://arxiv.org/abs/1608.07249; of the ResNets He et al. 2015, https://arxiv.org/abs/1512.03385;
ResNet-56 (section 4.2) is as Shi et al. 2016 built it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.images import classified, image_workload
from gpurun.workloads.limits import check

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks."""
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut.

    Version 1 has its stride in the first convolution, version 1.5 in the second, which costs 6 % more and
    is what most figures of today are measured with.
    """

    def __init__(self, channels_in: int, width: int, stride: int, version: float) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        strides = (stride, 1) if version == 1 else (1, stride)
        self.residual = nn.Sequential(
            *normalised(channels_in, width, 1, strides[0]),
            nn.ReLU(inplace=True),
            *normalised(width, width, 3, strides[1]),
            nn.ReLU(inplace=True),
            *normalised(width, channels_out, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*normalised(channels_in, channels_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x), inplace=True)


def normalised(channels_in: int, channels_out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """A convolution without bias, and its batch norm."""
    convolution = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out)


def bottlenecks(version: float) -> list[nn.Module]:
    """All blocks of the network."""
    blocks: list[nn.Module] = []
    channels = STAGES[0][0]
    for stage, (width, count) in enumerate(STAGES):
        for position in range(count):
            stride = 2 if stage and position == 0 else 1
            blocks.append(Bottleneck(channels, width, stride, version))
            channels = EXPANSION * width
    return blocks


def resnet50(
    version: float = 1.0, images: str = "", max_images: int = 10_000, num_workers: int = 4
) -> Workload:
    """Bottlenecks [3, 4, 6, 3]; 25,557,032 parameters, published with batches of 16.

    Args:
        version: 1 as in Shi et al. 2016, or 1.5 as in most current benchmarks.
        images: a directory with a subdirectory per class, or with images only; by default random images.
        max_images: the most files that are used, spread evenly over the directory.
        num_workers: processes per device that read and decode the images, at most 256.

    Raises:
        ValueError: there is no such version, or the directory has no image that can be read.
    """
    check(version=version)
    model = nn.Sequential(
        *normalised(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
        *bottlenecks(version),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512 * EXPANSION, 1000),
    )
    return image_workload(model, images, max_images, num_workers)


BLOCKS_PER_STAGE = 9
"""n of the 6n + 2 layers."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity; no ReLU after the addition, and biases as well as norms."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride, self.channels_added = stride, channels_out - channels_in
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.residual(x)
        return self.shortcut(x) + residual

    def shortcut(self, x: Tensor) -> Tensor:
        """Option A: every other pixel, and channels of zeros; it has no parameters."""
        if not self.channels_added:
            return x
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.channels_added))


def resnet56() -> Workload:
    """ResNet-56, widths 16, 32 and 64; 855,050 parameters, published with batches of 128."""
    widths = [16, *(width for width in (16, 32, 64) for _ in range(BLOCKS_PER_STAGE))]
    blocks = [
        BasicBlock(before, width, stride=1 if before == width else 2) for before, width in pairwise(widths)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return Workload(model, classified((3, 32, 32), 10), F.cross_entropy)


FCN_S = (26752, 2048, 2048, 2048, 26752)
FCN_R = (784, 2048, 4096, 1024, 10)
VOCABULARY = 10_000
WIDTH = 256
LAYERS = 2
"""Layers of the language model."""


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
