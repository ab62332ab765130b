"""A variant that was measured, by what matters to a test."""

from typing import Any

from gpurun.launcher.compare.figures.ranks import ExposedComm
from gpurun.launcher.compare.model import VariantResult


def measured(variant_id: str, split: tuple[int, ...], **more: Any) -> VariantResult:
    """One of `ddp` on CPUs, without figures.

    Args:
        more: fields of the result that differ from that.
    """
    values: dict[str, Any] = {
        "strategy": "ddp",
        "devices": tuple(f"cpu:{rank}" for rank in range(len(split))),
        "split_name": "",
        "global_batch": sum(split),
        "precision": "fp32",
        "accumulate": 1,
        "varied": {},
        "status": "ok",
        "reason": None,
        "log": None,
        "rounds": 1,
        "launches": 1,
        "step_ms": None,
        "vs_baseline": None,
        "scaling_efficiency": None,
        "gradient_error": None,
        "gradient_reference": None,
        "exposed_comm_ms": ExposedComm(),
        "ranks": (),
    }
    return VariantResult(**{"id": variant_id, "split": split, **values, **more})
