"""The machine that a run happens on, and its topology: what `gpurun devices` shows and `host.json` keeps."""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.launcher import __version__
from gpurun.launcher.machine import read_numbers, read_text
from gpurun.launcher.machine.accelerators import inspect_gpus
from gpurun.launcher.machine.gpus.gpu import Gpus
from gpurun.launcher.machine.resource_limits import UNLIMITED_BYTES, cgroup_directories
from gpurun.launcher.units import GIB

PACKAGES = ("torch", "numpy", "tensorboard", "nvidia-ml-py")
"""Distributions whose versions a result may depend on."""
UTILISATION_S = 1.0
"""Seconds over which drivers average a GPU's utilisation, at most.

Source: `nvmlDeviceGetUtilizationRates` of the NVML API reference.
"""


@dataclass(frozen=True)
class Topology:
    """The part of the machine that this process may use. Empty where sysfs has no answer."""

    nodes: Mapping[int, tuple[int, ...]]
    """NUMA node → its hardware threads, as Linux numbers them."""
    cores: tuple[tuple[int, ...], ...]
    """Hardware threads by physical core."""

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for cpus in self.nodes.values() for cpu in cpus))


@dataclass(frozen=True, kw_only=True)
class Machine(Gpus):
    """The resources that this process may use, in a container or under `taskset` fewer than there are."""

    hostname: str
    cpu_model: str
    cpu_cores: int
    """Usable ones, by affinity and by the cgroup's quota; hardware threads."""
    memory_gib: float
    """The cgroup's limit if it is below the machine's memory."""
    memory_available_gib: float
    topology: Topology
    free_cores: int | None = None
    """Usable cores that other processes leave; `None`: not measured."""
    has_mps: bool = False
    """Whether NVIDIA's MPS lets processes compute on one GPU at once."""


MPS, MPS_DEFAULT = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
"""Where its daemon can be asked. Source: https://docs.nvidia.com/deploy/mps/, environment variables."""


def inspect_machine(
    nvml: Any = None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
    pause: Callable[[float], None] = time.sleep,
) -> Machine:
    """Inspects this machine.

    Args:
        nvml: an object with pynvml's functions; by default pynvml itself.
        environ: with the variables that limit which GPUs are visible.
        root: where `dev`, `proc` and `sys` are.
        pause: waits for so many seconds, before GPUs that look utilised are looked at again.
    """
    found = inspect_gpus(environ, root, nvml)
    if any(gpu.looks_utilised for gpu in found.gpus):
        pause(UTILISATION_S)
        found = with_second_look(found, inspect_gpus(environ, root, nvml))
    total, available = memory_bytes(root)
    gpus = tuple(replace(gpu, numa_node=gpu_node(gpu.bus, root)) for gpu in found.gpus)
    return Machine(
        **(vars(found) | {"gpus": gpus}),
        hostname=platform.node(),
        cpu_model=_cpu_model(root),
        cpu_cores=usable_cores(root),
        memory_gib=total / GIB,
        memory_available_gib=available / GIB,
        topology=inspect_topology(root=root),
        has_mps=(root / environ.get(MPS, MPS_DEFAULT).lstrip("/") / "control").exists(),
    )


def with_second_look(first: Gpus, second: Gpus) -> Gpus:
    """The second answer, with each GPU's lower utilisation of the two."""
    before = {gpu.uuid: gpu.utilisation_percent or 0 for gpu in first.gpus}
    lower = (
        replace(gpu, utilisation_percent=min(gpu.utilisation_percent or 0, before.get(gpu.uuid, 100)))
        for gpu in second.gpus
    )
    return replace(second, gpus=tuple(lower))


