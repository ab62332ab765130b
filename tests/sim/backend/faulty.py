"""What ranks on simulated devices do wrong, by the faults of `tests.sim.faults`.

Their devices pass for NVIDIA's: a product takes real time, messages go by gloo, and the driver is asked.
"""

import gzip
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.worker.accelerators.clock import Clock, HostClock, Stamps
from gpurun.launcher.worker.accelerators.cpu import CpuStamps
from gpurun.launcher.worker.accelerators.runtime import StreamRuntime
from gpurun.workloads import micro_benchmarks
from tests.sim.backend import collectives
from tests.sim.backend.devices import devices
from tests.sim.backend.module import SimModule
from tests.sim.backend.runtime import SimRuntime
from tests.sim.backend.tensor import SimTensor
from tests.sim.faults import injected
from tests.unit.machine.fake_driver import UUIDS

PRODUCT_S = 0.0025
"""137 GFLOP, as fast as an H200 does them in float32."""
MESSAGE_S, SLOW_MESSAGE_S = 0.02, 0.1
"""Long against the moments that a busy machine keeps a rank waiting, so that links are alike on it, too."""
PRODUCTS = ("aten::mm", "aten::addmm")
REFUSED = "function cuptiActivityEnable failed with error CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"


class FaultyRuntime(SimRuntime):
    """Its devices are asked for their sensors, and their time is the host's."""

    def clock(self, device: torch.device) -> Clock:
        return HostClock()

    def stamps(self, device: torch.device) -> Stamps:
        return CpuStamps()

    def sensors(self, devices: Sequence[torch.device]) -> Sequence[Sensors]:
        return StreamRuntime.sensors(self, devices)


def has(fault: str, rank: int) -> bool:
    """Whether this process is the rank that has the fault."""
    return fault in injected() and os.environ.get("RANK") == str(rank)


def product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of the self-test's matrices nothing is computed."""

    @wraps(original)
    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        if out is None or not isinstance(out, SimTensor):
            return original(a, b, out=out)
        time.sleep(PRODUCT_S * devices()[out.position].model.slowdown)
        return out

    return mm


def properties(module: SimModule, device: torch.device) -> Any:
    """As `torch.cuda.get_device_properties`."""
    uuid = UUIDS[devices()[device.index].number]
    return SimpleNamespace(name="NVIDIA H200", uuid=uuid.removeprefix("GPU-"))


def reduce(original: Callable[[Sequence[Any]], None]) -> Callable[[Sequence[Any]], None]:
    def carry(args: Sequence[Any]) -> None:
        original(args)
        if has("wrong sum", 1) and args[0][0].numel() == 1023:
            args[0][0].raw[-1] += 1

    return carry


def with_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Groups of these devices also have gloo, which carries their data."""

    @wraps(original)
    def init(backend: str, *args: Any, **kwargs: Any) -> None:
        original("cpu:gloo,sim:sim" if backend == "sim" else backend, *args, **kwargs)

    return init


def send(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def carry(tensor: Tensor, peer: int) -> Any:
        if not isinstance(tensor, SimTensor):
            return original(tensor, peer)
        is_slow = {os.environ.get("RANK"), str(peer)} == {"0", "2"} and "slow link" in injected()
        time.sleep(SLOW_MESSAGE_S if is_slow else MESSAGE_S)
        return original(tensor.raw, peer)

    return carry


def killed(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        if has("rank killed", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    return init


refused: list[Any] = []
"""Profilers of this process that record no kernels. Another one uses CUPTI while the first trace is taken."""


def refuse(original: Callable[..., None]) -> Callable[..., None]:
    """Kineto says this on stderr, and records the CPU alone."""

    @wraps(original)
    def prepare(profiler: Any) -> None:
        if "profiler in use" in injected() and not refused:
            print(REFUSED, file=sys.stderr)
            refused.append(profiler)
        original(profiler)

    return prepare


def with_kernels(original: Callable[..., None]) -> Callable[..., None]:
    """Kineto adds what CUPTI has recorded: here a kernel for each product."""

    @wraps(original)
    def export(profiler: Any, path: str) -> None:
        original(profiler, path)
        if profiler not in refused:
            trace = json.loads(gzip.decompress(Path(path).read_bytes()))
            products = [each for each in trace["traceEvents"] if each.get("name") in PRODUCTS]
            for number, op in enumerate(products):
                trace["traceEvents"] += kernel(number, op)
            Path(path).write_bytes(gzip.compress(json.dumps(trace).encode()))

    return export


def kernel(number: int, op: Any) -> list[Any]:
    """The launch of a kernel within an operator, and the kernel itself, as Kineto writes them."""
    both = {"ph": "X", "ts": op["ts"], "dur": op["dur"]}
    both["args"] = {"device": 0, "stream": 7, "correlation": 1_000_000 + number}
    launch = {**both, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": op["pid"], "tid": op["tid"]}
    return [launch, {**both, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7}]


def register() -> None:
    micro_benchmarks.MIB = 1 << 10  # a thousandth of the bytes, which ranks measure by this module's words
    micro_benchmarks.powers = lambda first, last, factor: (1 << 12, 1 << 16)
    torch.mm = product(torch.mm)
    SimModule.get_device_properties = properties  # type: ignore[attr-defined]
    collectives.CARRIED["allreduce_"] = reduce(collectives.CARRIED["allreduce_"])
    dist.init_process_group = with_cpu(dist.init_process_group)
    dist.send, dist.recv = send(dist.send), send(dist.recv)
    DistributedDataParallel.__init__ = killed(DistributedDataParallel.__init__)  # type: ignore[method-assign]
    torch.profiler.profile.export_chrome_trace = with_kernels(torch.profiler.profile.export_chrome_trace)  # type: ignore[method-assign]
    torch.profiler.profile.prepare_trace = refuse(torch.profiler.profile.prepare_trace)  # type: ignore[method-assign]
