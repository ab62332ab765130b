"""Workloads as a rank loads them, of which tests know that they train."""

from pathlib import Path
from typing import Any

import torch

from gpurun import Workload
from gpurun.launcher.worker.training.load_workload import load_workload
from tests.known import known


def loaded(name: str, params: dict[str, Any], directory: Path = Path()) -> Workload:
    """No micro-benchmark."""
    workload = load_workload(name, params, directory)
    assert isinstance(workload, Workload)
    return workload


def draw(workload: Workload, size: int, seed: int = 0) -> Any:
    """A batch of so many samples."""
    return known(workload.batch)(size, torch.Generator().manual_seed(seed))
