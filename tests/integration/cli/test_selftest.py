"""`gpurun selftest` on CPU devices: every check runs here but those of GPUs alone."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.selftest.check_table import CHECKS
from gpurun.launcher.selftest.evidence import MACHINE
from tests.integration.command import gpurun


def test_every_check_of_cpu_devices_is_ok(tmp_path: Path) -> None:
    """Also where other processes use the cores: then the devices' speed isn't judged."""
    result = gpurun(tmp_path, "selftest", "--devices", "cpu:2", "--out", "run", "--json")
    assert result.code == 0, result.out + result.err
    checks = {check["name"]: check for check in result.json["checks"]}
    assert list(checks) == [check.name for check in CHECKS]
    assert all(set(check) == {"name", "status", "found", "remedy"} for check in checks.values())
    skipped = {name for name, check in checks.items() if check["status"] != "ok"}
    of_gpus = {check.name for check in CHECKS if check.only_gpus}
    assert of_gpus | {"speed as before"} <= skipped <= of_gpus | {"speed as before", "device speed"}
    assert json.loads((tmp_path / "run/selftest.json").read_text()) == result.json
    assert [line.partition(":")[0] for line in result.err.splitlines()] == [f"{n} of 5" for n in range(1, 6)]


@pytest.mark.parametrize("wish", ["cuda", "cuda:0"])
def test_without_a_gpu_the_checks_of_gpus_fail_with_a_remedy(tmp_path: Path, wish: str) -> None:
    """A driver is hidden from this process, so that it is so on any machine."""
    result = gpurun(tmp_path, "selftest", "--devices", wish, env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 3
    assert "FAILED   visible devices   CUDA_VISIBLE_DEVICES= leaves 0 GPUs visible" in result.out
    assert "unset CUDA_VISIBLE_DEVICES" in result.out
    assert "checks failed" in result.err.splitlines()[-1]
    (kept,) = (tmp_path / "runs/selftest").glob("*/selftest.json")
    assert (tmp_path / "runs/selftest/latest").read_text().strip() == kept.parent.name


def test_ctrl_c_leaves_no_process_and_what_was_found(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpurun", "selftest", "--devices", "cpu:2", "--out", "run", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "1 of 5: devices and links …\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "gpurun: interrupted by Ctrl-C; what was measured before is kept\n")
    kept = json.loads((tmp_path / "run/selftest.json").read_text())["checks"]
    assert [check["name"] for check in kept] == [check.name for check in CHECKS if check.part == MACHINE]
