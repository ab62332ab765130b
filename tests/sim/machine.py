"""The simulated machine: what its devices cost, and the row that makes them a kind of device. No torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpurun.launcher.machine.accelerators import Accelerator
from gpurun.launcher.machine.gpus import nvml
from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus

KIND = "sim"
VISIBLE = "SIM_VISIBLE_DEVICES"
VARIABLE = "GPURUN_SIMULATED_MACHINE"
"""The machine as JSON, for the command and its ranks."""
UUID = "SIM-"
GIB = 1 << 30


@dataclass(frozen=True)
class DeviceModel:
    """What one device is like."""

    slowdown: int = 1
    """By which its kernels take longer than the machine's costs say; copies don't."""
    memory_bytes: int = GIB
    opens: int | None = None
    """Which device a process gets that asks for this one; `None`: this one."""
    fault_at_launch: int = 0
    """The launch, counted from 1, that fails: the host learns of it when it waits. 0: none."""


@dataclass(frozen=True)
class MachineModel:
    """A machine and what its work costs, in whole nanoseconds."""

    devices: tuple[DeviceModel, ...] = (DeviceModel(), DeviceModel())
    launch_ns: int = 0
    """What a launch takes of the host's time."""
    block_ms: float = 1.0
    queue_depth: int = 1024
    flop_ns: int = 1
    """What an operation of a matrix product takes; no other kernel has any that are counted."""
    kernel_ns: Mapping[str, int] = field(default_factory=dict)
    """What a kernel takes by name of its operator, apart from its operations."""
    copy_ns: int = 0
    """What every copy between host and device, or devices, takes apart from its bytes."""
    copy_byte_ns: int = 1
    collective_ns: int = 0
    """What every collective takes once all ranks have arrived, apart from its bytes."""
    collective_byte_ns: int = 1

    def environment(self) -> dict[str, str]:
        """What has a command simulate this machine."""
        here = Path(__file__).parent
        paths = [str(here / "site"), str(here.parents[1])]
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}


def model_from(environ: Mapping[str, str]) -> MachineModel:
    """The machine of this process; without the variable it has the default's two devices."""
    values: dict[str, Any] = json.loads(environ.get(VARIABLE, "{}"))
    devices = values.pop("devices", None)
    if devices is None:
        return MachineModel(**values)
    return MachineModel(tuple(DeviceModel(**device) for device in devices), **values)


def visible(environ: Mapping[str, str]) -> list[int]:
    """The numbers of the devices that this process may use, in its order."""
    model = model_from(environ)
    uuids = environ.get(VISIBLE, environ.get(nvml.VISIBLE))
    if uuids is None:
        return list(range(len(model.devices)))
    numbers = [int(uuid.rpartition("-")[2]) for uuid in uuids.split(",") if uuid]
    opened = (model.devices[number].opens for number in numbers)
    return [number if other is None else other for number, other in zip(numbers, opened, strict=True)]


def inspect(environ: Mapping[str, str], root: Path, binding: Any) -> Gpus:
    """The devices as a driver would report them."""
    return Gpus(tuple(gpu(index, model) for index, model in enumerate(model_from(environ).devices)))


def gpu(index: int, model: DeviceModel) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"{UUID}{index}",
        name=f"simulated device, {model.slowdown}x",
        memory_gib=model.memory_bytes / GIB,
        used_gib=0.0,
        utilisation_percent=0,
        processes=(),
    )


SIM = Accelerator(
    name=KIND,
    title="simulated",
    noun="simulated device",
    is_host=False,
    backend=KIND,
    interface_variable="GLOO_SOCKET_IFNAME",
    start_s=3.0,
    runtime="tests.sim.backend.runtime:SimRuntime",
    visible_variable=VISIBLE,
    uuid_prefixes=(UUID,),
    block_ms=model_from(os.environ).block_ms,
    inspect=inspect,
)
"""A row of the table as any other: no module of the product knows of it."""
