"""ResNet-50 for images of 224², in its first and its usual later form, and ResNet-56 for images of 32².

Source: He et al. 2015, https://arxiv.org/abs/1512.03385; ResNet-56 (section 4.2) as Shi et al. 2016 built it,
https://arxiv.org/abs/1608.07249
"""

from itertools import pairwise

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
