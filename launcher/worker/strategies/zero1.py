"""ZeRO stage 1 on DistributedDataParallel: each rank updates its part of the weights.

A module of its own: `torch.distributed.optim` takes 0.4 s of CPU to import, in every rank.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from gpurun.launcher.worker.strategies.ddp import Ddp


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """A workload's optimizer, reduced to this rank's part of its parameters.

    Its state is that of this part, also in `state_dict`: torch's own would gather the state of all ranks.
    """

    communicates = True
    """Whether a step ends with the broadcasts of what each rank has updated."""

    def __init__(self, whole: Optimizer) -> None:
        """Takes over `whole`, before its first step, with its options by group."""

        def own_part(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
            own = {parameter for group in groups for parameter in group["params"]}
            kept = {parameter: value for parameter, value in whole.state.items() if parameter in own}
            whole.param_groups, whole.state = groups, defaultdict(dict, kept)
            return whole

        super().__init__(whole.param_groups, own_part, **whole.defaults)  # type: ignore[arg-type]
        self.state = whole.state

    def _sync_params(self) -> None:
        if self.communicates:
            super()._sync_params()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = self.optim.state_dict()
        return own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)
        self.state = self.optim.state
        for shown, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            shown.update({name: value for name, value in own.items() if name != "params"})


class Zero1(Ddp):
    """One rank's replica, and its part of the optimizer."""

    updates: ShardedOptimizer | None = None

    def optimizer(self, whole: Optimizer) -> ShardedOptimizer:
        self.updates = ShardedOptimizer(whole)
        return self.updates

    @contextmanager
    def alone(self) -> Iterator[None]:
        with super().alone():
            assert self.updates is not None
            self.updates.communicates = False
            try:
                yield
            finally:
                self.updates.communicates = True
