"""The load of a rank's GPUs during a block: memory, energy, clock, heat. None is read in a timed step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.rundir.records import GpuLoad
from gpurun.launcher.worker.accelerators.runtime import Runtime, runtime_of

HOT_SHARE = 0.01
"""The share of a block: less time at a clock that heat keeps down doesn't show in its steps."""
HOT = "too hot"


@dataclass
class GpuMeter:
    """One GPU, over the portions of a block."""

    runtime: Runtime
    device: torch.device
    sensors: Sensors
    now_ns: Callable[[], int] = time.perf_counter_ns
    elapsed_ns: int = 0
    energy_mj: float | None = 0.0
    hot_ns: int = 0
    retries: int = 0
    reason: str | None = None
    power_w: float | None = None
    clocks_mhz: list[float] = field(default_factory=list)

    def clear(self) -> None:
        """A block begins, and with it a new memory peak."""
        self.runtime.reset_peak(self.device)
        self.elapsed_ns, self.energy_mj, self.hot_ns, self.retries = 0, 0.0, 0, 0
        self.reason, self.power_w, self.clocks_mhz = None, None, []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what happens within it; at its end the GPU is done."""
        start_us = time.time_ns() // 1000  # the driver's samples have the time of day
        start_ns, retries = self.now_ns(), self.runtime.alloc_retries(self.device)
        hot_ns, energy_mj = self.sensors.hot_ns(), self.sensors.energy_mj()
        yield
        self.energy_mj = added(self.energy_mj, energy_mj, self.sensors.energy_mj())
        self.hot_ns += round(added(0.0, hot_ns, self.sensors.hot_ns()) or 0.0)
        self.elapsed_ns += self.now_ns() - start_ns
        self.retries += self.runtime.alloc_retries(self.device) - retries
        if clock_mhz := self.sensors.mean_clock_mhz(start_us):
            self.clocks_mhz.append(clock_mhz)

    def sample(self) -> None:
        """Reads the sensors while the GPU works: some of what its driver says holds for this moment only."""
        self.reason = self.sensors.throttling() or self.reason
        power_w = self.sensors.power_w() or 0.0
        self.power_w = power_w if power_w > 0 else self.power_w

    def load(self) -> GpuLoad:
        """The block so far."""
        is_hot = self.hot_ns > HOT_SHARE * self.elapsed_ns
        seconds = self.elapsed_ns / 1e9
        by_energy = self.energy_mj / 1e3 / seconds if self.energy_mj and seconds else None
        return GpuLoad(
            peak_bytes=self.runtime.peak_bytes(self.device),
            sm_clock_mhz=sum(self.clocks_mhz) / len(self.clocks_mhz) if self.clocks_mhz else None,
            power_w=self.power_w if by_energy is None else by_energy,
            throttled=self.reason or (HOT if is_hot else None),
            alloc_retries=self.retries,
        )


def added(total: float | None, before: float | None, after: float | None) -> float | None:
    """`total` plus the growth between two readings; `None` if one is missing, or the counter began again."""
    if total is None or before is None or after is None or after < before:
        return None
    return total + after - before


@dataclass
class LoadMeter:
    """All GPUs of a rank; none on the CPU, whose peak memory is its process's."""

    device: torch.device
    """The rank's, or the first of several."""
    gpus: Sequence[GpuMeter] = ()

    def clear(self) -> None:
        """A block begins."""
        for gpu in self.gpus:
            gpu.clear()
        if not self.gpus:
            runtime_of(self.device).reset_peak(self.device)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts a portion of the block, from where the GPUs are idle to where they are again."""
        with ExitStack() as stack:
            for gpu in self.gpus:
                stack.enter_context(gpu.counting())
            yield

    def sample(self) -> None:
        """Samples the GPUs' drivers while they work."""
        for gpu in self.gpus:
            gpu.sample()

    def loads(self) -> tuple[GpuLoad, ...]:
        """The loads by GPU."""
        return tuple(gpu.load() for gpu in self.gpus)

    def peak_bytes(self) -> int | None:
        """The largest peak of any GPU in bytes; on the CPU that of the process."""
        if not self.gpus:
            return runtime_of(self.device).peak_bytes(self.device)
        peaks = [gpu.runtime.peak_bytes(gpu.device) for gpu in self.gpus]
        return max((peak for peak in peaks if peak is not None), default=None)

    def energy_mj(self) -> float | None:
        """The energy of all GPUs together; `None` unless all count it."""
        known = [gpu.energy_mj for gpu in self.gpus if gpu.energy_mj is not None]
        return sum(known) if known and len(known) == len(self.gpus) else None


def load_meter(devices: Sequence[torch.device]) -> LoadMeter:
    """The meter of a rank with these devices, each of which may be named several times."""
    own = list(dict.fromkeys(devices))
    runtime = runtime_of(own[0])
    pairs = zip(own, runtime.sensors(own), strict=False)
    return LoadMeter(own[0], [GpuMeter(runtime, device, sensors) for device, sensors in pairs])
