"""The highest rates that GPUs are sold with: what a model's FLOP utilisation is a share of.

Dense rates in TFLOP/s (10¹² per second), without sparsity, with float32 accumulation where that matters.
`fp32` and `fp64` are what torch computes in those precisions: `fp32` without tensor cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """One kind of GPU."""

    names: tuple[str, ...]
    """Words that must all stand in the name that the driver gives."""
    tflop_per_s: Mapping[str, float]
    """By precision."""


PEAKS = (
    # Source: NVIDIA H100 Tensor Core GPU Datasheet (2023): H100 NVL, half of the figures "with sparsity".
    Peak(("H100", "NVL"), {"bf16": 835.0, "fp16": 835.0, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0}),
    # Source: NVIDIA H100 Tensor Core GPU Architecture white paper (2022), table 2: H100 PCIe.
    Peak(("H100", "PCIe"), {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2, "fp64": 51.2}),
    # Source: the same, H100 SXM5.
    Peak(("H100",), {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}),
    # Source: NVIDIA H200 Tensor Core GPU Datasheet (2024): H200 NVL, half of the figures "with sparsity".
    Peak(("H200", "NVL"), {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0}),
    # Source: the same, H200 SXM; its chip is that of the H100 SXM5.
    Peak(("H200",), {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}),
    # Source: NVIDIA A100 Tensor Core GPU Architecture white paper (2020), table 1; all forms alike.
    Peak(("A100",), {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5}),
    # Source: NVIDIA Tesla V100 GPU Architecture white paper (2017), table 1: V100 SXM2.
    Peak(("V100", "SXM2"), {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8}),
    # Source: NVIDIA Tesla V100 datasheet (2018): V100 PCIe.
    Peak(("V100", "PCIE"), {"fp16": 112.0, "fp32": 14.0, "fp64": 7.0}),
    # Source: NVIDIA Tesla T4 datasheet (2019).
    Peak(("Tesla", "T4"), {"fp16": 65.0, "fp32": 8.1}),
    # Source: NVIDIA L40S datasheet (2023), figures without sparsity.
    Peak(("L40S",), {"bf16": 362.05, "fp16": 362.05, "tf32": 183.2, "fp32": 91.6}),
    # Source: NVIDIA A10 datasheet (2021), figures without sparsity.
    Peak(("A10",), {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}),
    # Source: NVIDIA Ada GPU Architecture white paper (2022), appendix A: RTX 4090, float32 accumulation.
    Peak(("RTX", "4090"), {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    # Source: NVIDIA Ampere GA102 GPU Architecture white paper (2020), appendix A: RTX 3090.
    Peak(("RTX", "3090"), {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}),
)
"""In the order in which they are tried: special forms before the usual one."""


def peak_flop_per_s(gpu_name: str, precision: str) -> float | None:
    """The peak of a GPU by the driver's name for it; `None` where it isn't known."""
    words = gpu_name.replace("-", " ").split()
    for peak in PEAKS:
        if all(name in words for name in peak.names):
            rate = peak.tflop_per_s.get(precision)
            return None if rate is None else rate * TERA
    return None


def total_peak_flop_per_s(gpu_names: Sequence[str | None], precision: str) -> float | None:
    """The peak of several GPUs together; `None` where one of them isn't known, or there is none."""
    peaks = [peak_flop_per_s(name, precision) if name else None for name in gpu_names]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None
