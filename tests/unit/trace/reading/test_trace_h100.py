"""Traces that gpurun took on an H100 with torch 2.11, against a reading of their events not by gpurun."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from tests.said import trace_notes

TRACES = Path(__file__).parents[3] / "data" / "h100"
NAMES = sorted(str(path.relative_to(TRACES)) for path in TRACES.rglob("*.gz"))
GPU_LIMITS = ["gpt-compiled.rank0.pt.trace.json.gz", "gpt-fp32.rank0.pt.trace.json.gz"]


def events_of(name: str) -> list[dict[str, Any]]:
    with gzip.open(TRACES / name) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def steps_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The GPU work that was launched in each step, by the moment of its launch."""
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched_us = {event["args"]["correlation"]: event["ts"] for event in calls}
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return [
        [event for event in work if begin <= launched_us[event["args"]["correlation"]] < end]
        for begin, end in marks
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_is_counted_in_the_step_that_launched_it(name: str) -> None:
    (rank,) = analyse_paths([TRACES / name]).ranks
    expected = [sum(one["cat"] == "kernel" for one in step) for step in steps_of(events_of(name))]
    assert [step.num_kernels for step in rank.steps] == expected
    assert rank.total.num_kernels == sum(expected) > 0


@pytest.mark.parametrize("name", GPU_LIMITS)
def test_where_the_gpu_limits_a_step_lasts_from_the_end_of_its_work_to_that_of_the_next(name: str) -> None:
    """The host runs ahead: its annotations last less than half as long here."""
    (rank,) = analyse_paths([TRACES / name]).ranks
    ends_us = [max(one["ts"] + one["dur"] for one in step) for step in steps_of(events_of(name))]
    lasted_us = [after - before for before, after in pairwise(ends_us)]
    assert [step.span_us for step in rank.steps[1:]] == pytest.approx(lasted_us, abs=0.002)


def test_two_ranks_on_one_gpu_are_two_ranks() -> None:
    report = analyse_paths([TRACES / "ddp"])
    assert [rank.total.num_kernels for rank in report.ranks] == [292, 292]
    assert trace_notes(report) == ()
