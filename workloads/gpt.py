"""A small causal language model over bytes: pre-norm transformer blocks, as GPT-2 has them."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.base import Workload
from workloads.text import random_windows

VOCABULARY = 256
"""One token per value of a byte."""


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed

    def attention(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        qkv = self.qkv(x).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, length, width))
        return projected


class GPT(nn.Module):
    """Tokens (samples, length) to logits (samples, length, vocabulary)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def initialize(module: nn.Module) -> None:
    """Weights of linear layers and embeddings from N(0, 0.02²). Source: Radford et al. 2018, section 4.1."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all positions; samples have equally many, so it is a mean over samples too."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    layers: int = 4, width: int = 256, heads: int = 4, context: int = 128, learning_rate: float = 3e-4
) -> Workload:
    """A GPT of `layers` blocks; a sample is `context` bytes of the text and those that follow each of them.

    Raises:
        ValueError: the heads don't share the width evenly.
    """
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, but {width} is none of {heads}")

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        windows = random_windows(size, context + 1, generator)
        return windows[:, :-1], windows[:, 1:]

    return Workload(
        GPT(layers, width, heads, context),
        batch,
        next_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
    )
