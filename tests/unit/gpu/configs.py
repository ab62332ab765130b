"""Configurations of launches on GPUs that aren't there."""

from pathlib import Path
from typing import Any

from gpurun.launcher.rundir.records import LaunchConfig, VariantConfig


def launch(directory: Path, **changes: Any) -> LaunchConfig:
    fields: dict[str, Any] = {
        "launch": "01-ddp-2", "run_dir": str(directory), "workload": "mlp",
        "job_dir": str(directory), "params": {},
        "strategy": "ddp", "devices": ("cpu", "cpu"), "backend": "gloo", "precision": "fp32", "seed": 0,
        "threads": 1, "variants": (VariantConfig("a", (4, 4), 1),), "baseline": None, "warmup": 10,
        "rounds": 1,
    }  # fmt: skip
    return LaunchConfig(**{**fields, **changes})
