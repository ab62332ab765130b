"""The content of a rank's memory when it is fullest: live bytes of tensors by part, over one untimed step.

Every operator of the step passes a dispatch mode, which notes when a storage appears and when it is freed.
What a storage is for may be known only later: a gradient is one once the backward pass is over. So parts are
looked up when the step has ended, and the notes are gone through once more to find the fullest moment.

Bytes are those of storages, on the CPU and on GPUs alike: without what an allocator rounds up or keeps, and
without what libraries allocate for themselves. A compiled model's kernels pass no dispatcher; nothing is
known about them.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from gpurun.launcher.rundir.records import MEMORY_PARTS, MemoryPart, MemoryPeak
from gpurun.launcher.worker.accelerators.runtime import runtime_of

COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of operators whose arguments are buffers of communication, unless they are something else."""

GATHERED: Mapping[str, tuple[str, MemoryPart]] = MappingProxyType(
    {
        "fsdp::split_with_sizes_copy": ("out", "parameters"),
        "fsdp::chunk_cat": ("tensors", "gradients"),
    }
)
"""Operators of FSDP, with an argument and what it is: whole parameters after their shards were gathered,
whole gradients before they are scattered.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""


StorageChange = tuple[int, int]
"""The number of a storage, in the order in which storages are seen, and the bytes by which it grows; it
shrinks where they are negative."""


def fullest(
    at_start: Mapping[int, int], changes: Iterable[StorageChange], part_of: Callable[[int], MemoryPart]
) -> dict[MemoryPart, int]:
    """Bytes by part at the first moment at which they add up to most.

    Args:
        at_start: bytes of the storages that are there before the changes.
        changes: in order.
        part_of: by a storage's number.
    """
    held: Counter[MemoryPart] = Counter()
    for storage, num_bytes in at_start.items():
        held[part_of(storage)] += num_bytes
    most, best = held.total(), dict(held)
    for storage, num_bytes in changes:
        held[part_of(storage)] += num_bytes
        if held.total() > most:
            most, best = held.total(), dict(held)
    return best


@dataclass
class MemoryLog:
    """Notes what happens to storages on devices of one type during a step; its phases end by `mark`."""

    device_type: str
    trained: Sequence[Tensor]
    """The model's parameters, whose `grad` are the gradients when a backward pass has ended."""
    changes: list[StorageChange] = field(default_factory=list)
    at_start: dict[int, int] = field(default_factory=dict)
    """Bytes of the storages that were there before the step."""
    devices: list[torch.device] = field(default_factory=list)
    """The device of each storage."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage now, or when it was freed."""
    parts: dict[int, MemoryPart] = field(default_factory=dict)
    of_optimizer: set[int] = field(default_factory=set)
    """Storages that only the optimizer has used so far."""
    is_optimizing: bool = False
    """Whether the last backward pass has ended: what is first used then was there before.
    What is first used in the model appears then. Gloo makes tensors that no operator is seen to make."""
    phase_begins: int = 0
    """Number of the first storage that was first seen in the phase that runs now."""
    alive: dict[int, tuple[int, object]] = field(default_factory=dict)
    """Number of each live storage by its address, with what calls `freed`."""
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    """Replicas of `dp` run in threads; one that numbers a storage may be the one that sees another freed."""

    def mark(self, phase: str) -> None:
        """A phase of the step ends, as in `PhaseClock`."""
        if phase == "backward":
            self.label([p.grad for p in self.trained if p.grad is not None], "gradients")
        if phase == "optimizer":
            self.of_optimizer.update(range(self.phase_begins, len(self.sizes)))
        self.phase_begins = len(self.sizes)
        self.is_optimizing = phase == "backward"

    def label(self, tensors: Any, part: MemoryPart) -> None:
        """Labels the storages of a tree of tensors; those not seen yet were there before the step."""
        for storage in storages_of(tensors):
            number = self.number(storage, is_new=False)
            if number is not None:
                known = self.parts.get(number, part)
                self.parts[number] = min(known, part, key=MEMORY_PARTS.index)

    def number(self, storage: torch.UntypedStorage, is_new: bool) -> int | None:
        """The storage's number; `None` on other devices. One not seen yet appears now, if `is_new`."""
        if storage.device.type != self.device_type:
            return None
        address = storage._cdata
        with self.lock:
            if address in self.alive:
                return self.alive[address][0]
            number, num_bytes = len(self.sizes), storage.nbytes()
            self.sizes.append(num_bytes)
            self.devices.append(storage.device)
            if is_new:
                self.changes.append((number, num_bytes))
            else:
                self.at_start[number] = num_bytes
            self.alive[address] = number, weakref.ref(storage, lambda _: self.freed(address))
            return number

    def freed(self, address: int) -> None:
        """The storage at `address` is no more."""
        number, _ = self.alive.pop(address)
        self.changes.append((number, -self.sizes[number]))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """The storage has another size than before."""
        number = self.number(storage, is_new=True)
        if number is not None and storage.nbytes() != self.sizes[number]:
            self.changes.append((number, storage.nbytes() - self.sizes[number]))
            self.sizes[number] = storage.nbytes()

    def end(self) -> None:
        """The step has ended: a known storage that outlives it was there before, as after any other step.

        DDP's buckets are first seen when gradients are copied to them.
        """
        kept = {number for number, _ in self.alive.values() if number in self.parts} - self.at_start.keys()
        self.at_start |= {number: self.sizes[number] for number in kept}
        self.changes = [change for change in self.changes if change[0] not in kept]

    def part_of(self, number: int) -> MemoryPart:
        """The part of a storage: if neither known nor the optimizer's, the model's (such as activations)."""
        return self.parts.get(number, "optimizer" if number in self.of_optimizer else "activations")

    def peak(self) -> MemoryPeak:
        """The peak of the device whose memory is fullest at some moment of the step."""
        peaks = [
            MemoryPeak(**self.fullest_of(device), reserved=reserved_bytes(device))
            for device in dict.fromkeys(self.devices)
        ]
        return max(peaks, key=lambda peak: peak.total, default=MemoryPeak())

    def fullest_of(self, device: torch.device) -> dict[MemoryPart, int]:
        """Bytes by part at the fullest moment of one device."""
        at_start = {number: size for number, size in self.at_start.items() if self.devices[number] == device}
        changes = (change for change in self.changes if self.devices[change[0]] == device)
        return fullest(at_start, changes, self.part_of)


