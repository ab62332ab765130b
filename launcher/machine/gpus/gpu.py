"""GPUs as the launcher sees them, whatever driver reported them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

BUSY_GIB = 1.0
"""A process that holds less on a GPU is a monitor or an idle server."""
BUSY_PERCENT = 10
BUSY_SHARE = 0.1
"""The share of a GPU's memory: in a container the processes that hold it may not be listed."""
HOT_BY_HARDWARE = "too hot (slowed down by its hardware)"
HOT_BY_DRIVER = "too hot (slowed down by the driver)"


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
    processes: tuple[GpuProcess, ...] | None
    """`None` where the driver doesn't list them."""
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
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, `(9, 0)`."""
    unusable: str | None = None
    """Why the installed torch can't use it, and what to do about it."""

    @property
    def busy_with(self) -> str | None:
        """The work of other processes on it, if it is enough to affect measurements; `None`: it is free."""
        users = [process for process in self.processes or () if (process.used_gib or 0.0) >= BUSY_GIB]
        if users:
            names = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in users)
            return f"{names} uses {sum(process.used_gib or 0.0 for process in users):.1f} GiB"
        if self.looks_utilised:
            return f"it is {self.utilisation_percent} % utilised"
        if self.used_gib and self.memory_gib and self.used_gib >= BUSY_SHARE * self.memory_gib:
            return f"{self.used_gib:.1f} of {self.memory_gib:.1f} GiB are in use"
        return None

    @property
    def looks_utilised(self) -> bool:
        """Whether it has work, though no process of any size is known to hold it.

        The driver averages over up to a second, so that what has just ended counts too; not where the driver
        lists the processes, and there is none.
        """
        sizes = [process.used_gib or 0.0 for process in self.processes or ()]
        return (
            self.processes != ()
            and max(sizes, default=0.0) < BUSY_GIB
            and (self.utilisation_percent or 0) >= BUSY_PERCENT
        )


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a driver reports. Without a driver there are no GPUs, which is no error."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA version that the driver supports, as `13.0`."""
    nvml_error: str | None = None
    """Why the driver gave no answer although its library is there."""
    notes: tuple[str, ...] = ()
    """Other notes: GPUs that can't be opened, in which order they are counted."""


def unknown(*_: object) -> None:
    """The answer of a sensor that isn't there."""


@dataclass(frozen=True)
class Sensors:
    """The driver's sensors of one GPU; each function returns `None` where it doesn't know."""

    energy_mj: Callable[[], int | None] = unknown
    """Millijoules since the driver was loaded; the counter advances every few tens of milliseconds."""
    hot_ns: Callable[[], int | None] = unknown
    """Time since the driver was loaded in which heat kept the clock down."""
    throttling: Callable[[], str | None] = unknown
    """Why the clock is low now, if it is."""
    mean_clock_mhz: Callable[[int], float | None] = unknown
    """The SM clock's mean since a time in µs since 1970; the clock now where no samples are kept."""
    power_w: Callable[[], float | None] = unknown
    """Power drawn now."""
    pcie_link: Callable[[], tuple[int, int] | None] = unknown
    """Generation and lanes that its PCIe link has now; an idle one may be at an older generation."""
