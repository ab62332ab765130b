"""`gpurun tune`: which of hundreds of combinations trains fastest?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.completion import job_files
from gpurun.launcher.cli.options import (
    MISSING_JOB,
    json_option,
    only_rank_option,
    out_option,
    parse_wait,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import print_comparison
from gpurun.launcher.errors import SpecError


@click.command()
@click.argument(
    "job", type=click.Path(path_type=Path), metavar="[JOB.yaml]", required=False, shell_complete=job_files
)
@click.option(
    "--budget", "budget_s", callback=parse_wait, metavar="TIME", help="The most time; default: 15m."
)
@out_option
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value="latest",
    metavar="[RUN]",
    help="Continue a search, by default the newest one of this job.",
)
@only_rank_option
@quiet_option
@json_option
@set_option
def tune(
    job: Path | None,
    budget_s: float | None,
    out: Path | None,
    resume: Path | None,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Find the fastest of all combinations under `compare`, without measuring each of them at length.

    Combinations are tried for a few steps each, by ranks that build the next model where the last one was. A
    model of their times chooses what is tried next, and says what can't be much faster. The five best and the
    job's own setting, which its keys at the top state, are then compared as in any run.

    Ctrl-C keeps what was measured; --resume goes on from there.

    Example: gpurun tune examples/tune.yaml --budget 10m

    Exit codes: 0 ok, 2 the job file or the command line is wrong, 3 the machine lacks what the job needs, 4 a
    combination that was to be compared in the end failed, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    quit_on_interrupt()
    if job is None and (resume is None or (resume == Path("latest") and not resume.exists())):
        raise SpecError(MISSING_JOB)
    if resume is None:
        check_writable(out or Path("runs"))

    def invocation() -> Any:
        from gpurun.launcher.run.open import Invocation

        return None if job is None else Invocation(job, overrides)

    finished = run(invocation, budget_s, out, resume, only_rank, quiet)
    print_comparison(finished.comparison, finished.run.path, as_json)
    if finished.error is not None:
        raise finished.error


def run(
    invocation: Callable[[], Any],
    budget_s: float | None,
    out: Path | None,
    resume: Path | None,
    only_rank: int | None,
    quiet: bool,
) -> Any:
    """The finished search; no process of it is left."""
    from gpurun.launcher.processes.guard import split_process

    with split_process() as guard:  # forks: nothing heavy may be imported before
        from gpurun.launcher.processes.pool_per_env import early_servers

        with early_servers(guard) as pools:
            from gpurun.launcher.run.job import Output
            from gpurun.launcher.search.tune import run_tune

            return run_tune(pools, invocation, budget_s, out, resume, Output(quiet, only_rank))
