"""Whether torch, the driver and gpurun see the same GPUs, and whether their clocks agree."""

import time

import pytest

from gpurun.launcher.machine.accelerators import inspect_gpus
from gpurun.launcher.machine.gpus.gpu import Gpu
from tests.gpu.machine import Devices, Report

MATMUL = 4096
DIFFERENCE = 0.05
"""Between a device's clock and the host's, over half a second."""


def gpus_of(devices: Devices) -> tuple[Gpu, ...]:
    if not devices.is_gpu:
        pytest.skip("a rehearsal on CPU devices")
    import os

    return inspect_gpus(os.environ).gpus


def test_torch_can_use_the_gpus_that_the_driver_shows(devices: Devices, report: Report) -> None:
    """Fails, and doesn't skip: a person who asks for these tests on such a machine wants to know why."""
    import torch

    gpus = gpus_of(devices)
    usable = torch.cuda.is_available()
    why = next((gpu.unusable for gpu in gpus if gpu.unusable), None) or f"torch {torch.__version__} sees none"
    report.hold(
        {
            "name": "torch uses the driver's GPUs",
            "status": "ok" if usable and torch.cuda.device_count() == len(gpus) else "failed",
            "found": f"driver: {len(gpus)}, torch: {torch.cuda.device_count() if usable else why}",
            "remedy": "see `gpurun devices`",
        }
    )


def test_torch_numbers_them_as_gpurun_does_in_a_rank(devices: Devices, report: Report) -> None:
    """By UUID, with the variable that gpurun sets for a rank: torch itself may count in another order."""
    import os
    import subprocess
    import sys

    gpus = gpus_of(devices)
    code = (
        "import torch.cuda as c; print(*(c.get_device_properties(i).uuid for i in range(c.device_count())))"
    )
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in reversed(gpus))}
    seen = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | visible, capture_output=True, text=True, check=True
    )
    expected = [gpu.uuid.removeprefix("GPU-") for gpu in reversed(gpus)]
    report.hold(
        {
            "name": "UUIDs in CUDA_VISIBLE_DEVICES",
            "status": "ok" if seen.stdout.split() == expected else "failed",
            "found": f"torch: {seen.stdout.split()}, driver: {expected}",
            "remedy": "gpurun would measure other GPUs than it names",
        }
    )


def test_events_and_the_hosts_clock_agree(devices: Devices, report: Report) -> None:
    """A known product, long enough that its submission doesn't count."""
    import torch

    from gpurun.launcher.worker.accelerators.runtime import runtime_of

    for index in range(devices.count):
        device = torch.device(devices.name(index))
        runtime = runtime_of(device)
        clock, width = runtime.clock(device), MATMUL if devices.is_gpu else 256
        matrix = torch.ones(width, 256, device=device)
        work = matrix.T @ matrix
        repetitions = 0
        start_ns = time.perf_counter_ns()
        clock.start()
        while time.perf_counter_ns() - start_ns < 5e8:
            for _ in range(10):
                work = matrix.T @ matrix
            repetitions += 10
            runtime.synchronize(device)
        clock.end_step()
        (step,) = clock.read()
        host_ns = time.perf_counter_ns() - start_ns
        assert work.isfinite().all()
        off = abs(step.step_ns / host_ns - 1)
        report.hold(
            {
                "name": f"clock of {device}",
                "status": "ok" if off < DIFFERENCE else "failed",
                "found": f"{off:.2%} from the host's, {repetitions} products",
                "remedy": "step times of this device can't be believed",
            }
        )


def test_what_the_driver_says_of_a_gpu_that_works(devices: Devices, report: Report) -> None:
    """Figures that a driver may lack are named, not missing without a word."""
    import torch

    from gpurun.launcher.worker.meters.gpu_load import load_meter

    gpus_of(devices)
    all_devices = [torch.device(devices.name(index)) for index in range(devices.count)]
    meter = load_meter(all_devices)
    matrices = [torch.ones(MATMUL, MATMUL, device=device) for device in all_devices]
    meter.clear()
    start_ns = time.perf_counter_ns()
    with meter.counting():
        while time.perf_counter_ns() - start_ns < 1e9:
            products = [matrix @ matrix for matrix in matrices]
            for device in all_devices:
                torch.cuda.synchronize(device)
        meter.sample()
    assert len(products) == len(all_devices)
    for device, load in zip(all_devices, meter.loads(), strict=True):
        unknown = "not reported by this driver"
        report.found(
            f"{device} at work",
            f"clock {load.sm_clock_mhz or unknown} MHz, power {load.power_w or unknown} W, "
            f"peak {load.peak_bytes}, slowed down: {load.throttled or 'no'}",
        )
        assert (load.peak_bytes or 0) >= 2 * MATMUL * MATMUL * 4
    report.found("energy", f"{meter.energy_mj() or 'not reported by this driver'} mJ")
