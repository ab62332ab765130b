"""Random images and vectors: of the right shape, and cheap to draw."""

import torch
from torch import Tensor

from gpurun.workloads.base import Batch

POOL_SAMPLES = 32
"""Different samples. A batch picks some of them: drawing each number anew would take longer than many a step
that trains on them."""


def classified(shape: tuple[int, ...], classes: int) -> Batch:
    """A `batch` of normal random samples of `shape`, each with a random class of `classes`.

    The samples come from a small pool that is the same in every process; which ones, and their classes, from
    the generator alone.
    """
    pool: list[Tensor] = []

    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if not pool:
            pool.append(torch.randn(POOL_SAMPLES, *shape, generator=torch.Generator().manual_seed(0)))
        chosen = torch.randint(POOL_SAMPLES, (size,), generator=generator)
        return pool[0][chosen], torch.randint(classes, (size,), generator=generator)

    return batch
