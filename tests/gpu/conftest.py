"""Tests that need GPUs, `pytest -m gpu`: where the driver shows GPUs that torch can't use they fail.

`make gpu-test` prints one report. `pytest -m gpu --devices cpu:2` is a rehearsal on CPU devices.
"""

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpurun.launcher.machine.accelerators import inspect_gpus
from tests.gpu.machine import (
    REPORT,
    Devices,
    Report,
    devices_here,
    outcome_text,
    why_none,
    why_unusable,
    write_report,
)

REPORT_FILE = Path("build/gpu-report.md")
results: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def _patience() -> None:
    """Many jobs take longer than a test may elsewhere; each of their commands has a limit."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def devices(request: pytest.FixtureRequest) -> Devices:
    """All devices; skips where there is no GPU, and fails where there is one that can't be used."""
    wanted = request.config.getoption("--devices")
    if not wanted:
        found = inspect_gpus(os.environ)
        if reason := why_none(found):
            pytest.skip(reason)
        if problem := why_unusable(found, torch.cuda.device_count()):
            pytest.fail(problem)
    return devices_here(wanted)


@pytest.fixture(scope="session")
def report() -> Report:
    return REPORT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    answer: pytest.TestReport = yield  # type: ignore[assignment]
    if Path(__file__).parent in item.path.parents and (answer.when == "call" or not answer.passed):
        results[item.name] = outcome_text(answer)
        if answer.failed:
            REPORT.found(item.name, f"```\n{str(answer.longrepr)[-3000:]}\n```")
    return answer  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if results and "gpu" in terminalreporter.config.option.markexpr:
        terminalreporter.section(f"report, kept in {REPORT_FILE}: attach it to an issue")
        terminalreporter.write(write_report(REPORT_FILE, results))
