"""What workers are told, by what matters to a test."""

from typing import Any

from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import (
    MaxBatchConfig,
    VariantConfig,
)


def launch_config(*variants: VariantConfig, **more: Any) -> LaunchConfig:
    """One of CPUs, as many as the variants' split has ranks, on one thread each.

    Args:
        more: fields that differ from that.
    """
    values: dict[str, Any] = {
        "launch": "l",
        "run_dir": ".",
        "workload": "w",
        "job_dir": ".",
        "params": {},
        "strategy": "single",
        "devices": ("cpu",) * (len(variants[0].split) if variants else 1),
        "backend": None,
        "precision": "fp32",
        "seed": 0,
        "threads": 1,
        "variants": variants,
        "baseline": None,
        "warmup": 1,
        "rounds": 1,
    }
    return LaunchConfig(**{**values, **more})


SETTINGS: dict[str, Any] = {"precision": "fp32", "params": {}}


def max_batch_config(**more: Any) -> MaxBatchConfig:
    """The search for one CPU's largest batch; `more` are fields that differ from that."""
    values: dict[str, Any] = {
        "workload": "mlp",
        "job_dir": ".",
        "settings": SETTINGS,
        "devices": ("cpu",),
        "index": 0,
        "num_devices": 1,
        "accumulate": 1,
        "keeps_gradients": False,
        "gradients_are_views": False,
        "seed": 0,
        "threads": 1,
        "limit_bytes": None,
        "attempts": "",
        "fits": 0,
        "fails": None,
    }
    return MaxBatchConfig(**{**values, **more})
