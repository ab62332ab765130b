"""ResNet-56 for images of 32², as Shi et al. 2016 built it.

Source: https://arxiv.org/abs/1608.07249; He et al. 2015, section 4.2, https://arxiv.org/abs/1512.03385
"""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.data.synthetic import classified

BLOCKS_PER_STAGE = 9
"""n of the 6n + 2 layers."""


class Block(nn.Module):
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
    blocks = [Block(before, width, stride=1 if before == width else 2) for before, width in pairwise(widths)]
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
