"""Tensors of simulated devices: each holds a CPU tensor, and its operators also cost virtual time and memory.

A subclass of Tensor rather than a dispatch mode, since torch runs the backward pass, and DataParallel its
replicas, in threads of their own, and a mode is known to one thread only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.sim.backend.devices import Device, devices, meet
from tests.sim.machine import KIND

aten = torch.ops.aten

ONLY_MEMORY = {
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
}
"""Operators that allocate or rename memory and launch no kernel; views, which don't either, say so."""
WAITS = {aten.nonzero, aten.masked_select, aten._unique2}
"""Operators whose result's shape the host must know."""
PINNED = "is_pinned_for_sim"
"""Attribute of CPU tensors in what copies take to be page-locked memory."""


class Allocation:
    """The memory of one storage; given back when the last tensor that uses it is gone."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.nbytes = device, 0
        device.memory.take(nbytes)
        self.nbytes = nbytes

    def __del__(self) -> None:
        self.device.memory.give_back(self.nbytes)


allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()
"""By the address of the storage."""


class SimTensor(Tensor):
    """A tensor on `sim:INDEX`.

    For torch's C++ all are on `sim:0`: a device guard that is written in Python has one device. So this class
    answers itself what depends on the index.
    """

    raw: Tensor
    position: int
    """Of its device. `Tensor.index` is something else."""
    allocation: Allocation

    @staticmethod
    def __new__(cls, raw: Tensor, index: int) -> SimTensor:
        tensor: SimTensor = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(KIND, 0),
        )
        tensor.raw, tensor.position, tensor.allocation = raw, index, allocation_of(raw, index)
        return tensor

    def __init__(self, raw: Tensor, index: int) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(KIND, self.position)

    def get_device(self) -> int:
        return self.position

    def record_stream(self, stream: object) -> None:
        """Memory is given back in the host's order, whatever streams use it."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `Tensor.to`, which would take all devices for one."""
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(
            *args, **{key: value for key, value in kwargs.items() if key != "copy"}
        )
        if device is None or device.type != KIND:
            return super().to(*args, **kwargs)
        stays = index_of(device) == self.position and dtype in (None, self.dtype)
        if stays and not kwargs.get("copy", False):
            return self
        options = {"dtype": dtype, "device": device, "non_blocking": non_blocking}
        return aten._to_copy(self, memory_format=memory_format, **options)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.raw!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            from tests.sim.backend.collectives import run_collective

            return run_collective(func, args)
        if func._overloadpacket in COPIES:
            return COPIES[func._overloadpacket](*args, **(kwargs or {}))
        return run_operator(func, args, kwargs or {})


def allocation_of(raw: Tensor, index: int) -> Allocation:
    """The allocation of its storage, which is new unless another tensor uses the storage already."""
    storage = raw.untyped_storage()
    allocation = allocations.get(storage._cdata)
    if allocation is None:
        allocation = allocations[storage._cdata] = Allocation(devices()[index], storage.nbytes())
    return allocation


def index_of(device: torch.device | None) -> int:
    """The index of a device; without one that of the current device."""
    return current.index if device is None or device.index is None else device.index


class Current(threading.local):
    """The current device of each thread."""

    index = 0


current = Current()


def raw_of(value: Any) -> Any:
    return value.raw if isinstance(value, SimTensor) else value


