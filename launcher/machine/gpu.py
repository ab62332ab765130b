"""GPUs as the launcher sees them, whatever driver reported them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30

BUSY_GIB = 1.0
"""A process that holds less on a GPU is a monitor or an idle server."""
BUSY_PERCENT = 10
BUSY_SHARE = 0.1
"""Of a GPU's memory: in a container the processes that hold it may not be listed."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. The name is `None` where it belongs to another container."""

    pid: int
    name: str | None
    used_gib: float | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use. What the driver doesn't report is `None`."""

    index: int
    """Counts the devices of its kind that this process may use: `cuda:INDEX` of a job file."""
    uuid: str
    """Names the same device in any order and container."""
    name: str
    memory_gib: float | None
    used_gib: float | None
    utilisation_percent: int | None
    processes: tuple[GpuProcess, ...]
    peer_links: Mapping[int, str]
    """Index of another GPU → `NVLink 18x`, or the way over PCIe."""
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None
    bus: str = ""
    """PCI address, `0000:1b:00.0`; of a MIG instance that of its GPU."""
    numa_node: int | None = None
    """The node that it is attached to; `None` where there is one only, or it isn't known."""
    kind: str = ""
    """Name of its row in `accelerators.ACCELERATORS`."""

    @property
    def busy_with(self) -> str | None:
        """What other processes do on it, if it is enough to affect measurements; `None`: it is free."""
        users = [process for process in self.processes if (process.used_gib or 0.0) >= BUSY_GIB]
        if users:
            names = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in users)
            return f"{names} uses {sum(process.used_gib or 0.0 for process in users):.1f} GiB"
        if (self.utilisation_percent or 0) >= BUSY_PERCENT:
            return f"it is {self.utilisation_percent} % utilised"
        if self.used_gib and self.memory_gib and self.used_gib >= BUSY_SHARE * self.memory_gib:
            return f"{self.used_gib:.1f} of {self.memory_gib:.1f} GiB are in use"
        return None


@dataclass(frozen=True)
class Gpus:
    """What a driver reports. Without a driver there are no GPUs, which is no error."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA version that the driver supports, as `13.0`."""
    nvml_error: str | None = None
    """Why the driver gave no answer although its library is there."""


@dataclass(frozen=True)
class EnergyMeter:
    """The energy counters of some GPUs; none where there are no GPUs, or their driver has no counter."""

    counters: Sequence[Callable[[], int | None]] = ()
    """Each returns the millijoules since the driver was loaded."""

    def read_mj(self) -> float | None:
        """The sum of the counters, in mJ; `None` unless all of them answer."""
        read = [counter() for counter in self.counters]
        known = [value for value in read if value is not None]
        return float(sum(known)) if known and len(known) == len(read) else None
