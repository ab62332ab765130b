"""What a simulated device does, step by step, in one process; `test_sim_devices` reads what this prints.

A process of its own, since a backend changes torch for good.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from gpurun.launcher.worker.accelerators.clock import EventClock, StepTiming
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import is_out_of_memory
from tests.sim.backend.devices import Device, devices
from tests.sim.machine import VARIABLE, DeviceModel, MachineModel

FIRST, SECOND = torch.device("sim", 0), torch.device("sim", 1)
KERNELS = 5


def on(machine: MachineModel) -> list[Device]:
    """New devices of such a machine."""
    os.environ[VARIABLE] = json.dumps(asdict(machine))
    devices.cache_clear()
    return devices()


def timed(machine: MachineModel, num_steps: int = 3) -> list[StepTiming]:
    """Steps of so many kernels each, by the clock that times training."""
    on(machine)
    x = torch.zeros(8, device=FIRST)
    clock = runtime_of(FIRST).clock(FIRST)
    assert isinstance(clock, EventClock)
    clock.start()
    for _ in range(num_steps):
        for _ in range(KERNELS):
            x += 1
        clock.mark("forward")
        clock.end_step()
    return clock.read()


def steps_ns(machine: MachineModel) -> list[int]:
    return [step.step_ns for step in timed(machine)]


def host_ahead(depth: int) -> list[int]:
    """The host's clock after each of six launches of 100 ns."""
    (device, *_) = on(MachineModel(kernel_ns={"add_": 100}, queue_depth=depth))
    x, found = torch.zeros(8, device=FIRST), []
    device.synchronize()
    for _ in range(6):
        x += 1
        found.append(device.host.now_ns)
    return found


def stamps() -> list[int | None]:
    """A moment is in the future until the host has waited."""
    on(MachineModel(kernel_ns={"add_": 70}))
    stamped, x = runtime_of(FIRST).stamps(FIRST), torch.zeros(8, device=FIRST)
    start = stamped.now()
    x += 1
    end = stamped.now()
    before = stamped.elapsed_ns(start, end)
    stamped.wait()
    return [before, stamped.elapsed_ns(start, end)]


def memory() -> dict[str, Any]:
    """Two tensors, a view of one, and a third that doesn't fit until the first is gone."""
    (device, *_) = on(MachineModel(devices=(DeviceModel(memory_bytes=1000),)))
    runtime = runtime_of(FIRST)
    a, b = torch.zeros(100, device=FIRST), torch.zeros(100, device=FIRST)
    view, message = a[50:], ""
    try:
        torch.zeros(51, device=FIRST)
    except torch.OutOfMemoryError as error:
        message = str(error) if is_out_of_memory(error) else ""
    peak, allocated = runtime.peak_bytes(FIRST), device.memory.allocated_bytes
    del a
    with_view = device.memory.allocated_bytes
    del view
    c = torch.zeros(150, device=FIRST)
    runtime.reset_peak(FIRST)
    held = device.memory.allocated_bytes
    assert runtime.used_devices() == [FIRST]
    del b, c
    found = {"peak": peak, "allocated": allocated, "with view": with_view, "held": held}
    return {**found, "message": message, "left": device.memory.allocated_bytes}


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def fault() -> list[str]:
    """The third launch fails; whoever only submits work doesn't notice."""
    on(MachineModel(devices=(DeviceModel(fault_at_launch=3),)))
    x = torch.zeros(8, device=FIRST)  # which fills it: the first launch
    runtime = runtime_of(FIRST)
    stamped = runtime.stamps(FIRST)
    start = stamped.now()
    submitting = raised(lambda: x.add_(1).add_(1).add_(1))
    end = stamped.now()
    asking, waiting = (
        raised(lambda: stamped.elapsed_ns(start, end)),
        raised(lambda: runtime.synchronize(FIRST)),
    )
    return [submitting, asking, waiting, raised(lambda: x.sum().item())]


def two_devices() -> dict[str, Any]:
    """A copy between devices takes both; tensors of two devices don't meet otherwise."""
    first, second = on(MachineModel(kernel_ns={"add_": 1000}, copy_ns=10, copy_byte_ns=2))
    x, y = torch.zeros(8, device=FIRST), torch.zeros(8, device=SECOND)
    x += 1
    moved = x.to(SECOND, non_blocking=True)
    ends_ns = [first.compute.tail_ns, second.compute.tail_ns]
    mixed = raised(lambda: moved + x), raised(lambda: x + torch.zeros(8))
    return {
        "ends": ends_ns,
        "hosts": [first.host.now_ns, second.host.now_ns],
        "devices": [str(t.device) for t in (x, y, moved, moved.to(SECOND), torch.ones_like(y), moved + y)],
        "mixed": mixed,
        "values": (moved + 1).cpu().tolist()[:2],
        "waited": second.host.now_ns,
    }


def copies() -> dict[str, int]:
    """The host waits for a copy from pageable memory, not from page-locked memory."""
    (device, *_) = on(MachineModel(copy_ns=10, copy_byte_ns=2))
    pageable = torch.zeros(8)
    torch.empty_like(pageable, pin_memory=True).copy_(pageable).to(FIRST, non_blocking=True)
    runs_on = device.host.now_ns
    pageable.to(FIRST, non_blocking=True)
    return {"pinned": runs_on, "pageable": device.host.now_ns}


def main() -> None:
    fast, slow = MachineModel(kernel_ns={"add_": 100}), DeviceModel(slowdown=3)
    found = {
        "device bound": steps_ns(MachineModel(kernel_ns={"add_": 100}, launch_ns=30)),
        "launch bound": steps_ns(MachineModel(kernel_ns={"add_": 100}, launch_ns=130)),
        "slow": steps_ns(MachineModel(devices=(slow,), kernel_ns={"add_": 100}, launch_ns=130)),
        "phases": [step.phases_ns for step in timed(fast, 1)],
        "shallow": host_ahead(2),
        "deep": host_ahead(1024),
        "stamps": stamps(),
        "memory": memory(),
        "fault": fault(),
        "two devices": two_devices(),
        "copies": copies(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
