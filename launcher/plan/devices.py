"""Which devices of this machine a job means."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from launcher.errors import MachineError, SpecError
from launcher.units import plural

Devices = str | tuple[str, ...]

_AUTO_CPU_DEVICES = 2


class GpuLike(Protocol):
    """A GPU of this machine."""

    @property
    def uuid(self) -> str: ...
    @property
    def name(self) -> str: ...


class MachineLike(Protocol):
    """What planning has to know of a machine. `cuda:i` is `gpus[i]`."""

    @property
    def cpu_cores(self) -> int: ...
    @property
    def gpus(self) -> Sequence[GpuLike]: ...


def resolve_devices(devices: Devices, machine: MachineLike) -> tuple[str, ...]:
    """Names of the devices, `cpu:0`, `cpu:1`, … or `cuda:0`, …, in the order in which a split counts them.

    A CPU device is a share of the cores, so CPU devices are numbered by their position.

    Raises:
        SpecError: CPU and CUDA devices are mixed.
        MachineError: a GPU is asked for that is not there.
    """
    if devices == "auto":
        return _gpus(machine) or _cpus(max(1, min(_AUTO_CPU_DEVICES, machine.cpu_cores)))
    if devices == "cuda":
        return _gpus(machine) or _refuse("`devices: cuda`", machine)
    if isinstance(devices, str):
        return _cpus(int(devices.removeprefix("cpu:")))
    if len({name.partition(":")[0] for name in devices}) > 1:
        raise SpecError("CPU and CUDA devices can't share a batch: name devices of one kind")
    if not is_cuda(devices):
        return _cpus(len(devices))
    missing = [name for name in devices if gpu_index(name) >= len(machine.gpus)]
    return devices if not missing else _refuse(f"the job asks for {', '.join(missing)}", machine)


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
