"""`gpurun selftest` on CPU devices: every check runs here but those of GPUs alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from gpurun.launcher.selftest.check_table import CHECKS
from tests.integration.command import Result, gpurun
from tests.sim.test_faults import TWENTY


def test_every_check_of_cpu_devices_is_ok(canonical_run: Callable[[str], Result]) -> None:
    """Also where other processes use the cores: then the devices' speed isn't judged."""
    result = canonical_run("selftest")
    assert result.code == 0, result.out + result.err
    checks = {check["name"]: check for check in result.json["checks"]}
    assert list(checks) == [check.name for check in CHECKS]
    assert all(
        set(check) == {"name", "status", "found", "remedy", "figures", "node", "host"}
        for check in checks.values()
    )
    skipped = {name for name, check in checks.items() if check["status"] != "ok"}
    of_gpus = {check.name for check in CHECKS if check.only_gpus}
    assert of_gpus | {"speed as before"} <= skipped <= of_gpus | {"speed as before", "device speed"}
    asleep = TWENTY["rank asleep"]
    assert asleep.words in checks[asleep.check]["found"]
    assert json.loads((result.directory / "run/selftest.json").read_text()) == result.json
    assert [line.partition(":")[0] for line in result.err.splitlines()] == [f"{n} of 5" for n in range(1, 6)]


def test_without_a_gpu_the_checks_of_gpus_fail_with_a_remedy(tmp_path: Path) -> None:
    """A driver is hidden from this process, so that it is so on any machine."""
    result = gpurun(tmp_path, "selftest", "--devices", "cuda:0", env={"CUDA_VISIBLE_DEVICES": ""}).ended(3)
    assert "FAILED   visible devices   CUDA_VISIBLE_DEVICES=" in result.out
    assert "unset CUDA_VISIBLE_DEVICES" in result.out
    assert re.search(r"\nAnswer +\d checks failed, \d+ checks? ok, \d+ skipped\nNext ", result.out)
    assert result.out.splitlines()[-1].startswith("Kept in runs/selftest/")
    assert "checks failed" in result.err.splitlines()[-1]
    (kept,) = (tmp_path / "runs/selftest").glob("*/selftest.json")
    assert (tmp_path / "runs/selftest/latest").read_text().strip() == kept.parent.name
