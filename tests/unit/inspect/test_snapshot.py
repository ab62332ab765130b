"""What ranks use of a machine, seen from outside."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from gpurun.launcher.inspect import snapshot
from gpurun.launcher.inspect.hang_diagnosis import diagnose
from gpurun.launcher.inspect.snapshot import RankSnapshot, ask_gpus, utilisation
from gpurun.launcher.inspect.stacks import parse_threads
from gpurun.launcher.machine.gpus.gpu import Gpu, GpuProcess, Gpus
from gpurun.launcher.machine.process_tree import cpu_s
from tests.unit.inspect.test_stacks import IN_FORWARD, USER, stack
from tests.wording import Wording

RANK, OTHER, OUTSIDE = (GpuProcess(pid, name, 1.0) for pid, name in ((7, "p"), (8, "p"), (9, None)))


def gpu(percent: int | None, *users: GpuProcess) -> Gpu:
    unknown: Any = dict.fromkeys(
        ("memory_gib", "used_gib", "sm_clock_mhz", "max_sm_clock_mhz", "power_w", "power_limit_w",
         "temperature_c")
    )  # fmt: skip
    return Gpu(0, "GPU-a", "x", utilisation_percent=percent, processes=users, peer_links={}, **unknown)


@pytest.mark.parametrize(
    ("gpus", "percent"),
    [
        ((), 0),
        ((gpu(0, RANK), gpu(90, OTHER)), 0),
        ((gpu(3, RANK, OTHER),), 3),
        ((gpu(0, RANK), gpu(5, OUTSIDE)), 5),  # in a container it may be this rank
        ((gpu(5),), 5),
        ((replace(gpu(5), processes=None),), 5),
        ((gpu(None, RANK),), None),
        ((gpu(None, OTHER),), 0),
    ],
)
def test_a_rank_uses_each_gpu_that_is_not_surely_anothers(gpus: tuple[Gpu, ...], percent: int | None) -> None:
    assert utilisation(Gpus(gpus), (RANK.pid,)) == percent


def test_of_drivers_that_do_not_answer_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utilisation(Gpus(nvml_error="GPU is lost"), (7,)) is utilisation(None, (7,)) is None
    answers = threading.Event()
    monkeypatch.setattr(snapshot, "inspect_gpus", lambda environ: answers.wait())
    monkeypatch.setattr(snapshot, "GPUS_S", 0.0)
    assert ask_gpus() is None
    answers.set()


def test_a_process_has_the_cpu_time_of_its_children_too() -> None:
    before_s = cpu_s([os.getpid()])
    subprocess.run([sys.executable, "-S", "-c", "x = sum(range(5_000_000))"], check=True)
    assert cpu_s([os.getpid()]) >= before_s + 0.02
    assert cpu_s([]) == 0


def test_a_program_that_waits_for_processes_of_its_own_gets_advice(wording: Wording) -> None:
    spawns = parse_threads(stack("torch/multiprocessing/spawn.py:340 spawn", f"{USER}:9 main"))
    seen = [RankSnapshot(rank, 7, 0, spawns, ()) for rank in (0, 1)]
    wording(diagnose(seen).details)
    for other in (replace(seen[1], steps=1), replace(seen[1], threads=parse_threads(IN_FORWARD))):
        assert len(diagnose([seen[0], other]).details) == 2
