"""The CPU: a device is a share of the host's cores, and its memory is the process's."""

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from gpurun.launcher.machine.process_tree import status_number
from gpurun.launcher.worker.accelerators.clock import Clock, HostClock, Stamps
from gpurun.launcher.worker.accelerators.runtime import Runtime


class CpuStamps:
    """`time.perf_counter_ns`."""

    device = torch.device("cpu")

    def now(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ns(self, start: int, end: int) -> int | None:
        return end - start

    def wait(self) -> None:
        pass


class CpuRuntime(Runtime):
    """Work on the CPU is done when its call returns: there is nothing to wait for."""

    activities = (ProfilerActivity.CPU,)

    def is_initialized(self) -> bool:
        return True

    def clock(self, device: torch.device) -> Clock:
        return HostClock()

    def stamps(self, device: torch.device) -> Stamps:
        return CpuStamps()

    def used_devices(self) -> Sequence[torch.device]:
        return (CpuStamps.device,)

    def reset_peak(self, device: torch.device) -> None:
        # "5" resets the high-water mark of the resident set. Source: Linux, proc(5).
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # a container may forbid it; the peak is then that of the process so far
            return

    def peak_bytes(self, device: torch.device) -> int | None:
        """Resident memory of the process at its peak."""
        return status_number(Path("/proc/self"), "VmHWM") * 1024 or None

    def limit_memory(self, device: torch.device, num_bytes: int) -> None:
        """The process may grow by so many: it runs out of memory before the machine does."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.get_rng_state()

    @contextmanager
    def forked_random_state(self, device: torch.device) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):  # which always includes the CPU
            yield
