"""Which samples a rank computes in a step, and where they come from.

Sample k of step s is the same whatever the strategy and the split: every rank draws the global batch, or
the global order of the dataset, and takes its part.
"""

import gc
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from gpurun.launcher.errors import ParamsError
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.units import plural
from gpurun.launcher.worker.base import nested
from gpurun.launcher.worker.base.failure import SourceLine, UserError, place_of, users_code
from gpurun.launcher.worker.base.nested import Tree, join_rows, map_tensors, row_counts, take_rows, tensors_of
from gpurun.launcher.worker.base.precision import Precision
from gpurun.workloads.base import Workload
from gpurun.workloads.images import ImageFolder

Rows = tuple[int, int]
"""Samples of the global batch: first, and one past the last."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples that go through forward and backward at once."""

    inputs: Tree
    targets: Tree
    chunks: tuple[int, ...]
    """Samples per device of this process, in the order in which they lie; 0 for a device that has no more."""
    counts: tuple[int, ...]
    """Samples of each chunk, or its valid targets: what a mean loss on it is averaged over."""

    @property
    def count(self) -> int:
        """Samples, or valid targets, that a mean loss of this micro-batch is averaged over."""
        return sum(self.counts)


@dataclass(frozen=True)
class LoadedStep:
    """The micro-batches of one step on one rank."""

    micro_batches: tuple[MicroBatch, ...]
    total: int | None
    """The counts of the global batch added up; `None` where only all ranks together know it."""
    sync_every: int | None = None
    """Micro-batches between two averages, as in `VariantConfig`."""

    @property
    def nbytes(self) -> int:
        """Memory of the inputs and targets until the step is done."""
        batches = [(micro.inputs, micro.targets) for micro in self.micro_batches]
        return sum(tensor.nbytes for tensor in tensors_of(batches))

    def load(self) -> "LoadedStep":
        return self


def micro_sizes(num_samples: int, accumulate: int) -> tuple[int, ...]:
    """Samples of each micro-batch: sizes differ by 1 at most, and none is empty, so there may be fewer."""
    size, larger = divmod(num_samples, accumulate)
    sizes = (size + 1,) * larger + (size,) * (accumulate - larger)
    return tuple(size for size in sizes if size)


def device_rows(split: Sequence[int], accumulate: int, device: int) -> list[Rows]:
    """The rows of the global batch that one device computes in each of its micro-batches."""
    edges = list(itertools.accumulate(micro_sizes(split[device], accumulate), initial=sum(split[:device])))
    return list(itertools.pairwise(edges))


def micro_rows(split: Sequence[int], accumulate: int, devices: Sequence[int]) -> list[tuple[Rows, ...]]:
    """The rows of each of `devices`, for each micro-batch; empty ones for a device that has no more."""
    per_device = [device_rows(split, accumulate, device) for device in devices]
    return list(itertools.zip_longest(*per_device, fillvalue=(0, 0)))


def step_generator(seed: int, step: int) -> torch.Generator:
    """A generator that depends on the two numbers alone, and differs in all bits for neighbouring steps."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class Layout:
    """Which devices' samples this process computes, and what it does to them before the step."""

    devices: tuple[int, ...]
    """Positions in the split: this rank's for `ddp`, all for `dp`."""
    precision: Precision
    pin: bool
    """Whether batches go to page-locked memory, from which a GPU copies without blocking the host."""
    channels_last: bool = False
    """Whether images lie in memory pixel by pixel."""

    def arranged(self, tree: Tree) -> Tree:
        """Inputs or targets as the model needs them: cast to its precision, images in its memory format."""
        tree = self.precision.cast(tree)
        return map_tensors(pixel_by_pixel, tree) if self.channels_last else tree


