"""Causal language models over bytes of real text: pre-norm transformer blocks, as GPT-2 has them.

The text is that of files, or the Python standard library's own source, which is always there.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"
"""

import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.limits import (
    GptShape,
    check,
    listed,
    name_in,
    not_there,
    path_of,
    shape_of,
    why_no_file,
)

MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Corpus:
    """Text of several files, one after the other."""

    text: torch.Tensor
    """uint8, at most `MAX_BYTES` of them."""
    notes: tuple[str, ...] = ()
    """Which files were skipped, and why."""


@lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """The first `MAX_BYTES` of the library's top-level modules in order of their names, as uint8."""
    library = Path(sysconfig.get_path("stdlib"))
    return read_corpus(sorted(library.glob("*.py")), "the library", library).text


def open_corpus(place: str) -> Corpus:
    """The text of a file, or of all files in a directory in order of their names.

    Raises:
        ValueError: there is no such file or directory, or no text in it.
    """
    path = path_of(place)
    if not path.exists():
        raise ValueError(not_there("text", path))
    return read_corpus(sorted(path.rglob("*")) if path.is_dir() else [path], place, path)


def read_corpus(paths: list[Path], place: str, directory: Path) -> Corpus:
    """The first `MAX_BYTES` of the text of files in `directory`; what is no text is skipped, and said.

    Raises:
        ValueError: no file has text.
    """
    content, skipped, num_files = bytearray(), list[str](), 0
    for path in (path for path in paths if not path.is_dir()):
        outcome = why_no_file(path) or read_text(path)
        num_files += 1
        if isinstance(outcome, str):
            skipped.append(f"{name_in(directory, path)} ({outcome})")
        else:
            content += outcome
        if len(content) >= MAX_BYTES:
            break
    if not content:
        reason = f"its files are not text: {listed(skipped)}" if skipped else "it has no files"
        raise ValueError(f"there is no text in {place}: {reason}")
    note = f"skipped {len(skipped)} of {num_files} files in {place}, not text: {listed(skipped)}"
    return Corpus(torch.frombuffer(content[:MAX_BYTES], dtype=torch.uint8), (note,) if skipped else ())


def read_text(path: Path) -> bytes | str:
    """A file's content, or the reason why it is no text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or type(error).__name__
    return "binary" if b"\0" in content else content or "empty"


def random_windows(size: int, length: int, generator: torch.Generator, text: torch.Tensor) -> torch.Tensor:
    """`size` stretches of `length` bytes of the text, as int64 of shape (size, length)."""
    starts = torch.randint(len(text) - length + 1, (size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()


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
