"""What torch has in C++ for CUDA only and DataParallel needs: copies of a batch's parts, and of parameters.

Source: torch/csrc/cuda/comm.cpp, `scatter`, `gather` and `broadcast_coalesced`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from tests.sim.machine import KIND


def named(index: int | None) -> torch.device:
    return torch.device("cpu") if index in (None, -1) else torch.device(KIND, index)


def scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: Any = None,
) -> tuple[Tensor, ...]:
    """A part for each device; that of the tensor's own device is a view."""
    parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return tuple(part.to(named(index), non_blocking=True) for part, index in zip(parts, devices, strict=True))


def gather(tensors: Sequence[Tensor], dim: int = 0, destination: int | None = None) -> Tensor:
    """All in one on the destination, each copied to its place there."""
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape = [*tensors[0].shape[:dim], sum(sizes), *tensors[0].shape[dim + 1 :]]
    result = torch.empty(shape, dtype=tensors[0].dtype, device=named(destination))
    for place, tensor in zip(result.split(sizes, dim), tensors, strict=True):
        place.copy_(tensor, non_blocking=True)
    return result


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int = 10 << 20
) -> list[list[Tensor]]:
    """The tensors themselves for the first device; for the others, views of one copy per buffer."""
    outputs: list[list[Tensor]] = [list(tensors), *([] for _ in devices[1:])]
    for chunk in _take_tensors(tensors, buffer_size):
        flat = _flatten_dense_tensors(chunk)
        for index, copies in zip(devices[1:], outputs[1:], strict=True):
            copies += _unflatten_dense_tensors(flat.to(named(index), non_blocking=True), chunk)
    return outputs


def register() -> None:
    comm.scatter, comm.gather, comm.broadcast_coalesced = scatter, gather, broadcast_coalesced  # type: ignore[assignment]
