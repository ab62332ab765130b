"""The memory that variants are expected to hold, by a process that imports torch and runs no step."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.helper_process import helper_argv, temporary_directory
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.plan.launch_config import launch_config_for
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import MemoryEstimate
from gpurun.launcher.units import format_duration

ESTIMATE = "gpurun.launcher.worker.training.memory_estimate:main"
ESTIMATE_LIMIT_S = 600.0
"""A model that takes longer to build doesn't end."""


def estimated_memory(
    plan: Plan, spec: JobSpec, machine: Machine, job_dir: Path
) -> Mapping[str, MemoryEstimate]:
    """What each variant's fullest rank is expected to hold.

    Raises:
        SpecError: the job runs a program, whose model is not known before.
        MachineError: the process failed, or took too long.
    """
    if spec.kind.runs_program:
        raise SpecError("--memory needs a workload: of a program, the model isn't known before it runs")
    with temporary_directory("memory") as directory:
        request, answer = directory / "request.json", directory / "answer.json"
        first = (launch for launch in plan.launches if launch.repetition == 0)
        launches = [
            launch_config_for(plan, spec, launch, run_dir=directory, job_dir=job_dir, machine=machine)
            for launch in first
        ]
        write_json(request, launches)
        argv = helper_argv(ESTIMATE, str(os.getpid()), str(request), str(answer))
        try:
            ended = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=ESTIMATE_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            why = f"that took longer than {format_duration(ESTIMATE_LIMIT_S)}"
        else:
            if ended.returncode == 0:
                return read_json(answer, dict[str, MemoryEstimate])
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            why = f"the process that does it failed\n    {last}"
        raise MachineError(f"memory can't be estimated: {why}")
