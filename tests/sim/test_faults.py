"""Twenty faults of a machine, each named by `gpurun selftest`: the command itself, its JSON and exit code.

`RANKS`: one run on simulated devices, whose ranks and driver have all of these faults at once; it is
interrupted once the strategies are judged. `BEFORE`: the command in this process, with a driver that is made
up; it starts no rank. `COMMAND`: likewise, where jobs have run well already but for what the fault does to a
rank, which is done here, by torch or a fake of its classes. `DISK`: the command on a small disk. `ALWAYS`:
every self-test does that itself.
"""

import json
import os
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
from gpurun.launcher.compare.figures.ranks import read_traced
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.findings.check_cases import NOT_REPORTED
from gpurun.launcher.machine import accelerators
from gpurun.launcher.machine.accelerators import CUDA, read_build
from gpurun.launcher.machine.gpus import nvml
from gpurun.launcher.processes import guard, pool
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.selftest.evidence import FAULTS, MEASURING, PROGRAMS, RanJob
from gpurun.launcher.selftest.self_test import SelfTest
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.program import program_rank as recorder_module
from gpurun.launcher.worker.program.program_rank import StepRecorder, watch_steps
from gpurun.launcher.worker.selftest import device_program, plain_programs
from tests.sim.faults import driver, environment
from tests.sim.machine import SIM
from tests.unit.gpu.fake_cuda import FakeCuda
from tests.unit.selftest.healthy import evidence
from tests.unit.worker.test_program_steps import program_config

