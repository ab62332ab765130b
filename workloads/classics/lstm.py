"""The recurrent language model of Shi et al. 2016.

Source: https://arxiv.org/abs/1608.07249
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun.workloads.base import Workload
from gpurun.workloads.limits import check

VOCABULARY = 10_000
WIDTH = 256
LAYERS = 2


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
