"""How many cores other processes leave, and what to do where a job takes more."""

import os
from itertools import accumulate
from pathlib import Path

import pytest

from gpurun.launcher.compare.load_findings import less_at_once
from gpurun.launcher.machine import process_tree
from gpurun.launcher.machine.process_tree import Reading, becomes_quiet, cpu_ns, free_cores, left_by_others

MS = 1_000_000
START = Reading(0, 5_000 * MS, 400 * MS)


@pytest.mark.parametrize(
    ("others_ms", "own_ms", "free"),
    [
        (0, 0, 4),
        (10, 240, 4),
        (120, 0, 4),
        (130, 250, 3),
        (250, 0, 3),
        (490, 250, 2),
        (1000, 0, 1),
        (-20, 30, 4),
    ],
)
def test_others_take_whole_cores_and_own_processes_none(others_ms: int, own_ms: int, free: int) -> None:
    after = Reading(250 * MS, START.all_ns + (others_ms + own_ms) * MS, START.own_ns + own_ms * MS)
    assert left_by_others(4, 4, START, after) == free
    assert left_by_others(2, 4, START, after) == min(2, free), "a quota below the cores that may be used"


def test_this_machine_is_looked_at_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([START, Reading(250 * MS, START.all_ns + 250 * MS, START.own_ns)])
    monkeypatch.setattr(process_tree, "_read", lambda: next(readings))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    pauses: list[float] = []
    assert free_cores(2, pauses.append) == 1
    assert pauses == [0.25]


def test_where_the_kernel_does_not_say_all_cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> Reading:
        raise PermissionError

    monkeypatch.setattr(process_tree, "_read", unreadable)
    assert free_cores(8) == 8
    assert becomes_quiet(30, lambda: 0.0, lambda seconds: None) is None


@pytest.mark.parametrize(
    ("busy_ms", "limit_s", "is_quiet", "looks"),
    [([0], 30, True, 1), ([250, 26, 24], 30, True, 3), ([250] * 9, 1, False, 4), ([250, 250], 0.1, False, 1)],
    ids=["at once", "after a while", "never", "less than a look"],
)
def test_quiet_is_waited_for(
    busy_ms: list[int], limit_s: float, is_quiet: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_ms = accumulate(busy_ms, initial=0)
    readings = (Reading(250 * number * MS, ms * MS, 0) for number, ms in enumerate(all_ms))
    monkeypatch.setattr(process_tree, "_read", lambda: next(readings))
    pauses: list[float] = []
    assert becomes_quiet(limit_s, lambda: sum(pauses), pauses.append) is is_quiet
    assert pauses == [0.25] * looks


def test_the_cpu_time_of_a_process_is_that_of_its_own_clock() -> None:
    before = cpu_ns(os.getpid())
    times = os.times()
    own_ns = round(1e9 * sum(times[:4]))
    assert before <= own_ns <= cpu_ns(os.getpid()) + 20 * MS
    assert cpu_ns(int(Path("/proc/sys/kernel/pid_max").read_text()) + 1) == 0


@pytest.mark.parametrize(
    ("num_devices", "threads", "free", "step"),
    [
        (1, 1, 1, None),
        (1, 2, 2, None),
        (2, 1, 2, None),
        (2, 0, 2, None),
        (1, 2, 1, "Set `threads: 1`: 1 device × 2 threads need 2 cores (free: 1)."),
        (2, 4, 6, "Set `threads: 3`: 2 devices × 4 threads need 8 cores (free: 6)."),
        (4, 2, 3, "Set `threads: 1`: 4 devices × 2 threads need 8 cores (free: 3)."),
        (4, 1, 3, "Set `devices: cpu:3`: 4 devices × 1 thread need 4 cores (free: 3)."),
        (2, 0, 1, "Set `devices: cpu:1`: 2 devices × 1 thread need 2 cores (free: 1)."),
    ],
)
def test_what_to_reduce(num_devices: int, threads: int, free: int, step: str | None) -> None:
    found = less_at_once(num_devices, threads, free)
    assert (found and found.sentence) == step
