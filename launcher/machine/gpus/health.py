"""Whether a GPU is well, and what its links can carry, as NVML reports it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.machine.gpus.nvml import VISIBLE, ask, load_nvml, parent_of, visible_handles

UNCORRECTED, SINCE_START = 1, 0
"""Source: `nvmlMemoryErrorType_t` and `nvmlEccCounterType_t` of the NVML API reference."""
NVLINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
"""The rate of a link in one direction, by the number of its version (`nvmlNvlinkVersion_t`).

Source: NVIDIA's white papers: P100 160 GB/s by 4 links of both directions, V100 300 by 6, A100 600 by 12,
H100 900 by 18, B200 1,800 by 18.
"""
PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""The rate of a lane in one direction, by generation. Source: PCI Express Base Specification."""


@dataclass(frozen=True)
class GpuHealth:
    """One GPU. What the driver doesn't report is `None`."""

    ecc_errors: int | None = None
    """Errors of its memory since the driver was loaded that ECC could not correct."""
    needs_reset: bool | None = None
    """Whether rows of its memory wait for a reset to be replaced."""
    has_lost_rows: bool | None = None
    """Whether rows of its memory could not be replaced, since none are left to replace them."""
    nvlink_gb_per_s: float | None = None
    """One NVLink, in one direction."""
    pcie_lanes: int | None = None
    max_pcie_lanes: int | None = None
    """The most that card and slot have in common."""
    pcie_generation: int | None = None
    """The newest that card and slot have in common: an idle link may run at an older one."""

    @property
    def pcie_gb_per_s(self) -> float | None:
        """In one direction, over the lanes in use."""
        per_lane = PCIE_GB_PER_S.get(self.pcie_generation or 0)
        return per_lane * self.pcie_lanes if per_lane and self.pcie_lanes else None


def inspect_health(
    indices: Sequence[int], environ: Mapping[str, str], binding: Any = None
) -> tuple[GpuHealth, ...]:
    """The health of the visible GPUs at `indices`; of a MIG instance that of its whole GPU.

    Args:
        indices: as `Gpu.index`.
        environ: as `inspect_nvidia_gpus` takes it.
        binding: an object with pynvml's functions; by default pynvml itself.
    """
    nvml, unknown = binding or load_nvml(), tuple(GpuHealth() for _ in indices)
    if nvml is None:
        return unknown
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return unknown
    try:
        handles = visible_handles(nvml, environ.get(VISIBLE))
        return tuple(_health(nvml, handles[i]) if i < len(handles) else GpuHealth() for i in indices)
    except nvml.NVMLError:  # a driver that has failed since it was loaded
        return unknown
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, handle: Any) -> GpuHealth:
    parent = parent_of(nvml, handle)
    gpu = handle if parent is None else parent
    rows = ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    return GpuHealth(
        ecc_errors=ask(nvml, "nvmlDeviceGetTotalEccErrors", gpu, UNCORRECTED, SINCE_START),
        needs_reset=None if rows is None else bool(rows[2]),
        has_lost_rows=None if rows is None else bool(rows[3]),
        nvlink_gb_per_s=NVLINK_GB_PER_S.get(ask(nvml, "nvmlDeviceGetNvLinkVersion", gpu, 0) or 0),
        pcie_lanes=ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", gpu),
        max_pcie_lanes=ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", gpu),
        pcie_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", gpu),
    )