def host_record(machine: Machine) -> dict[str, Any]:
    """`host.json`: the machine, and what else a step time may depend on. Versions without importing."""
    return {
        **asdict(machine),
        "versions": {"python": platform.python_version(), **_versions()},
        "os": _os_name(),
        "kernel": platform.release(),
        "cpu_governor": read_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")) or None,
        "cpu_mhz": _cpu_mhz(Path("/")),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def software_of(machine: Machine) -> dict[str, str]:
    """Versions that a step time depends on: of Python, torch, gpurun, and of the driver if there is one."""
    versions = _versions()
    found = {"Python": platform.python_version(), "torch": versions["torch"], "gpurun": versions["gpurun"]}
    return {name: version for name, version in {**found, "driver": machine.driver}.items() if version}


def machine_id(root: Path = Path("/")) -> str:
    """Distinguishes machines of one name; empty where nothing does. The id itself is confidential.

    Source: machine-id(5).
    """
    written = read_text(root / "etc/machine-id")
    return hashlib.sha256(f"gpurun {written}".encode()).hexdigest()[:12] if written else ""


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process can keep busy: its affinity, cut by the cgroup's quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = min((cores, *_quotas(root)))
    return max(1, round(quota))


def has_own_quota(root: Path = Path("/")) -> bool:
    """Whether this process is alone in a cgroup that limits its CPU: a slower device on purpose.

    Waiting for such a quota looks like waiting for a core, but no other process competes for it.
    """
    directory = next(iter(cgroup_directories(root, "cpu")), None)
    if directory is None or len(read_text(directory / "cgroup.procs").split()) != 1:
        return False
    limits = (read_text(directory / name).partition(" ")[0] for name in ("cpu.max", "cpu.cfs_quota_us"))
    return any(limit.isdecimal() for limit in limits)


def _quotas(root: Path) -> list[float]:
    """Cores allowed by this process's cgroup and every one above it, in either version of cgroups."""
    quotas = []
    for directory in cgroup_directories(root, "cpu"):
        limit, _, period = read_text(directory / "cpu.max").partition(" ")
        if limit.isdecimal() and period.isdecimal():
            quotas.append(int(limit) / int(period))
        limit, period = (read_text(directory / f"cpu.cfs_{part}_us") for part in ("quota", "period"))
        if limit.isdecimal() and period.isdecimal():
            quotas.append(int(limit) / int(period))
    return quotas


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available, within the limits of its control groups.

    The kernel takes a group's page cache back as soon as the group needs memory, so that cache unused
    lately is available. Source: Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    figures = read_numbers(root / "proc/meminfo")
    total, available = (figures.get(name, 0) * 1024 for name in ("MemTotal", "MemAvailable"))
    for directory in cgroup_directories(root, "memory"):
        for limit_file, used_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = read_text(directory / limit_file), read_text(directory / used_file)
            if limit.isdecimal() and int(limit) < UNLIMITED_BYTES:
                taken = max(0, int(used or 0) - read_numbers(directory / "memory.stat").get(cache, 0))
                total = min(total, int(limit))
                available = min(available, max(0, int(limit) - taken))
    return total, available


def _cpu_model(root: Path) -> str:
    for line in read_text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _cpu_mhz(root: Path) -> float | None:
    """The mean over all cores, now."""
    lines = (line.partition(":") for line in read_text(root / "proc/cpuinfo").splitlines())
    clocks = [float(value) for key, _, value in lines if key.strip() == "cpu MHz"]
    return round(sum(clocks) / len(clocks), 1) if clocks else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _versions() -> dict[str, str | None]:
    from importlib import metadata  # 45 ms that `gpurun check` doesn't need to spend

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"gpurun": __version__} | {package: version(package) for package in PACKAGES}


def inspect_topology(allowed: Sequence[int] | None = None, root: Path = Path("/")) -> Topology:
    """The topology that the kernel reports.

    Args:
        allowed: hardware threads that may be used; by default those of this process's affinity.
        root: under which `sys` is looked up.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {
        int(node.name.removeprefix("node")): parse_cpus(read_text(node / "cpulist"))
        for node in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    reachable = {node: tuple(cpu for cpu in cpus if cpu in usable) for node, cpus in sorted(nodes.items())}
    cores = {_siblings(root, cpu, usable) for cpu in usable}
    return Topology(
        nodes={node: cpus for node, cpus in reachable.items() if cpus} or {0: tuple(usable)},
        cores=tuple(sorted(cores)),
    )


def gpu_node(bus: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device, `0000:1b:00.0`; `None` where there is one node only, or it isn't known.

    Source: Documentation/ABI/testing/sysfs-bus-pci, numa_node; −1 means that the firmware didn't say.
    """
    text = read_text(root / "sys/bus/pci/devices" / bus / "numa_node") if bus else ""
    return int(text) if text.isdecimal() else None


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` as 0, 1, 2, 3, 8.

    Source: Documentation/admin-guide/cputopology.rst.
    """
    cpus: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _siblings(root: Path, cpu: int, usable: Sequence[int]) -> tuple[int, ...]:
    text = read_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return tuple(sibling for sibling in parse_cpus(text) if sibling in usable) or (cpu,)
