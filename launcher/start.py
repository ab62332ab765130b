"""Starts a job: on this machine alone, or as one of several nodes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.machine.host import inspect_machine
from gpurun.launcher.nodes.rendezvous import NodeFlags
from gpurun.launcher.plan.build import with_mistakes_of_plan
from gpurun.launcher.processes.pool import WorkerPools, say_on_stderr
from gpurun.launcher.run.job import Finished, Job, Output, carry_out, prepare
from gpurun.launcher.run.open import Invocation, load_invocation, read_invocation
from gpurun.launcher.rundir.paths import Url


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
