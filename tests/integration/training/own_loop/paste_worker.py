"""One of two ranks that run the lines which a report prints, unchanged; run by `test_paste.py`.

The weights after the last step go to DIRECTORY/RANK.pt, by case.
"""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, TensorDataset

from gpurun.launcher.report.snippet import in_lines, iterable, map_style
from gpurun.launcher.rundir.records import LossOver
from tests.integration.ranks import in_group
from tests.integration.training.own_loop.uneven_worker import SPLIT, new_model, samples
from tests.unit.compare.test_compare_summary import result
from tests.whole import IS_WHOLE

MASKED = -100
EPOCHS = 2
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


class Stream(IterableDataset[Any]):
    """The same samples, in their order."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


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
    assert in_lines(variant, own) == own.keys()
    loop = map_style(variant, own)
    if kind == "map-style":
        return loop
    body = textwrap.indent(textwrap.dedent(loop[loop.index("weights()):") + 12 :]), " " * 8)
    imports = loop[: loop.index("\n\n")].replace("UnevenBatches", "UnevenBatches, UnevenStream")
    return f"{imports}\n{iterable(variant).replace('        ...  # the same', body)}"


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
ALL_CASES: list[tuple[LossOver, str, str]] = [
    *((over, kind, "") for over in OVER for kind in ("map-style", "iterable")),
    *(("mean", "map-style", which) for which in OWN if which),
    ("mean", "iterable", "accumulate"),
    ("sum", "map-style", "accumulate"),
]
CASES = ALL_CASES if IS_WHOLE else ALL_CASES[:4]


def main(rank: int, directory: Path) -> None:
    with in_group(rank, 2, directory):
        found = {
            f"{over} {kind} {which}": trained(lines(over, kind, which), over, kind)
            for over, kind, which in CASES
        }
        torch.save(found, directory / f"{rank}.pt")