def pixel_by_pixel(tensor: Tensor) -> Tensor:
    """Images (samples, channels, height, width) with their channels last in memory; others as they are."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def pinned(tensor: Tensor) -> Tensor:
    """A copy in page-locked memory, without the gaps that a slice has.

    `Tensor.pin_memory` keeps the gaps, and what has gaps is copied to pageable memory first, then to the GPU.
    Source: aten/src/ATen/native/cuda/Copy.cu, `copy_requires_temporaries`.
    """
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def collated(layout: Layout, samples: Sequence[Any]) -> Any:
    """A batch as the model needs it, before the DataLoader pins it: a later copy would not be pinned."""
    return layout.arranged(default_collate(list(samples)))


@dataclass(frozen=True)
class BatchSource:
    """Draws the global batch by the workload's `batch` function, outside the step."""

    workload: Workload
    seed: int
    layout: Layout

    def prepare(self, variant: VariantConfig, step: int) -> LoadedStep:
        """This rank's part of the global batch.

        Raises:
            UserError: `batch` raised, or returned something else than a batch of that size.
        """
        inputs, targets = self.draw(sum(variant.split), step)
        layout = self.layout
        micro_batches = tuple(
            self.micro_batch(inputs, targets, rows)
            for rows in micro_rows(variant.split, variant.accumulate, layout.devices)
        )
        total = count_targets(self.workload, inputs, targets, sum(variant.split))
        return LoadedStep(micro_batches, total, variant.sync_every)

    def whole(self, num_samples: int, step: int) -> LoadedStep:
        """The whole global batch of a step as one micro-batch of one device."""
        inputs, targets = self.draw(num_samples, step)
        micro = self.micro_batch(inputs, targets, ((0, num_samples),))
        return LoadedStep((micro,), micro.count)

    def draw(self, size: int, step: int) -> tuple[Tree, Tree]:
        """The global batch, cast to the precision."""
        batch = self.workload.batch
        assert batch is not None
        with users_code(f"batch({size}, generator) failed", "(inputs, targets)", place_of(batch)):
            drawn = batch(size, step_generator(self.seed, step))
        inputs, targets = checked_batch(self.workload, drawn, size, "batch(size, generator)", place_of(batch))
        return self.layout.arranged(inputs), self.layout.arranged(targets)

    def micro_batch(self, inputs: Tree, targets: Tree, rows: Sequence[Rows]) -> MicroBatch:
        """The rows of all devices, one after the other."""
        used = [(start, stop) for start, stop in rows if stop > start]
        parts = [join_rows([take_rows(tree, *pair) for pair in used]) for tree in (inputs, targets)]
        if self.layout.pin:
            parts = [map_tensors(pinned, part) for part in parts]
        return micro_batch(self.workload, parts[0], parts[1], tuple(stop - start for start, stop in rows))


