"""Starts a job: on this machine alone, or as one of several nodes; or estimates the memory that it takes."""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.helper_process import helper_argv, temporary_directory
from gpurun.launcher.machine.host import Machine, inspect_machine
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.plan.build import with_mistakes_of_plan
from gpurun.launcher.plan.launch_config import launch_config_for
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.processes.pool import WorkerPools, say_on_stderr
from gpurun.launcher.run.job import Finished, Job, Output, carry_out, prepare
from gpurun.launcher.run.open import Invocation, load_invocation, read_invocation
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.records import MemoryEstimate
from gpurun.launcher.units import format_duration

ESTIMATE = "gpurun.launcher.worker.training.memory_estimate:main"
ESTIMATE_LIMIT_S = 600.0
"""A model that takes longer to build doesn't end."""


def run_job(
    pools: WorkerPools,
    invocation: Callable[[], Invocation | None],
    out: Path | None,
    resume: Path | None,
    output: Output,
    flags: NodeFlags,
    keep_at: Url | None = None,
    overrides: tuple[str, ...] = (),
) -> Finished | None:
    """Runs the job, or what is missing of it. After Ctrl-C it still returns what was measured.

    `None` on all nodes but the first, which has the results.

    Args:
        pools: start the ranks; their first server may still be importing.
        invocation: finds the job file and its overrides; `None` takes those of the run that is resumed.
        out: the run directory, if not one under `runs/`.
        resume: a run to resume; `LATEST` is the newest of this job.
        output: what to show of what the ranks write.
        flags: this node's place among several.
        keep_at: where the run is kept too.
        overrides: of keys of the job that the resumed run has.

    Raises:
        SpecError: the job file or the command line is wrong, or another command works on this run.
        MachineError: the machine lacks what the job asks for, or the run directory can't be written.
        NodesError: a node of the job is lost.
    """
    gc.enable()
    with reported_to_nodes(flags), with_mistakes_of_plan(inspect_machine):
        given = invocation() or read_invocation(resume or Path(), overrides)
        job = Job(given, load_invocation(given), out, resume, output, keep_at)
        pools.know(job.spec)
    if job.spec.is_on_nodes:
        from gpurun.launcher.start_on_nodes import run_on_nodes

        return run_on_nodes(pools, job, flags)
    if flags.given:
        raise SpecError(
            "--node-rank, --rendezvous, --interface and --insecure need a job with several nodes\n"
            "    put `nodes: 2` into it, or use --set nodes=2"
        )
    ready = prepare(job, inspect_machine(), pools.get({}))
    return carry_out(ready, pools, output)


@contextmanager
def reported_to_nodes(flags: NodeFlags) -> Iterator[None]:
    """Reports what keeps this node from joining to the others, which would wait for it."""
    try:
        yield
    except (SpecError, MachineError) as error:
        from gpurun.launcher.nodes.join import refuse_to_join

        refuse_to_join(error, flags, say_on_stderr)
        raise


def estimated_memory(
    plan: Plan, spec: JobSpec, machine: Machine, job_dir: Path
) -> Mapping[str, MemoryEstimate]:
    """The memory that each variant is expected to hold, by a process that imports torch and runs no step.

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
