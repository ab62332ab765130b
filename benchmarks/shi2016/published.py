"""Table 7 of Shi et al. 2016: seconds per mini-batch of seven networks in five frameworks.

Source: https://arxiv.org/abs/1608.07249; `README.md`, next to the data, says what was restored or left out.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = "https://arxiv.org/abs/1608.07249"

_HERE = Path(__file__).resolve().parent

NETWORKS: Mapping[str, str] = {
    "fcn_s": "FCN-S",
    "alexnet_s": "AlexNet-S",
    "resnet50": "ResNet-50",
    "fcn_r": "FCN-R",
    "alexnet_r": "AlexNet-R",
    "resnet56": "ResNet-56",
    "lstm": "LSTM",
}
"""Built-in workload → what the paper calls it."""

FRAMEWORKS = ("Caffe", "CNTK", "TensorFlow", "MXNet", "Torch")
CPUS = ("desktop CPU", "server CPU")
GPUS = ("GTX 980", "GTX 1080", "K80 (1 GK210)")

OTHER_WORK: Mapping[tuple[str, str], str] = {
    ("MXNet", "AlexNet-S"): "MXNet skipped conv4, conv5, fc6 and fc7",
    ("CNTK", "ResNet-56"): "CNTK ran ResNet-110",
    ("CNTK", "LSTM"): "CNTK counted its batch in tokens: 1/32 of the work",
}
"""Framework and network → why that row is not what it says. Source: the benchmark's configuration files."""

UNUSABLE = "do not use"
"""In the note of a cell that is an outlier or a misprint."""


@dataclass(frozen=True)
class Cell:
    """One published time."""

    framework: str
    network: str
    device: str
    threads: int | None
    """Of a CPU; `None` for a GPU."""
    batch: int
    seconds: float | None
    """Per mini-batch; `None` where the cell can't be read."""
    is_exact: bool
    """Whether the source has it exactly as here, or a digit or the decimal point was restored."""
    note: str

    @property
    def other_work(self) -> str | None:
        """Why this is not a time of the network that it names, if it isn't."""
        return OTHER_WORK.get((self.framework, self.network))

    @property
    def is_readable(self) -> bool:
        """Whether there is a time, and it is no misprint."""
        return self.seconds is not None and UNUSABLE not in self.note

    @property
    def is_usable(self) -> bool:
        """Whether it may be ranked."""
        return self.is_readable and self.other_work is None


@dataclass(frozen=True)
class Scaling:
    """What the paper says of a constant batch on several K80s."""

    network: str
    gpus: int
    global_batch: int
    batch_per_gpu: int
    framework: str
    speedup: str
    """Over one GPU, in the words of the source; empty where no figure survives."""


def table7() -> tuple[Cell, ...]:
    """All cells, in the order of the file."""
    return tuple(_cell(row) for row in _rows("table7.csv"))


def scaling() -> tuple[Scaling, ...]:
    """All lines on several GPUs."""
    return tuple(
        Scaling(
            network=row["network"],
            gpus=int(row["gpus"]),
            global_batch=int(row["global_batch"]),
            batch_per_gpu=int(row["batch_per_gpu"]),
            framework=row["framework"],
            speedup=row["speedup_vs_1gpu_reported"],
        )
        for row in _rows("multigpu.csv")
    )


def fastest(cells: Iterable[Cell]) -> Cell | None:
    """The shortest time that may be ranked."""
    usable = [cell for cell in cells if cell.is_usable]
    return min(usable, key=lambda cell: cell.seconds or 0.0, default=None)


def _cell(row: Mapping[str, str]) -> Cell:
    seconds, threads = row["seconds_per_minibatch"], row["threads_or_gpu"]
    return Cell(
        framework=row["framework"],
        network=row["network"],
        device=row["device"],
        threads=int(threads) if threads.isdecimal() else None,
        batch=int(row["batch_size"]),
        seconds=float(seconds) if seconds else None,
        is_exact=row["confidence"] == "exact",
        note=row["note"],
    )


def _rows(name: str) -> list[dict[str, str]]:
    with (_HERE / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
