"""The `sim` backend of torch.distributed: gloo carries data and stamps, the end is computed.

A collective begins when the last rank arrives, and takes a latency and its bytes. What gloo exchanges for
itself, on the CPU, sets all hosts to the latest of their clocks: they have waited for each other.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Work
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from tests.sim.backend.devices import Device, devices
from tests.sim.backend.tensor import SimTensor
from tests.sim.machine import KIND

all_reduce, all_gather, broadcast = dist.all_reduce, dist.all_gather, dist.broadcast
"""torch's own: those that a process calls are `aligning` ones."""
works: set["SimWork"] = set()
"""Those that have not been waited for: torch's C++ keeps only its own half of a work alive."""


class SimWork(Work):
    """A collective whose end is known, though it lies in the virtual future."""

    def __init__(self, device: Device, end_ns: int, tensors: Any) -> None:
        super().__init__()
        self.device, self.end_ns, self.tensors = device, end_ns, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Has the current stream wait, not the host; as NCCL's does."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        self.device.compute.wait_until(self.end_ns)
        works.discard(self)

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.tensors)
        return future


def latest(stamp_ns: int) -> int:
    """The latest of all ranks' stamps."""
    stamp = torch.tensor([stamp_ns])
    all_reduce(stamp, op=dist.ReduceOp.MAX)
    return int(stamp)


def run_collective(func: Any, args: Sequence[Any]) -> Any:
    """One of the operators behind torch.distributed's functions, on tensors of this process's device.

    Raises:
        NotImplementedError: for those that DDP and gpurun don't use.
    """
    name = func._overloadpacket.__name__
    if name not in CARRIED:
        raise NotImplementedError(f"the simulated backend has no {name}")
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    device = devices()[0]
    device.num_collectives += 1
    end_ns = end_of(device, sum(tensor.nbytes for tensor in tree_leaves(tensors)))
    CARRIED[name](args)
    work = SimWork(device, end_ns, tensors)
    works.add(work)
    if torch._C._current_graph_task_id() != -1:
        # DDP's reducer waits for a future in C++, in a callback at the end of the backward pass, which can't
        # be seen from here. This callback is queued before that one.
        # Source: torch/csrc/distributed/c10d/reducer.cpp, `finalize_backward`.
        torch.autograd.Variable._execution_engine.queue_callback(work.synchronize)
    return work.boxed() if name == "barrier" else (args[0], work.boxed())


def end_of(device: Device, nbytes: int) -> int:
    """When a collective is done that is submitted now, behind the kernels that are submitted already."""
    device.host.spend(device.machine.launch_ns)
    arrival_ns = max(device.comm.tail_ns, device.compute.tail_ns, device.host.now_ns)
    return device.comm.submit(device.collective_ns(nbytes), latest(arrival_ns))


def carry_all_reduce(args: Sequence[Any]) -> None:
    for tensor in args[0]:
        all_reduce(tensor.raw, op=dist.ReduceOp(dist.ReduceOp.RedOpType(args[2].op())))


def carry_broadcast(args: Sequence[Any]) -> None:
    for tensor in args[0]:
        broadcast(tensor.raw, src=args[2])


def carry_all_gather(args: Sequence[Any]) -> None:
    for outputs, tensor in zip(args[0], args[1], strict=True):
        all_gather([output.raw for output in outputs], tensor.raw)


CARRIED: dict[str, Callable[[Sequence[Any]], None]] = {
    "allreduce_": carry_all_reduce,
    "broadcast_": carry_broadcast,
    "allgather_": carry_all_gather,
    "barrier": lambda args: None,  # the stamps are exchanged by one
}


def aligning(function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of CPU tensors after which all hosts have the same time."""

    @wraps(function)
    def aligned(*args: Any, **kwargs: Any) -> Any:
        done = function(*args, **kwargs)
        if not any(isinstance(leaf, SimTensor) for leaf in tree_leaves((args, kwargs))):
            host = devices()[0].host  # a rank that has peers has one device
            host.wait_until(latest(host.now_ns))
        return done

    return aligned


def create(common: Any, options: Any) -> FakeProcessGroup:
    """What torch registers for the devices. Python has no class that could be one: their tensors, which see
    every collective before it, call `run_collective`."""
    group: FakeProcessGroup = FakeProcessGroup._create_internal(  # type: ignore[call-arg]
        common.group_rank, common.group_size, options
    )
    return group


def register() -> None:
    dist.Backend.register_backend(KIND, create, extended_api=True, devices=[KIND])
    for function in (all_reduce, all_gather, broadcast):
        setattr(dist, function.__name__, aligning(function))