RANKS, BEFORE, COMMAND, DISK, ALWAYS = "ranks", "before", "command", "disk", "always"


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
        BEFORE, "visible devices", "GPU 2 of this machine's 3 can't be opened", "/dev files"
    ),
    "driver too old": Named(
        BEFORE, "torch and driver", "but driver 580.65.06 has CUDA 12.8", "update the driver"
    ),
    "CPU build of torch": Named(
        BEFORE, "torch and driver", "was built without CUDA", "--force-reinstall torch"
    ),
    "MIG": Named(BEFORE, "whole GPUs", "cuda:0, cuda:1 are instances (MIG) of one GPU", "nvidia-smi -mig 0"),
    "hidden GPU": Named(
        BEFORE, "visible devices", "CUDA_VISIBLE_DEVICES=0,7,1 leaves 1 GPU", "unset CUDA_VIS"
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
    "full disk": Named(DISK, "run directory", "MiB are free", "free some space"),
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


@pytest.mark.slow
def test_ranks_with_faults_are_named_and_an_interrupt_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setitem(accelerators.ACCELERATORS, SIM.name, SIM)  # as in the command's processes
    training = read_json(tmp_path / "run/training/comparison.json", Comparison)
    traced = {each.id: read_traced(RunDir(tmp_path / "run/training"), each.id) for each in training.variants}
    (free,) = (each for each in training.variants if (found := traced[each.id]) and not found.of_host)
    assert free.status == "ok"  # the control: a profiler that no one else uses records kernels
    assert f"{variant_label(free)}:" not in checks["traces"]["found"]


CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
"""As `torch/version.py` says it."""


class Command:
    """`gpurun selftest` in this process, whose jobs have run well already, as far as the fault lets them."""

    def __init__(self, fault: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault, self.directory, self.ran = fault, directory, set[str]()
        self.left: subprocess.Popen[bytes] | None = None
        build = read_build(CPU_BUILD if fault == "CPU build of torch" else CUDA_BUILD)
        monkeypatch.setitem(sys.modules, "pynvml", driver([fault], is_full=self.is_full))
        monkeypatch.setattr(nvml, "has_driver", lambda root=None: True)
        monkeypatch.setattr(accelerators, "installed_torch", lambda: build)
        for module, name, value in (
            (interrupt, "quit_on_interrupt", lambda: None),
            (guard, "split_process", lambda: nullcontext()),
            (pool, "early_servers", lambda guard, script: nullcontext(SimpleNamespace(get=self.pool))),
        ):
            monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(SelfTest, "run_job", self.run_job)
        if fault == "hidden GPU":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
        self.monkeypatch = monkeypatch

    def pool(self, env: Any) -> Any:
        return SimpleNamespace(preload=lambda modules: None)

    def is_full(self) -> bool:
        """Whether a process that was left behind holds memory; it lives as long as the command."""
        if self.fault == "OOM not freed" and FAULTS in self.ran and self.left is None:
            self.left = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        return self.left is not None and self.left.poll() is None

    def run_job(self, part: str, text: str, machine: Any) -> RanJob:
        """What a job would come to."""
        self.ran.add(part)
        for facts in evidence().facts if part == MEASURING else ():
            write_json(self.directory / f"run/facts/rank{facts.rank}.json", facts)
        if part == MEASURING and self.fault == "fork after CUDA":
            return RanJob(problem=self.reason_after_fork())
        job = evidence().jobs[part]
        if part == PROGRAMS and self.fault == "no set_device":
            return replace(job, steps={**job.steps, "no-set-device": {0: self.steps_of_another_device()}})
        return job

    def reason_after_fork(self) -> str:
        """By the record of a rank that measures its device, and by how it ended; the error is torch's own.

        torch/cuda/__init__.py:501, `_lazy_init`: it is what looks whether this is a fork.
        """
        with self.monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
            patch.setenv("LOCAL_RANK", "0")
            device = device_program.own_device(CUDA)
            with pytest.raises(RuntimeError) as caught:
                torch.zeros(1, device=device)
        record = record_failure(RunDir(self.directory / "ranks"), "01", 0, None, "run", caught.value)
        return root_cause([Exit(0, 1, record.time_ns)], [record], None).reason

    def steps_of_another_device(self) -> Any:
        """The program itself, with memory on the second GPU, and a recorder that looks at the current one,
        the first: `torch.cuda` is a fake of its own classes."""
        recorder = StepRecorder(program_config(self.directory), 0, RunDir(self.directory))
        cuda = FakeCuda(peaks={1: 1 << 20})
        with self.monkeypatch.context() as patch, watch_steps(recorder):
            patch.setattr(CudaRuntime, "module", cuda)
            patch.setattr(
                recorder_module, "device_of", lambda optimizer: torch.device("cuda", cuda.current_device())
            )
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
        if self.left is not None:
            self.left.communicate()
        shown = capsys.readouterr()
        assert "1 of 30 checks" in shown.err
        return by_name(json.loads(shown.out))


@pytest.mark.parametrize("fault", put_in(BEFORE) + put_in(COMMAND))
def test_the_command_names_a_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No job is made up for the faults that are found before a rank starts."""
    command = Command(fault, tmp_path, monkeypatch)
    checks = command.run(capsys)
    assert bool(command.ran) == (TWENTY[fault].how == COMMAND)
    check_named(fault, checks)
    assert [name for name, check in checks.items() if check["status"] == "failed"] == [TWENTY[fault].check]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk needs root")
@pytest.mark.parametrize("fault", put_in(DISK))
def test_the_command_names_a_full_disk(fault: str, tmp_path: Path) -> None:
    """The control is any other self-test: its disk has room."""
    mount = 'mount -t tmpfs -o size=128k none disk && exec "$@"'
    command = [
        sys.executable,
        "-m",
        "gpurun",
        "selftest",
        "--devices",
        "cpu:2",
        "--out",
        "disk/run",
        "--json",
    ]
    (tmp_path / "disk").mkdir()
    argv = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "gpurun: 1 of 30 checks failed\n")
    checks = by_name(json.loads(done.stdout))
    check_named(fault, checks)
    assert [name for name, check in checks.items() if check["status"] == "failed"] == [TWENTY[fault].check]


def test_all_twenty_are_there() -> None:
    """The sleeping rank is looked at where a whole self-test is run."""
    assert len(TWENTY) == 20
    assert put_in(ALWAYS) == ["rank asleep"]
