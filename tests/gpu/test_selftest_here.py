"""The checks of `gpurun selftest`, one test each; they are run once."""

from typing import Any

import pytest

from gpurun.launcher.selftest.check_table import CHECKS
from tests.gpu.machine import LONGEST_S, Devices, Report
from tests.integration.command import gpurun


@pytest.fixture(scope="module")
def checks(devices: Devices, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results by name."""
    wanted = devices.kind if devices.is_gpu else f"{devices.kind}:{devices.count}"
    directory = tmp_path_factory.mktemp("selftest")
    result = gpurun(directory, "selftest", "--devices", wanted, "--json", timeout_s=LONGEST_S)
    assert result.code in (0, 3), result.err
    return {check["name"]: check for check in result.json["checks"]}


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_a_check_of_the_selftest(name: str, checks: dict[str, Any], report: Report) -> None:
    report.hold(checks[name])
