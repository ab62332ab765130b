"""One of two ranks that train with an uneven split: in loops of their own, and by the lines of a report.

Run by `test_own_loop.py`. Weights go to DIRECTORY/RANK.pt, by case: after every step of a loop, and after
the last of printed lines.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpurun.launcher.report import snippet
from gpurun.launcher.rundir.records import LossOver
from gpurun.uneven import UnevenBatches, UnevenStream
from tests.integration.ranks import in_group
from tests.unit.compare.test_compare_summary import result
from tests.whole import IS_WHOLE

SPLIT = (11, 3)
NUM_SAMPLES = 43
"""Three batches of 14, and one sample that rank 0 gets alone."""
EPOCHS = 2

Batch = tuple[tuple[Tensor, Tensor], float]


class Stream(IterableDataset[Any]):
    """The same samples, in their order."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def samples() -> TensorDataset:
    x = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x * torch.linspace(1, 4, NUM_SAMPLES).unsqueeze(1), x.sum(1).gt(0).long())


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def train(model: nn.Module, network: nn.Module, batches: Iterator[Batch]) -> list[Tensor]:
    """The weights after each step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    steps = []
    for (inputs, targets), weight in batches:
        optimizer.zero_grad()
        (weight * nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        steps.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).clone())
    return steps


def map_style(split: tuple[int, ...], rank: int) -> Iterator[Batch]:
    batches = UnevenBatches(samples(), split, rank, seed=3)
    loader = DataLoader(samples(), batch_sampler=batches)
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        yield from zip(loader, batches.weights(), strict=True)


def iterable(
    split: tuple[int, ...], rank: int, workers: int = 0
) -> Iterator[tuple[tuple[Tensor, Tensor], float]]:
    for _ in range(EPOCHS):
        yield from DataLoader(
            UnevenStream(Stream(samples()), split, rank), batch_size=None, num_workers=workers
        )


ALL_LOOPS: dict[str, Callable[[tuple[int, ...], int], Any]] = {
    "map-style": map_style,
    "iterable": iterable,
    "iterable, 2 workers": partial(iterable, workers=2),
}
LOOPS = ALL_LOOPS if IS_WHOLE else {"map-style": map_style}


# The lines that a report prints, unchanged


MASKED = -100
LEARNING_RATE = 0.05


def dataset(over: LossOver) -> TensorDataset:
    """Where targets count, every third and one whole part of rank 1 are masked."""
    inputs, targets = samples().tensors
    if over == "counted":
        targets = targets.clone()
        targets[::3] = targets[11:14] = MASKED
    return TensorDataset(inputs, targets)


def loss_function(over: LossOver) -> nn.Module:
    return nn.CrossEntropyLoss(reduction="sum" if over == "sum" else "mean", ignore_index=MASKED)


def count_targets(targets: Tensor) -> Tensor:
    return (targets != MASKED).sum()


OWN: dict[str, dict[str, Any]] = {
    "": {},
    "accumulate": {"accumulate": 3},
    "buckets": {"bucket_mb": 1, "gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "zero1": {"strategy": "zero1"},
    "all": {"strategy": "zero1", "accumulate": 2, "bucket_mb": 1},
}
"""What the variant has besides its split."""


def lines(over: LossOver, kind: str, which: str) -> str:
    """What is printed for the split; for an iterable dataset with the loop's body in place of `...`."""
    own = dict(OWN[which])
    variant = replace(result("ddp-a", SPLIT, 50.0), loss=over, strategy=own.pop("strategy", "ddp"))
    assert snippet.in_lines(variant, own) == own.keys()
    loop = snippet.map_style(variant, own)
    if kind == "map-style":
        return loop
    body = textwrap.indent(textwrap.dedent(loop[loop.index("weights()):") + 12 :]), " " * 8)
    imports = loop[: loop.index("\n\n")].replace("UnevenBatches", "UnevenBatches, UnevenStream")
    return f"{imports}\n{snippet.iterable(variant).replace('        ...  # the same', body)}"


def trained(code: str, over: LossOver, kind: str) -> Tensor:
    """The weights that the code comes to."""
    network, data = new_model(), dataset(over)
    names = {
        "dataset": data if kind == "map-style" else Stream(data),
        "model": DistributedDataParallel(network),
        "network": network,
        "optimizer_class": torch.optim.SGD,
        "optimizer_options": {"lr": LEARNING_RATE},
        "loss_function": loss_function(over),
        "count_targets": count_targets,
        "optimizer": torch.optim.SGD(network.parameters(), lr=LEARNING_RATE),
        "epochs": EPOCHS,
    }
    exec(code, names)
    return weights_of(network)


def weights_of(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


OVER: tuple[LossOver, ...] = ("mean", "sum", "counted")
ALL_LINES: list[tuple[LossOver, str, str]] = [
    *((over, kind, "") for over in OVER for kind in ("map-style", "iterable")),
    *(("mean", "map-style", which) for which in OWN if which),
    ("mean", "iterable", "accumulate"),
    ("sum", "map-style", "accumulate"),
]
LINES = ALL_LINES if IS_WHOLE else ALL_LINES[:4]


def main(rank: int, directory: Path) -> None:
    with in_group(rank, 2, directory):
        found: dict[str, Any] = {
            f"{over} {kind} {which}": trained(lines(over, kind, which), over, kind)
            for over, kind, which in LINES
        }
        for name, batches in LOOPS.items():
            network = new_model()
            found[name] = train(DistributedDataParallel(network), network, batches(SPLIT, rank))
        torch.save(found, directory / f"{rank}.pt")
