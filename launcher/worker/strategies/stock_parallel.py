"""`torch.nn.DataParallel` with any split: its scatter takes chunk sizes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, parallel_apply
from torch.nn.parallel._functions import Scatter

from gpurun.launcher.worker.base.nested import Tree, split_rows, tensors_of, with_tensors
from gpurun.launcher.worker.strategies.threads import ThreadState


class StockDataParallel(DataParallel[nn.Module]):
    """torch's class for GPUs, but for how the batch is cut and which replicas run."""

    chunks: Sequence[int] = ()

    def forward(self, inputs: Tree, chunks: Sequence[int]) -> Tree:
        """Outputs of all samples on the first device; device i computes `chunks[i]` of them, maybe none."""
        self.chunks = chunks
        return super().forward(inputs)

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Each device's inputs; every tensor is cut by the same sizes, so no rows are lost."""
        parts = split_rows(inputs, self.chunks)
        columns = [self.scatter_tensor(tensor, device_ids) for tensor in tensors_of(inputs)]
        rows = zip(*columns, strict=True)
        return [with_tensors(part, row) for part, row in zip(parts, rows, strict=True)], [{} for _ in parts]

    def scatter_tensor(self, tensor: Tensor, device_ids: Sequence[Any]) -> Sequence[Tensor]:
        """The tensor's samples by device; one without dimensions goes to all."""
        if tensor.dim():
            pieces: Sequence[Tensor] = Scatter.apply(device_ids, list(self.chunks), 0, tensor)  # type: ignore[no-untyped-call]
            return pieces
        kind = self.src_device_obj.type
        return [tensor.to(torch.device(kind, index), non_blocking=True) for index in device_ids]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Outputs of the replicas that got samples."""
        used = [i for i, size in enumerate(self.chunks) if size]
        state = ThreadState.current()
        calls: list[Any] = [partial(call_replica, replicas[i], state, i) for i in used]
        return parallel_apply(calls, [inputs[i] for i in used], None, [self.device_ids[i] for i in used])


def call_replica(replica: Callable[..., Tree], state: ThreadState, index: int, *inputs: Any) -> Tree:
    """One replica's outputs, computed in the state of the thread that called the model."""
    with state.restored(index):
        return replica(*inputs)
