"""Causal language models over bytes of real text: pre-norm transformer blocks, as GPT-2 has them.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.data.text import Corpus, corpus, open_corpus, random_windows
from gpurun.workloads.limits import GptShape, check, shape_of


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each behind a layer norm and around a residual."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
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
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        projected: Tensor = self.projection(mixed.transpose(1, 2).reshape(samples, length, width))
        return projected


class GPT(nn.Module):
    """Tokens (samples, length) to logits (samples, length, vocabulary)."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.Sequential(
            *(Block(shape.width, shape.heads, is_causal=True) for _ in range(shape.layers))
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(initialize)
        if shape.tied:
            self.head.weight = self.tokens.weight

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
    preset: Literal["tiny", "small", "124M"] = "tiny",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    context: int | None = None,
    vocabulary: int | None = None,
    learning_rate: float = 3e-4,
    text: str = "",
) -> Workload:
    """A causal language model; a sample is `context` bytes of text, with the next byte of each as its target.

    Args:
        preset: tiny (3.3 M parameters), small (10.9 M) or 124M (GPT-2 small: 124,439,808).
        layers: number of transformer blocks; this and the next four override the preset.
        width: width of the residual stream.
        heads: attention heads of each block; they divide the width.
        context: tokens per sample.
        vocabulary: rows of the first and last layer, at least 256; the tokens are always bytes.
        learning_rate: learning rate of AdamW.
        text: a file, or a directory of files; by default the Python standard library's source.

    Raises:
        ValueError: the shape or the learning rate makes no sense, or there is not enough text.
    """
    check(learning_rate=learning_rate)
    shape = shape_of(preset, layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary)
    source = open_corpus(text) if text else Corpus(corpus())
    if len(source.text) <= shape.context:
        name = text or "the built-in text"
        raise ValueError(f"{name} has {len(source.text):,} bytes, but a sample needs {shape.context + 1:,}")

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        windows = random_windows(size, shape.context + 1, generator, source.text)
        return windows[:, :-1], windows[:, 1:]

    return Workload(
        GPT(shape),
        batch,
        next_token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        notes=source.notes,
    )
