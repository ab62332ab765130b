"""Replicas of a model on the CPU, as `torch.nn.parallel.replicate` makes them on GPUs."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def replica_tensors(
    network: nn.Module, index: int, device: torch.device | None = None
) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
    """A replica's own parameters and buffers, by those of the network; on `device`, by default on the same.

    Replica 0 shares the network's memory, so what it updates in place is kept; the others get copies.
    """

    def own(tensor: Tensor) -> Tensor:
        mine = tensor.detach()
        return mine if index == 0 else mine.to(device or tensor.device, copy=True)

    parameters: dict[Tensor, Tensor] = {
        p: own(p).requires_grad_(p.requires_grad) for p in network.parameters()
    }
    buffers = {buffer: buffer if index == 0 else own(buffer) for buffer in network.buffers()}
    return parameters, buffers


def make_replica(
    network: nn.Module, parameters: Mapping[Tensor, Tensor], buffers: Mapping[Tensor, Tensor]
) -> nn.Module:
    """A shallow copy of the network's modules with other tensors; what modules share, their copies share."""
    copies: dict[nn.Module, nn.Module] = {
        module: module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for module in network.modules()
    }
    for module, replica in copies.items():
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                # As an attribute, not a parameter: a replica has none of its own. setattr, since recurrent
                # layers keep a second list of their weights that follows it.
                setattr(replica, name, parameters[parameter])
        for name, buffer in module._buffers.items():
            replica._buffers[name] = None if buffer is None else buffers[buffer]
    return copies[network]
