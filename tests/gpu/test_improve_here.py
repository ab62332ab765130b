"""`gpurun improve` where remedies are for GPUs: pinned memory, TF32, channels_last, the fused optimizer."""

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu import slow_program
from gpurun.launcher.rundir.improvement import NO_TIME
from tests.gpu.machine import LONGEST_S, Devices, Report
from tests.integration.command import gpurun, write

CONVOLUTIONS = "workload: resnet56\ndevices: {devices}\nglobal_batch: {batch}\n"
OPTIONS = ("--numerics", "--quiet", "--json", "--out", "found")


def searched(directory: Path, report: Report, budget: str, *words: str) -> dict[str, Any]:
    """Each remedy that was found, by its code; none of them failed."""
    line = ("improve", *OPTIONS, "--budget", budget, *words)
    found = gpurun(directory, *line, timeout_s=LONGEST_S).ended().json["improve"]
    report.found(f"improve {found['name']}", str(found["gain"]))
    for each in found["remedies"]:
        report.found(each["code"], f"{each['verdict']} {each['percent']} {each['ci']} {each['why']}")
        assert each["verdict"] != "failed", each
    return {each["code"]: each for each in found["remedies"]}


def hold(remedies: dict[str, Any], code: str, devices: Devices, *, is_for_gpus: bool) -> None:
    """It was tried, or had no time; without a GPU it says so."""
    found = remedies[code]
    if is_for_gpus and not devices.is_gpu:
        assert (found["verdict"], found["why"]) == ("not tried", "for GPUs only")
    else:
        assert found["verdict"] != "not tried" or found["why"] == NO_TIME, found


def test_remedies_of_a_program(devices: Devices, report: Report, tmp_path: Path) -> None:
    write(tmp_path, "train.py", Path(slow_program.__file__).read_text())
    names = ",".join(json.loads(devices.first(devices.count)))
    small = () if devices.is_gpu else ("--", "--width", "32", "--layers", "4", "--batch", "16")
    found = searched(
        tmp_path, report, "4m" if devices.is_gpu else "75s", "train.py", "--devices", names, *small
    )
    hold(found, "DataLoader(pin_memory=True)", devices, is_for_gpus=True)
    hold(found, 'torch.set_float32_matmul_precision("high")', devices, is_for_gpus=True)
    hold(found, "Adam(fused=True, foreach=False)", devices, is_for_gpus=False)


def test_remedies_of_a_workload(devices: Devices, report: Report, tmp_path: Path) -> None:
    batch = 64 if devices.is_gpu else 2
    job = CONVOLUTIONS.format(devices=devices.first(devices.count), batch=batch * devices.count)
    write(tmp_path, "job.yaml", job)
    found = searched(tmp_path, report, "4m" if devices.is_gpu else "90s", "job.yaml")
    hold(found, "channels_last: true", devices, is_for_gpus=False)
    hold(found, "precision: tf32", devices, is_for_gpus=True)
    hold(found, "optimizer: fused", devices, is_for_gpus=False)
