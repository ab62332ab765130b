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
    """A model and what training it takes; `gpurun examples own_model.py` shows a whole one.

    Attributes:
        model: On the CPU, not wrapped in DataParallel or its like: how it runs on devices is up to the job.
        batch: `batch(size, generator)` returns `(inputs, targets)` of `size` samples on the CPU. All
            randomness must come from `generator`: then every rank draws the same batch, and takes its part
            of it. `None` where `dataset` is given.
        loss: `loss(outputs, targets)` returns a tensor of shape (); on `dp` the outputs of all devices have
            been gathered. `None` where the model computes it: as its only output, `outputs.loss` or
            `outputs["loss"]`. Then `batch` and `dataset` give the inputs alone, and `count` gets those.
        optimizer: `optimizer(parameters)` gets the model's parameters and returns the optimizer:
            `lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)`. `None`: plain SGD with a learning
            rate of 0.001.
        reduction: Whether `loss` is the mean over the samples (over the valid targets, with `count`) or
            their sum: `"sum"` for `torch.nn.CrossEntropyLoss(reduction="sum")`. It decides how the losses of
            unequal parts are weighted so that their gradients add up to that of the whole batch.
        count: `count(targets)` gets the targets of a part of the batch, and returns over how many of them a
            mean loss averages, a number or a tensor of one, where that is not the number of samples. For a
            cross entropy with `ignore_index=-100`: `lambda targets: (targets != -100).sum()`.
        dataset: A map-style dataset of `(input, target)` samples, read by a DataLoader inside the measured
            step.
        blocks: Classes of the layers that `fsdp` and `hsdp` shard one by one, and that `checkpointing`
            computes again: `(torch.nn.TransformerEncoderLayer,)`. By default those that repeat.
        num_workers: Processes that read `dataset` on each rank.
        notes: Sentences for readers of the results, which the report shows: `("2 files can't be read.",)`.
    """

    model: "torch.nn.Module"
    batch: Batch | None = None
    loss: Loss | None = None
    optimizer: "Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None" = None
    reduction: Literal["mean", "sum"] = "mean"
    count: Callable[[Any], "int | torch.Tensor"] | None = None
    dataset: Any = None
    blocks: "tuple[type[torch.nn.Module], ...]" = ()
    num_workers: int = 0
    notes: tuple[str, ...] = ()


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