def run_operator(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes on the CPU, allocates what is new, and submits the kernel."""
    leaves = tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, SimTensor)]
    device = devices()[place(func, leaves, kwargs)]
    raw_args, raw_kwargs = tree_map(raw_of, (args, kwargs))
    if raw_kwargs.get("device") is not None:
        raw_kwargs["device"] = torch.device("cpu")
    out = func(*raw_args, **raw_kwargs)
    by_raw = {id(tensor.raw): tensor for tensor in given}
    wrapped = tree_map(lambda leaf: wrap(leaf, by_raw, device.index), out)
    if not (func.is_view or func._overloadpacket in ONLY_MEMORY):
        device.launch_kernel(func, raw_args, raw_kwargs, out)
    is_value = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)) and out is not None
    if is_value or func._overloadpacket in WAITS:
        device.synchronize()
    return wrapped


def wrap(leaf: Any, by_raw: dict[int, SimTensor], index: int) -> Any:
    """An output: one of the operator's inputs where it is changed in place, else a new tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    return by_raw[id(leaf)] if id(leaf) in by_raw else SimTensor(leaf, index)


def place(func: Any, leaves: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The index of the device on which an operator runs.

    Raises:
        RuntimeError: its tensors are on several devices.
    """
    found = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and not is_number(leaf)}
    if len(found) > 1:
        names = " and ".join(sorted(map(str, found)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {names} ({func})")
    wanted = kwargs.get("device")
    if wanted is not None:
        return index_of(wanted)
    return next(leaf.position for leaf in leaves if isinstance(leaf, SimTensor))


def is_number(tensor: Tensor) -> bool:
    """Whether it is a scalar on the CPU, which any device may read."""
    return tensor.dim() == 0 and not isinstance(tensor, SimTensor)


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between host and device, between devices, or on one device."""
    raw_of(target).copy_(raw_of(source))
    charge_copy(target, source, non_blocking)
    return target


def to_copy(source: SimTensor, *, device: torch.device | None = None, **kwargs: Any) -> Tensor:
    """A copy on another device, of another type, or both."""
    non_blocking = kwargs.pop("non_blocking", False)
    kwargs.pop("pin_memory", None)
    raw = aten._to_copy(source.raw, **kwargs)
    to_host = device is not None and device.type != KIND
    target = raw if to_host else SimTensor(raw, source.position if device is None else index_of(device))
    charge_copy(target, source, non_blocking)
    return target


def copy_from(source: Tensor, target: SimTensor, non_blocking: bool = False) -> Tensor:
    """`torch.tensor(..., device="sim")` comes here: its constructor hides the class from dispatch."""
    return copy_(target, source, non_blocking)


def charge_copy(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Submits a copy; the host waits for it unless it may go on, which pageable memory doesn't allow.

    Source: aten/src/ATen/native/cuda/Copy.cu, `copy_kernel_cuda` and `copy_device_to_device`: between devices
    the source's stream copies, and both streams wait for each other.
    """
    ends = [devices()[tensor.position] for tensor in (source, target) if isinstance(tensor, SimTensor)]
    first, last = ends[0], ends[-1]
    meet(ends)
    if len(ends) == 2 and first is last:
        first.launch(first.model.slowdown * first.machine.kernel_ns.get("copy_", 0))
        return
    end_ns = first.launch(first.copy_ns(source.nbytes), last.compute.tail_ns)
    last.compute.wait_until(end_ns)
    runs_on = non_blocking and (isinstance(source, SimTensor) or is_pinned(source))
    if len(ends) == 1 and not (runs_on and isinstance(target, SimTensor)):
        first.host.wait_until(end_ns)
        first.check()


COPIES: dict[Any, Any] = {aten.copy_: copy_, aten._to_copy: to_copy}


def pin_memory(tensor: Tensor, device: object = None) -> Tensor:
    """A copy that `is_pinned`."""
    copied = tensor.clone()
    setattr(copied, PINNED, True)
    return copied


def pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory with `pin_memory=True`, for which torch would ask a real device's driver."""

    @wraps(factory)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = factory(*args, **kwargs)
        if pin_memory:
            setattr(tensor, PINNED, True)
        return tensor

    return made


def is_pinned(tensor: Tensor, device: object = None) -> bool:
    return getattr(tensor, PINNED, False)


def empty(size: Sequence[int], *, device: torch.device | None = None, **kwargs: Any) -> SimTensor:
    return SimTensor(torch.empty(size, **without_placement(kwargs)), index_of(device))


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, device: torch.device | None = None, **kwargs: Any
) -> SimTensor:
    return SimTensor(torch.empty_strided(size, stride, **without_placement(kwargs)), index_of(device))


def without_placement(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("layout", "pin_memory")}


def register() -> None:
    """What torch's factories, which have no tensor as argument, call on the device."""
    for name, kernel in (
        ("aten::empty.memory_format", empty),
        ("aten::empty_strided", empty_strided),
        ("aten::_copy_from", copy_from),
    ):
        torch.library.impl(name, KIND)(kernel)
    Tensor.pin_memory = pin_memory  # type: ignore[method-assign, assignment]
    Tensor.is_pinned = is_pinned  # type: ignore[method-assign, assignment]
    torch.empty_like = pinning(torch.empty_like)
