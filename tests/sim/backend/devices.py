"""The devices of this process, and what work on them costs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tests.sim.clock import Host, Stream
from tests.sim.machine import DeviceModel, MachineModel, model_from, visible


@dataclass
class Memory:
    """What tensors hold on a device, in bytes: neither rounded up nor cached, unlike a real allocator's."""

    limit_bytes: int
    allocated_bytes: int = 0
    peak_bytes: int = 0

    def take(self, nbytes: int) -> None:
        """Raises `torch.OutOfMemoryError` where there is no room."""
        if self.allocated_bytes + nbytes > self.limit_bytes:
            free = self.limit_bytes - self.allocated_bytes
            raise torch.OutOfMemoryError(
                f"SIM out of memory. Tried to allocate {nbytes} bytes, {free} of {self.limit_bytes} are free"
            )
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def give_back(self, nbytes: int) -> None:
        self.allocated_bytes -= nbytes


@dataclass
class Device:
    """One device: a stream for kernels and copies, another one for collectives, and memory."""

    index: int
    model: DeviceModel
    machine: MachineModel
    number: int = 0
    """Of the machine's devices; `index` is that of this process."""
    host: Host = field(default_factory=Host)
    num_launches: int = 0
    num_collectives: int = 0
    compute: Stream = field(init=False)
    comm: Stream = field(init=False)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        depth = self.machine.queue_depth
        self.compute, self.comm = (Stream(self.host, self.index, depth) for _ in range(2))
        self.memory = Memory(self.model.memory_bytes)

    def launch(self, duration_ns: int, not_before_ns: int = 0) -> int:
        """Submits a kernel or a copy; returns when it will be done."""
        self.num_launches += 1
        self.host.spend(self.machine.launch_ns)
        return self.compute.submit(duration_ns, not_before_ns)

    def launch_kernel(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Submits what an operator computes."""
        self.launch(self.model.slowdown * kernel_ns(self.machine, func, args, kwargs, out))

    def copy_ns(self, nbytes: int) -> int:
        return self.machine.copy_ns + nbytes * self.machine.copy_byte_ns

    def collective_ns(self, nbytes: int) -> int:
        return self.machine.collective_ns + nbytes * self.machine.collective_byte_ns

    def synchronize(self) -> None:
        """The host waits for the device.

        Raises:
            RuntimeError: a launch before has failed.
        """
        self.compute.synchronize()
        self.comm.synchronize()
        self.check()

    def check(self) -> None:
        """Raises what a launch before has failed with: until the host waits it can't know."""
        if 0 < self.model.fault_at_launch <= self.num_launches:
            raise RuntimeError("SIM error: an illegal memory access was encountered")


def kernel_ns(machine: MachineModel, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """What an operator takes on a device that is not slowed down."""
    packet = func._overloadpacket
    flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
    return machine.kernel_ns.get(packet.__name__, 0) + flops * machine.flop_ns


@cache
def devices() -> list[Device]:
    """The devices that this process may use; known when it first needs one, after it was forked."""
    machine = model_from(os.environ)
    numbers = visible(os.environ)
    return [Device(index, machine.devices[number], machine, number) for index, number in enumerate(numbers)]


def meet(some: Sequence[Device]) -> None:
    """The threads that drive these devices have waited for each other, or one of them has begun the other."""
    now_ns = max(device.host.now_ns for device in some)
    for device in some:
        device.host.wait_until(now_ns)
