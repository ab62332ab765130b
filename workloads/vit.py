"""The vision transformer ViT-B/16.

Source: Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929
"""

import torch
from torch import Tensor, nn

from gpurun.workloads.base import Workload
from gpurun.workloads.gpt import Block
from gpurun.workloads.images import CLASSES, IMAGE_PIXELS, image_workload

PATCH_PIXELS = 16
LAYERS, WIDTH, HEADS = 12, 768, 12


class VisionTransformer(nn.Module):
    """Images (samples, 3, 224, 224) to logits (samples, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH_PIXELS, PATCH_PIXELS)
        # Of one dimension, so that its gradient is a sum even for one sample: else that would be a view into
        # another gradient, whose strides DDP has to copy and warns of.
        self.class_token = nn.Parameter(torch.zeros(WIDTH))
        num_tokens = (IMAGE_PIXELS // PATCH_PIXELS) ** 2 + 1
        self.positions = nn.Parameter(torch.empty(1, num_tokens, WIDTH).normal_(std=0.02))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, is_causal=False) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), 1, WIDTH)
        x = self.blocks(torch.cat((first, patches), 1) + self.positions)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def vit_b16(images: str = "", max_images: int = 10_000, num_workers: int = 4) -> Workload:
    """12 blocks of width 768 over patches of 16²; 86,567,656 parameters.

    Args:
        images: a directory with a subdirectory per class, or with images only; by default random images.
        max_images: the most files that are used, spread evenly over the directory.
        num_workers: processes per device that read and decode the images, at most 256.

    Raises:
        ValueError: the directory has no image that can be read.
    """
    model = VisionTransformer()
    return image_workload(model, images, max_images, num_workers, lambda p: torch.optim.AdamW(p, lr=3e-4))
