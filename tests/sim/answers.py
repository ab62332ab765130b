"""What steps of a chain of layers take on simulated devices, on paper: nothing here runs anything.

A chain is `layers` linear layers of `width` without bias, and a loss that costs nothing. Its forward pass has
a matrix product per layer; its backward pass two, but one for the first layer, whose input needs no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.sim.machine import MachineModel

FLOAT = 4
"""Bytes."""


@dataclass(frozen=True)
class Chain:
    """A chain of layers on a machine. All times are in nanoseconds."""

    machine: MachineModel
    width: int
    layers: int
    buffer: int = 0
    """Bytes per sample that the forward pass takes at its start, and gives back."""

    @property
    def layer_bytes(self) -> int:
        return FLOAT * self.width**2

    @property
    def parameter_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def slowdown(self, device: int) -> int:
        return self.machine.devices[device].slowdown

    def product(self, device: int, samples: int) -> int:
        """One matrix product."""
        return self.slowdown(device) * 2 * samples * self.width**2 * self.machine.flop_ns

    def copy(self, nbytes: int) -> int:
        return self.machine.copy_ns + nbytes * self.machine.copy_byte_ns

    def rows(self, samples: int) -> int:
        """Bytes of inputs, of outputs or of targets."""
        return FLOAT * samples * self.width

    def h2d(self, samples: int) -> int:
        """Inputs and targets."""
        return 2 * self.copy(self.rows(samples))

    def forward(self, device: int, samples: int) -> int:
        return self.layers * self.product(device, samples)

    def backward(self, device: int, samples: int) -> int:
        return (2 * self.layers - 1) * self.product(device, samples)

    def optimizer(self, device: int) -> int:
        """SGD adds each parameter's gradient to it."""
        return self.slowdown(device) * self.layers * self.machine.kernel_ns.get("add_", 0)

    def reduce(self, nbytes: int) -> int:
        return self.machine.collective_ns + nbytes * self.machine.collective_byte_ns

    def single(self, samples: int) -> dict[str, int]:
        """The phases of a step on the first device."""
        return {
            "h2d": self.h2d(samples),
            "forward": self.forward(0, samples),
            "backward": self.backward(0, samples),
            "optimizer": self.optimizer(0),
        }

    def alone(self, device: int, samples: int) -> int:
        """A step of one rank of DDP without communication."""
        return self.h2d(samples) + self.passes(device, samples) + self.optimizer(device)

    def passes(self, device: int, samples: int) -> int:
        """Forward and backward of a replica of DataParallel."""
        return self.forward(device, samples) + self.backward(device, samples)

    def ddp(self, split: Sequence[int], layers_per_bucket: int | None = None) -> list[dict[str, int]]:
        """The phases of a step on each rank, where every step follows another one.

        A bucket's all-reduce begins when the last rank has its gradients, and after the bucket before it.
        Each rank's step begins where its own ended: by its own optimizer later than the last all-reduce.
        """
        per_bucket = layers_per_bucket or self.layers
        starts = [self.optimizer(device) for device in range(len(split))]
        begins = [start + self.h2d(n) for start, n in zip(starts, split, strict=True)]
        after_forward = [begin + self.forward(r, split[r]) for r, begin in enumerate(begins)]
        end = 0
        for last in range(per_bucket, self.layers + per_bucket, per_bucket):
            done = min(last, self.layers)
            products = 2 * done - (done == self.layers)
            ready = [at + products * self.product(r, split[r]) for r, at in enumerate(after_forward)]
            bucket = done - (last - per_bucket)
            end = max(end, *ready) + self.reduce(bucket * self.layer_bytes)
        return [
            {
                "h2d": self.h2d(n),
                "forward": self.forward(rank, n),
                "backward": end - after_forward[rank],
                "optimizer": self.optimizer(rank),
            }
            for rank, n in enumerate(split)
        ]

    def dp(self, split: Sequence[int]) -> dict[str, int]:
        """The phases of a step of DataParallel on two devices, as the first one sees them.

        Parameters and a part of the inputs go to the other device, outputs come back; then their gradients
        go there, and the parameters' come back.
        """
        other = self.copy(self.rows(split[1]))
        parameters = self.copy(self.parameter_bytes)
        forward = max(self.forward(device, n) for device, n in enumerate(split))
        backward = max(self.backward(device, n) for device, n in enumerate(split))
        return {
            "h2d": self.h2d(sum(split)),
            "forward": other + parameters + forward + other,
            "backward": other + backward + parameters,
            "optimizer": self.optimizer(0),
        }

    def peak(self, samples: int) -> int:
        """Bytes that tensors hold at the start of the forward pass, without a strategy's own."""
        return self.parameter_bytes + 2 * self.rows(samples) + samples * self.buffer

    def ddp_peak(self, samples: int) -> int:
        """With DDP's buckets, which hold a gradient of every parameter all the time."""
        return self.peak(samples) + self.parameter_bytes


CHAIN = """
    import torch
    from gpurun import Workload

    class Chain(torch.nn.Module):
        def __init__(self, width, layers, buffer):
            super().__init__()
            self.buffer = buffer
            chain = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
            self.layers = torch.nn.Sequential(*chain)

        def forward(self, x):
            torch.empty(len(x), self.buffer, dtype=torch.uint8, device=x.device)
            return self.layers(x)

    def build(width=4, layers=2, buffer=0):
        def batch(size, generator):
            x = torch.randn(size, width, generator=generator)
            return x, x + 1

        return Workload(Chain(width, layers, buffer), batch, loss=lambda y, t: (y - t).square().mean())
"""
"""A workload file with such a chain."""