def reserved_bytes(device: torch.device) -> int | None:
    """Bytes that the device's allocator holds; `None` where there is none, or the storages have no data."""
    return None if device.type == "meta" else runtime_of(device).reserved_bytes(device)


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a log every storage that an operator uses or makes."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = (args, kwargs or {})
        if func.namespace in COLLECTIVES:
            self.log.label(used, "communication")
        for storage in storages_of(used):
            self.log.number(storage, is_new=not self.log.is_optimizing)
        if func.name() in GATHERED:
            name, part = GATHERED[func.name()]
            self.log.label(kwargs[name] if kwargs and name in kwargs else args[0], part)
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            self.log.number(storage, is_new=True)
        return result


_active: list[MemoryLog] = []
"""The log of the step that is being measured, if there is one."""


def label(tensors: Any, part: MemoryPart) -> None:
    """States what a strategy's own tensors are for; it matters only while memory is measured."""
    for log in _active:
        log.label(tensors, part)


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Within it, what this thread does is noted, too: a mode holds in the thread that has entered it."""
    with ExitStack() as stack:
        for log in _active:
            stack.enter_context(StorageWatch(log))
        yield


@contextmanager
def watching(log: MemoryLog) -> Iterator[None]:
    """Within it, the log sees what happens, also in threads that `run_replicas` starts."""
    _active.append(log)
    try:
        with resizes_noted(log), in_this_thread():
            yield
    finally:
        _active.remove(log)


@contextmanager
def resizes_noted(log: MemoryLog) -> Iterator[None]:
    """FSDP frees and allocates the memory of gathered parameters by this method, which is no operator.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_common.py and _fsdp_param.py, `alloc_storage`.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        log.number(storage, is_new=False)
        result = original(storage, size)
        log.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def storages_of(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in a tree; of a DTensor those of its local one."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from _storages_of_tensor(leaf)


def _storages_of_tensor(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        yield from storages_of([getattr(tensor, name) for name in names])
    elif tensor.layout is torch.sparse_coo:
        yield from storages_of((tensor._indices(), tensor._values()))
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def peak_of_step(
    step: Callable[[MemoryLog], None], model: nn.Module, optimizer: torch.optim.Optimizer, device_type: str
) -> MemoryPeak:
    """The fullest moment of an optimizer step that marks its phases on the log.

    Args:
        step: runs it; several have run before, so that the optimizer's state and DDP's buckets exist.
        model: what is trained.
        optimizer: of its parameters.
        device_type: where the model is.
    """
    log = MemoryLog(device_type, tuple(model.parameters()))
    log.label((*model.parameters(), *model.buffers()), "parameters")
    log.label(list(optimizer.state.values()), "optimizer")
    with watching(log):
        step(log)
    log.end()
    return log.peak()
