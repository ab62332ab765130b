"""Which devices of this machine a job means."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.topology import Topology
from gpurun.launcher.units import plural

Devices = str | tuple[str, ...]

_AUTO_CPU_DEVICES = 2
UUID_PREFIXES = ("GPU-", "MIG-")


class GpuLike(Protocol):
    """A GPU of this machine."""

    @property
    def uuid(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def busy_with(self) -> str | None: ...
    @property
    def numa_node(self) -> int | None: ...


class MachineLike(Protocol):
    """What planning has to know of a machine. `cuda:i` is `gpus[i]`."""

    @property
    def cpu_cores(self) -> int: ...
    @property
    def gpus(self) -> Sequence[GpuLike]: ...
    @property
    def topology(self) -> Topology: ...


def resolve_devices(devices: Devices, machine: MachineLike) -> tuple[str, ...]:
    """Names of the devices, `cpu:0`, `cpu:1`, … or `cuda:0`, …, in the order in which a split counts them.

    A CPU device is a share of the cores, so CPU devices are numbered by their position.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a GPU is asked for that is not there.
    """
    if devices == "auto":
        return (
            _free_gpus(machine) or _gpus(machine) or _cpus(max(1, min(_AUTO_CPU_DEVICES, machine.cpu_cores)))
        )
    if devices == "cuda":
        return _gpus(machine) or _refuse("`devices: cuda`", machine)
    if isinstance(devices, str):
        return _cpus(int(devices.removeprefix("cpu:")))
    devices = tuple(_by_position(name, machine) for name in devices)
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise SpecError("CPU and CUDA devices can't share a batch: name devices of one kind")
    if not is_cuda(devices):
        return _cpus(len(devices))
    missing = [name for name in devices if gpu_index(name) >= len(machine.gpus)]
    return devices if not missing else _refuse(f"the job asks for {', '.join(missing)}", machine)


def job_devices(spec: JobSpec, machine: MachineLike) -> tuple[str, ...]:
    """The devices that a job asks for.

    Raises:
        SpecError: as `resolve_devices`.
        MachineError: likewise, with the place in the job file.
    """
    try:
        return resolve_devices(spec.devices, machine)
    except MachineError as error:
        raise MachineError(str(spec.problem(("devices",), str(error)))) from error


def busy_notes(wish: Devices, devices: tuple[str, ...], machine: MachineLike) -> tuple[str, ...]:
    """Which GPUs `auto` has left out, and which of those that are used somebody else uses too."""
    notes = []
    for index, gpu in enumerate(machine.gpus):
        name = f"cuda:{index}"
        if gpu.busy_with and name in devices:
            notes.append(f"{name} is in use by others, which disturbs the times: {gpu.busy_with}")
        elif gpu.busy_with and wish == "auto":
            notes.append(f"{name} is left out, since others use it: {gpu.busy_with}")
    return tuple(notes)


def device_notes(devices: tuple[str, ...], machine: MachineLike) -> tuple[str, ...]:
    """What a person should know about these devices before they are measured."""
    shared = [name for name, count in Counter(devices).items() if count > 1]
    if shared:
        return (f"{', '.join(shared)} is shared by several ranks: NCCL refuses that, so DDP uses gloo",)
    if not is_cuda(devices) and len(devices) > machine.cpu_cores:
        cores = plural(machine.cpu_cores, "core")
        return (f"{len(devices)} CPU devices share {cores}: they slow each other down",)
    return ()


def is_cuda(devices: Sequence[str]) -> bool:
    """Whether these are GPUs; a job never mixes kinds."""
    return devices[0].startswith("cuda")


def gpu_index(name: str) -> int:
    """Position of `cuda:i` (`cuda:i@node`) among its machine's GPUs."""
    return int(name.partition("@")[0].partition(":")[2])


def _by_position(name: str, machine: MachineLike) -> str:
    """`cuda:i` for the UUID of a GPU or MIG instance, which may be cut short; other names as they are."""
    if not name.startswith(UUID_PREFIXES):
        return name
    found = [index for index, gpu in enumerate(machine.gpus) if gpu.uuid.startswith(name)]
    if len(found) == 1:
        return f"cuda:{found[0]}"
    uuids = "".join(f"\n    cuda:{index} is {gpu.uuid}" for index, gpu in enumerate(machine.gpus))
    what = "several GPUs begin with" if found else "no GPU that may be used here is"
    raise MachineError(f"`devices`: {what} {name}{uuids}")


def _free_gpus(machine: MachineLike) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index, gpu in enumerate(machine.gpus) if not gpu.busy_with)


def visible_gpus(devices: tuple[str, ...], machine: MachineLike) -> Mapping[str, str]:
    """UUIDs mean the same GPUs whatever order CUDA or an outer CUDA_VISIBLE_DEVICES counts in."""
    if not is_cuda(devices):
        return {"CUDA_VISIBLE_DEVICES": ""}
    distinct = dict.fromkeys(devices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[gpu_index(name)].uuid for name in distinct)}


def _gpus(machine: MachineLike) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(len(machine.gpus)))


def _cpus(count: int) -> tuple[str, ...]:
    return tuple(f"cpu:{index}" for index in range(count))


def _refuse(wish: str, machine: MachineLike) -> tuple[str, ...]:
    raise MachineError(f"{wish}, but {_inventory(machine)}\n    `gpurun devices` shows what is here")


def _inventory(machine: MachineLike) -> str:
    if not machine.gpus:
        return "this machine has no NVIDIA GPU that can be used; `devices: cpu:2` runs on its cores"
    names = [f"cuda:{index} ({gpu.name})" for index, gpu in enumerate(machine.gpus)]
    return f"this machine has {', '.join(names)}"
