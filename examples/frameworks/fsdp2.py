"""A loop like torchtitan's: FSDP2, dict batches of a stream, and a model that returns its loss.

    gpurun run fsdp2.py --devices cpu:2

Plain PyTorch that knows nothing of gpurun.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 40
VOCABULARY, WIDTH = 64, 16


class Tokens(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Every rank's own part of an endless stream."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            tokens = torch.randint(VOCABULARY, (9,), generator=generator)
            yield {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.flatten(0, 1))  # not flattened afterwards: FSDP2 warns of outputs that are views
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten()), "logits": logits}


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = Model().to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    batches = iter(torch.utils.data.DataLoader(Tokens(), batch_size=4))
    for _ in range(STEPS):
        batch = {name: tensor.to(kind) for name, tensor in next(batches).items()}
        model(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("world size", dist.get_world_size(), "steps", STEPS)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
