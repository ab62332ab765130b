"""The interface between gpurun and a model.

A job names a function, `train.py:build`; what it returns is the workload. `Workload` below is one way to
write that down; any object with the same attributes will do, and those with a default may be missing.

The step that is measured is `loss(model(inputs), targets)`, its backward pass and the optimizer's step.
`inputs` and `targets` may be tensors, tuples, lists, dicts and dataclasses of tensors, nested as you like;
every tensor in them holds the samples along dimension 0.

`model` is called with `inputs` as its only argument, but a dict whose keys are all names of parameters of
`forward` is passed as keyword arguments, and a tuple or list as positional arguments if `forward` can't be
called with one.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Batch = Callable[[int, "torch.Generator"], Any]
Loss = Callable[[Any, Any], "torch.Tensor"]


@dataclass(frozen=True)
class Workload:
    """A model and what training it takes."""

    model: "torch.nn.Module"
    """On the CPU, not wrapped in DataParallel or its like: how it runs on devices is up to the job."""
    batch: Batch | None = None
    """`batch(size, generator)` gives `(inputs, targets)` of `size` samples on the CPU.

    All randomness must come from `generator`: then every rank draws the same batch, and takes its part of it.
    `None` where `dataset` is given.
    """
    loss: Loss | None = None
    """`loss(outputs, targets)` gives a scalar; on `dp` the outputs of all devices have been gathered.

    `None` where the model computes it: as its only output, `outputs.loss` or `outputs["loss"]`. Then `batch`
    and `dataset` give the inputs alone, and `count` gets those.
    """
    optimizer: "Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None" = None
    """Makes the optimizer from the model's parameters. `None`: plain SGD with a learning rate of 0.001."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether `loss` is the mean over the samples (over the valid targets, with `count`) or their sum.

    It decides how the losses of unequal parts are weighted so that their gradients add up to that of the
    whole batch.
    """
    count: Callable[[Any], "int | torch.Tensor"] | None = None
    """`count(targets)`: over how many a mean loss averages, where that is not the number of samples.

    For a cross entropy with `ignore_index=-100`: `lambda targets: (targets != -100).sum()`.
    """
    dataset: Any = None
    """A map-style dataset of `(input, target)` samples, read by a DataLoader inside the measured step."""
    blocks: "tuple[type[torch.nn.Module], ...]" = ()
    """Classes of the layers that `fsdp` and `hsdp` shard one by one; by default those that repeat."""
    num_workers: int = 0
    """Processes that read `dataset` on each rank."""
    notes: tuple[str, ...] = ()
    """Notes for readers of the results, in whole sentences: files that were skipped, for one."""


class _Place(threading.local):
    index = 0


_place = _Place()


def device_index() -> int:
    """Position, among the job's devices, of the one that the calling thread computes for: rank or replica."""
    return _place.index


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Within it, `device_index()` of this thread is `index`."""
    previous = _place.index
    _place.index = index
    try:
        yield
    finally:
        _place.index = previous
