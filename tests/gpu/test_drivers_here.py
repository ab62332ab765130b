"""Whether torch, the driver and gpurun see the same GPUs."""

import pytest

from gpurun.launcher.machine.accelerators import accelerator_of, inspect_gpus
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.selftest.machine_checks import is_named
from tests.gpu.machine import Devices, Report, has_parts


def gpus_of(devices: Devices) -> tuple[Gpu, ...]:
    if not devices.is_gpu:
        pytest.skip("a rehearsal on CPU devices")
    import os

    gpus = inspect_gpus(os.environ).gpus
    if has_parts(gpus):
        pytest.skip("instances (MIG): torch doesn't count as many as the driver shows")
    return gpus


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
    variable = accelerator_of(devices.kind).visible_variable or ""
    code = (
        "import torch.cuda as c; print(*(c.get_device_properties(i).uuid for i in range(c.device_count())))"
    )
    visible = {variable: ",".join(gpu.uuid for gpu in reversed(gpus))}
    seen = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | visible, capture_output=True, text=True, check=True
    )
    found = seen.stdout.split()
    agree = len(found) == len(gpus) and all(map(is_named, found, reversed(gpus)))
    report.hold(
        {
            "name": f"UUIDs in {variable}",
            "status": "ok" if agree else "failed",
            "found": f"torch: {found}, driver: {visible[variable]}",
            "remedy": "gpurun would measure other GPUs than it names",
        }
    )
