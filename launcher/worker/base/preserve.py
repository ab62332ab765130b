"""Trying a model out without leaving a trace in it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Undoes what forward and backward within it change: buffers, gradients and torch's random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gpus = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that random layers on this device draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
