"""Twenty faults of a machine, each named by `gpurun selftest`: the command itself, its JSON and exit code.

`RANKS`: one run on simulated devices, whose ranks and driver have all of these faults at once; it is
interrupted once the strategies are judged. `COMMAND`: the command in this process, with a driver that is made
up; where the fault is in a rank's work, that work is done here. `ALWAYS`: every self-test does that itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpurun.launcher.cli import interrupt
from gpurun.launcher.cli.main import main
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.gpus import nvml
from gpurun.launcher.machine.gpus.torch_build import TorchBuild
from gpurun.launcher.processes import guard, pool_per_env
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.selftest.evidence import FAULTS, MEASURING, NOT_REPORTED, PROGRAMS, RanJob
from gpurun.launcher.selftest.self_test import SelfTest
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.base.failure import message_of
from gpurun.launcher.worker.program import recorder as recorder_module
from gpurun.launcher.worker.program.program_rank import watch_steps
from gpurun.launcher.worker.program.recorder import StepRecorder
from gpurun.launcher.worker.selftest import device_program, plain_programs
from tests.sim.faults import driver, environment
from tests.unit.selftest.healthy import evidence
from tests.unit.worker.test_program_steps import program_config

RANKS, COMMAND, ALWAYS = "ranks", "command", "always"


@dataclass(frozen=True)
class Named:
    """Where a fault is put in, the check that names it, and words of what it says."""

    how: str
    check: str
    words: str
    remedy: str = ""
    """Words of what it says to do; empty where a figure is missing, which is no failure."""


TWENTY = {
    "slow link": Named(RANKS, "pairs of devices", "sim:0 and sim:2: ", "reseat the card"),
    "slow device": Named(RANKS, "device speed", "sim:2 does 5", "look for other processes"),
    "wrong ids": Named(
        RANKS, "device names", "rank 1 uses aaaa-0, but sim:1 is GPU-abbb-1", "unset CUDA_DEV"
    ),
    "ECC errors": Named(RANKS, "memory errors", "sim:1 had 3 memory errors", "replace the GPU"),
    "no permission": Named(
        COMMAND, "visible devices", "GPU 2 of this machine's 3 can't be opened", "/dev files"
    ),
    "driver too old": Named(
        COMMAND, "torch and driver", "but driver 580.65.06 has CUDA 12.8", "update the driver"
    ),
    "CPU build of torch": Named(
        COMMAND, "torch and driver", "was built without CUDA", "--force-reinstall torch"
    ),
    "MIG": Named(COMMAND, "whole GPUs", "cuda:0, cuda:1 are instances (MIG) of one GPU", "nvidia-smi -mig 0"),
    "hidden GPU": Named(
        COMMAND, "visible devices", "CUDA_VISIBLE_DEVICES=0,7,1 leaves 1 GPU", "unset CUDA_VIS"
    ),
    "throttled": Named(RANKS, "clock rates", "sim:2 was throttled: too hot", "improve the cooling"),
    "OOM not freed": Named(
        COMMAND, "out of memory", "cuda:2 still has 69.5 GiB more in use", "`gpurun devices`"
    ),
    "rank killed": Named(RANKS, "strategies", "rank 1 was killed by SIGKILL", "read the logs"),
    "rank asleep": Named(ALWAYS, "a sleeping rank", "rank 1 is in `misbehave`"),
    "wrong sum": Named(
        RANKS, "all-reduce sums", "1 of 1023 elements of torch.float32 on rank 1", "don't train"
    ),
    "fork after CUDA": Named(
        COMMAND, "measuring", "something has used CUDA before they were forked", "don't use"
    ),
    "no set_device": Named(
        COMMAND, "no set_device", "rank 0 was not seen to use memory of its own", "report it"
    ),
    "no energy counter": Named(RANKS, "energy", f"the energy counter of sim:0 is {NOT_REPORTED}"),
    "NUMA unknown": Named(RANKS, "NUMA nodes", "the NUMA node of sim:0, sim:1, sim:2 is not reported"),
    "full disk": Named(COMMAND, "run directory", "0.00 GiB are free", "free some space"),
    "profiler in use": Named(RANKS, "traces", "another profiler is in use", "end Nsight"),
}
"""The faults by name."""


def put_in(how: str) -> list[str]:
    return [fault for fault, named in TWENTY.items() if named.how == how]


def check_named(fault: str, checks: dict[str, Any]) -> None:
    """Whether the fault is named, and what to do about it."""
    named = TWENTY[fault]
    found = checks[named.check]
    assert named.words in found["found"], fault
    assert found["status"] == ("failed" if named.remedy else "skipped"), fault
    assert named.remedy in (found["remedy"] or ""), fault


def by_name(result: Any) -> dict[str, Any]:
    return {check["name"]: check for check in result["checks"]}


def test_ranks_with_faults_are_named_and_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    """Ctrl-C ends all ranks; a test that leaves a process fails."""
    env = environment(put_in(RANKS))
    command = [sys.executable, "-m", "gpurun", "selftest", "--devices", "sim", "--out", "run", "--json"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "1 of 5: devices and links …\n"
        assert process.stderr.readline() == "2 of 5: strategies and traces …\n"
        assert process.stderr.readline() == "3 of 5: gradients …\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "gpurun: interrupted by Ctrl-C; what was measured before is kept\n")
    checks = by_name(json.loads((tmp_path / "run/selftest.json").read_text()))
    for fault in put_in(RANKS):
        check_named(fault, checks)
    assert {name for name, check in checks.items() if check["status"] == "failed"} == {
        TWENTY[fault].check for fault in put_in(RANKS) if TWENTY[fault].remedy
    }
    training = read_json(tmp_path / "run/training/comparison.json", Comparison)
    (free,) = (each for each in training.variants if any(rank.compute_ms for rank in each.ranks))
    assert free.status == "ok"  # the control: a profiler that no one else uses records kernels
    assert f"{variant_label(free)}:" not in checks["traces"]["found"]


class Command:
    """`gpurun selftest` in this process, whose jobs have run well already, as far as the fault lets them."""

    def __init__(self, fault: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault, self.directory, self.ran = fault, directory, set[str]()
        build = (
            TorchBuild("2.13.0+cpu", {})
            if "CPU build" in fault
            else TorchBuild("2.13.0+cu130", {"cuda": "13.0"})
        )
        monkeypatch.setitem(sys.modules, "pynvml", driver([fault], is_full=self.is_full))
        monkeypatch.setattr(nvml, "has_driver", lambda root=None: True)
        monkeypatch.setattr(accelerators, "installed_torch", lambda: build)
        for module, name, value in (
            (interrupt, "quit_on_interrupt", lambda: None),
            (guard, "split_process", lambda: nullcontext()),
            (pool_per_env, "early_servers", lambda guard: nullcontext(SimpleNamespace(get=self.pool))),
        ):
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(SelfTest, "run_job", self.run_job)
        if fault == "full disk":
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        if fault == "hidden GPU":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
        self.monkeypatch = monkeypatch

    def pool(self, env: Any) -> Any:
        return SimpleNamespace(preload=lambda modules: None)

    def is_full(self) -> bool:
        return self.fault == "OOM not freed" and FAULTS in self.ran

    def run_job(self, part: str, text: str, machine: Any) -> RanJob:
        """What a job would come to."""
        self.ran.add(part)
        for facts in evidence().facts if part == MEASURING else ():
            write_json(self.directory / f"run/facts/rank{facts.rank}.json", facts)
        if part == MEASURING and self.fault == "fork after CUDA":
            return RanJob(problem=f"rank 0 raised RuntimeError: {self.error_after_fork()}")
        job = evidence().jobs[part]
        if part == PROGRAMS and self.fault == "no set_device":
            return replace(job, steps={**job.steps, "no-set-device": {0: self.steps_of_another_device()}})
        return job

    def error_after_fork(self) -> str:
        """torch's own, of a rank that measures its device."""
        with self.monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
            patch.setenv("LOCAL_RANK", "0")
            device = device_program.own_device(CUDA)
            with pytest.raises(RuntimeError) as caught:
                torch.zeros(1, device=device)
        return message_of(caught.value)

    def steps_of_another_device(self) -> Any:
        """The program itself, whose recorder looks at a device on which it has nothing."""
        recorder = StepRecorder(program_config(self.directory), 0, RunDir(self.directory))
        with self.monkeypatch.context() as patch, watch_steps(recorder):
            patch.setattr(CpuRuntime, "peak_bytes", lambda runtime, device: 0)
            patch.setattr(recorder_module, "device_of", lambda optimizer: torch.device("cpu"))
            plain_programs.PROGRAMS["no-set-device"](plain_programs.Training("cpu"))
            recorder.close(wait=True)
        return tuple(recorder.run.read_steps("script-1")[0])

    def run(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        """The checks by name."""
        arguments = [
            "gpurun",
            "selftest",
            "--devices",
            "cuda",
            "--json",
            "--out",
            str(self.directory / "run"),
        ]
        self.monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 3
        shown = capsys.readouterr()
        assert "1 of 29 checks" in shown.err
        return by_name(json.loads(shown.out))


@pytest.mark.parametrize("fault", put_in(COMMAND))
def test_the_command_names_a_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = Command(fault, tmp_path, monkeypatch).run(capsys)
    check_named(fault, checks)
    assert [name for name, check in checks.items() if check["status"] == "failed"] == [TWENTY[fault].check]


def test_all_twenty_are_there() -> None:
    """The sleeping rank is looked at where a whole self-test is run."""
    assert len(TWENTY) == 20
    assert put_in(ALWAYS) == ["rank asleep"]