class IndexFeed(Sampler[list[int]]):
    """The indices of one micro-batch after the other, from a step on without end, for one variant.

    Epoch after epoch, the dataset is gone through in a fresh order; an incomplete last batch is left out.
    """

    def __init__(self, dataset_size: int, seed: int, devices: Sequence[int]) -> None:
        self.dataset_size, self.seed, self.devices = dataset_size, seed, devices
        self.variant: VariantConfig | None = None
        self.step = 0

    def __iter__(self) -> Iterator[list[int]]:
        variant, step = self.variant, self.step
        assert variant is not None
        while True:
            indices = self.global_indices(sum(variant.split), step)
            for rows in micro_rows(variant.split, variant.accumulate, self.devices):
                yield [index for start, stop in rows for index in indices[start:stop]]
            step += 1

    def global_indices(self, num_samples: int, step: int) -> list[int]:
        """Indices of the global batch of a step."""
        epoch, position = divmod(step, self.dataset_size // num_samples)
        order = torch.randperm(self.dataset_size, generator=step_generator(self.seed, epoch))
        indices: list[int] = order[position * num_samples : (position + 1) * num_samples].tolist()
        return indices


@dataclass(frozen=True)
class PendingStep:
    """A step whose data is read inside the step."""

    source: "DatasetSource"
    variant: VariantConfig
    step: int

    @property
    def nbytes(self) -> int:
        return 0

    def load(self) -> LoadedStep:
        return self.source.load(self.variant, self.step)


StepInput = LoadedStep | PendingStep
"""One step's input, as `Trainer.prepare` returns it."""


class DatasetSource:
    """Reads the workload's dataset inside the step, by one DataLoader for all variants.

    Its worker processes live as long as it does and read ahead for consecutive steps of one variant. The
    first step of a block finds some of its data read already, as it would in training.
    """

    def __init__(self, workload: Workload, seed: int, layout: Layout, prefetch: int | None = None) -> None:
        """`prefetch`: micro-batches that each process of the loader reads ahead; by default torch's 2."""
        self.workload, self.layout = workload, layout
        self.place = place_of(workload.dataset)  # once: `inspect` takes milliseconds
        self.feed = IndexFeed(len(workload.dataset), seed, layout.devices)
        self.collate = partial(collated, layout)
        self.loader: DataLoader[Any] = DataLoader(
            workload.dataset,
            batch_sampler=self.feed,
            num_workers=workload.num_workers,
            persistent_workers=workload.num_workers > 0,
            prefetch_factor=prefetch if workload.num_workers > 0 else None,
            collate_fn=self.collate,
            pin_memory=layout.pin,
            generator=torch.Generator().manual_seed(seed),  # else each pass draws from the model's generator
        )
        self.batches: Iterator[Any] = iter(())
        self.has_workers = False
        self.prepared: tuple[str, int] | None = None
        self.loaded: tuple[str, int] | None = None

    def prepare(self, variant: VariantConfig, step: int) -> PendingStep:
        """A handle on the step; reading ahead starts now, unless it is under way.

        Raises:
            ParamsError: a directory of images is smaller than one global batch.
            UserError: a dataset of the user's own is.
        """
        if (variant.id, step - 1) != self.prepared:
            self.seek(variant, step)
        self.prepared = (variant.id, step)
        return PendingStep(self, variant, step)

    def seek(self, variant: VariantConfig, step: int) -> None:
        """Makes `step` of `variant` the next that is read."""
        check_dataset_size(self.workload, sum(variant.split))
        self.feed.variant, self.feed.step = variant, step
        has_samples = any(variant.split[device] for device in self.layout.devices)
        self.batches = self.read_on() if has_samples else iter(())
        self.prepared = self.loaded = (variant.id, step - 1)

    def read_on(self) -> Iterator[Any]:
        """Batches from the feed's step on; the first call starts the loader's processes.

        Garbage that they were forked with, and would collect, may hold tensors and events of a GPU: their
        destructors use CUDA, which no forked process may.
        """
        if not self.has_workers:
            gc.collect()
            self.has_workers = True
        return iter(self.loader)

    def load(self, variant: VariantConfig, step: int) -> LoadedStep:
        """Reads the step's micro-batches; in another order it may take longer, but gives the same."""
        if (variant.id, step - 1) != self.loaded:
            self.seek(variant, step)
        self.loaded = (variant.id, step)
        micro_batches = tuple(
            self.micro_batch(next(self.batches), tuple(stop - start for start, stop in rows))
            for rows in micro_rows(variant.split, variant.accumulate, self.layout.devices)
        )
        total = None if self.workload.count else sum(variant.split)
        return LoadedStep(micro_batches, total, variant.sync_every)

    def whole(self, num_samples: int, step: int) -> LoadedStep:
        """The whole global batch of a step as one micro-batch of one device."""
        check_dataset_size(self.workload, num_samples)
        dataset = self.workload.dataset
        expected = "(input, target) samples, padded or cut to one shape"
        with users_code("the dataset can't be read", expected, place_of(dataset)):
            batch = self.collate([dataset[i] for i in self.feed.global_indices(num_samples, step)])
        micro = self.micro_batch(batch, (num_samples,))
        return LoadedStep((micro,), micro.count)

    def micro_batch(self, batch: Any, chunks: tuple[int, ...]) -> MicroBatch:
        size = sum(chunks)
        inputs, targets = checked_batch(self.workload, batch, size, "a batch of the dataset", self.place)
        return micro_batch(self.workload, inputs, targets, chunks)


SampleSource = BatchSource | DatasetSource
"""The source of a rank's samples."""


def micro_batch(workload: Workload, inputs: Tree, targets: Tree, chunks: tuple[int, ...]) -> MicroBatch:
    """The samples of all chunks, with what the loss of each averages over."""
    if workload.count is None:
        return MicroBatch(inputs, targets, chunks, chunks)
    parts = zip(*(nested.split_rows(tree, chunks) for tree in (inputs, targets)), chunks, strict=True)
    counts = (count_targets(workload, *part) if part[-1] else 0 for part in parts)
    return MicroBatch(inputs, targets, chunks, tuple(counts))


def count_targets(workload: Workload, inputs: Tree, targets: Tree, num_samples: int) -> int:
    """Samples, or valid targets, that a mean loss on these samples is averaged over.

    A model that computes its own loss has the targets in its inputs.

    Raises:
        UserError: `count` raised, or gave no number.
    """
    if workload.count is None:
        return num_samples
    with users_code(
        "count(targets) failed", "the number of valid targets", partial(place_of, workload.count)
    ):
        return int(workload.count(inputs if workload.loss is None else targets))


def checked_batch(
    workload: Workload, batch: Any, size: int, what: str, place: SourceLine | None
) -> tuple[Tree, Tree]:
    """`batch`, if it is a pair of trees of CPU tensors with `size` samples each.

    Where the model computes its loss, the whole batch is the inputs, and there are no targets.

    Raises:
        UserError: it is something else.
    """
    if workload.loss is None:
        check_samples("inputs", batch, size, what, place)
        return batch, None
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        got = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise UserError(f"{what} must be a pair", expected="(inputs, targets)", got=got, place=place)
    for name, tree in zip(("inputs", "targets"), batch, strict=True):
        check_samples(name, tree, size, what, place)
    return batch[0], batch[1]


def check_samples(name: str, tree: Tree, size: int, what: str, place: SourceLine | None) -> None:
    """Raises `UserError` unless all tensors of a tree are on the CPU and hold `size` samples."""
    if elsewhere := {str(tensor.device) for tensor in tensors_of(tree)} - {"cpu"}:
        got = f"{name} on {', '.join(sorted(elsewhere))}"
        raise UserError(f"{what} must be CPU tensors", expected="tensors on cpu", got=got, place=place)
    if row_counts(tree) != {size}:
        rows = " and ".join(plural(num, "row") for num in sorted(row_counts(tree)))
        hint = ": put samples first, and transpose in the model" if row_counts(tree, 1) == {size} else ""
        expected = f"{size} samples along dimension 0 of every tensor{hint}"
        got, wrong = f"{name} with {rows}", f"{what} has the wrong batch size"
        if not tensors_of(tree):
            got, wrong = f"{name} of type {type(tree).__name__}", f"{what} has no tensors"
            expected = f"{size} samples in tensors; of a numpy array, torch.from_numpy makes one"
        raise UserError(wrong, expected=expected, got=got, place=place)


def check_dataset_size(workload: Workload, num_samples: int) -> None:
    """Raises `ParamsError`, or `UserError`, if images, or another dataset, are too few for a global batch."""
    if workload.dataset is None or len(workload.dataset) >= num_samples:
        return
    if isinstance(workload.dataset, ImageFolder):
        raise ParamsError(
            f"a global batch needs {plural(num_samples, 'image')}, but only {len(workload.dataset)} "
            "can be used: `images` has too few, or `max_images` is too small"
        )
    expected = f"at least one global batch, {plural(num_samples, 'sample')}"
    got, place = plural(len(workload.dataset), "sample"), place_of(workload.dataset, users_only=True)
    raise UserError("the dataset is too small", expected=expected, got=got, place=place)
