"""The job's precision: the type of the weights, the type of computation, and the rounding error to expect."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from gpurun.launcher.machine.accelerators import ACCELERATORS
from gpurun.launcher.worker.accelerators.runtime import runtime_of_kind
from gpurun.launcher.worker.base.nested import Tree, map_tensors


@dataclass(frozen=True)
class Precision:
    """One of fp64, fp32, tf32, bf16 and fp16; the last two are autocast over fp32 weights."""

    name: str
    weights: torch.dtype
    autocast_dtype: torch.dtype | None
    max_gradient_error: float
    """Relative difference between two ways of summing one gradient above which rounding doesn't explain it.

    About 25 units of roundoff of the type that is computed in (2⁻⁸ for bf16, 2⁻¹¹ for fp16 and tf32), since
    errors of many terms add up as a random walk; more for fp32 and fp64, as no wrong weight is that small.
    """

    def apply(self) -> None:
        """Sets what float32 matrix products of this process compute in."""
        for kind in ACCELERATORS:
            runtime_of_kind(kind).allow_tf32(self.name == "tf32")

    def prepare_model(self, model: nn.Module) -> None:
        """Casts the weights, in place, and sets what float32 matrix products compute in."""
        self.apply()
        if self.weights == torch.float64:
            model.double()

    def cast(self, tree: Tree) -> Tree:
        """Inputs or targets as the weights need them: float64 where the weights are, else unchanged."""
        if self.weights != torch.float64:
            return tree
        return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward pass, its loss included."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would underflow without a scaled loss."""
        return self.autocast_dtype == torch.float16


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp64", torch.float64, None, 1e-9),
        Precision("fp32", torch.float32, None, 1e-4),
        Precision("tf32", torch.float32, None, 1.2e-2),
        Precision("bf16", torch.float32, torch.bfloat16, 1e-1),
        Precision("fp16", torch.float32, torch.float16, 1.2e-2),
    )
}
