"""What simulated devices do, in known cases: the answers are in nanoseconds and bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sim.machine import MachineModel

pytestmark = pytest.mark.slow

FAULT = "SIM error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def found() -> Any:
    """What all scenarios come to."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.sim.scenarios"],
        env=os.environ | MachineModel().environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_steps_take_what_is_slower_host_or_device(found: Any) -> None:
    """Of five kernels each; the first one also has what passes before the device has anything to do."""
    assert found["device bound"] == [30 + 500, 500, 500]
    assert found["launch bound"] == [5 * 130 + 100, 650, 650]
    assert found["slow"] == [130 + 1500, 1500, 1500]
    assert found["phases"] == [{"forward": 500}]


def test_the_host_is_ahead_until_the_queue_is_full(found: Any) -> None:
    assert found["shallow"] == [0, 0, 100, 200, 300, 400]
    assert found["deep"] == [0] * 6


def test_a_moment_in_the_future_has_no_time(found: Any) -> None:
    assert found["stamps"] == [None, 70]


def test_memory_is_that_of_tensors_and_an_error_leaves_it_as_it_was(found: Any) -> None:
    memory = found["memory"]
    assert memory["message"] == "SIM out of memory. Tried to allocate 204 bytes, 200 of 1000 are free"
    assert (memory["peak"], memory["allocated"], memory["with view"]) == (800, 800, 800)
    assert (memory["held"], memory["left"]) == (1000, 0)


def test_a_failed_launch_shows_when_the_host_waits_and_ever_after(found: Any) -> None:
    submitting, *later = found["fault"]
    assert submitting == ""
    assert later == [FAULT] * 3


def test_copies_between_devices_take_both_and_nothing_else_goes_between(found: Any) -> None:
    two = found["two devices"]
    assert two["ends"] == [1000 + 10 + 2 * 32] * 2
    assert two["hosts"] == [0, 0]
    assert two["waited"] == 1074 + 74  # for the copy of a result to the host
    assert two["devices"] == ["sim:0", *["sim:1"] * 5]
    assert two["values"] == [2.0, 2.0]
    assert [("sim:0 and sim:1" in text, "cpu and sim:0" in text) for text in two["mixed"]] == [
        (True, False),
        (False, True),
    ]


def test_the_host_waits_for_copies_from_pageable_memory_alone(found: Any) -> None:
    assert found["copies"] == {"pinned": 0, "pageable": 2 * 74}
