"""`gpurun run`: a program without a job file, as one would start it with `torchrun`."""

from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import (
    ProgramCommand,
    json_option,
    node_flags,
    node_options,
    only_rank_option,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import print_comparison
from gpurun.launcher.errors import SpecError
from gpurun.launcher.rundir.writable import check_writable


@click.command("run", cls=ProgramCommand)
@click.argument("words", nargs=-1, metavar="[SCRIPT.py] [-- ARGS...]")
@click.option(
    "-m", "module", metavar="MODULE", help="Run a module, as `python -m` does, instead of a script."
)
@click.option("--devices", default="auto", metavar="DEVICES", help="auto, cuda, cpu:2, or cuda:0,cuda:1.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="The run directory itself; default runs/NAME/TIME."
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Machines; the same command on each.")
@node_options
@only_rank_option
@quiet_option
@json_option
@set_option
def run_command(
    words: tuple[str, ...],
    module: str | None,
    devices: str,
    out: Path | None,
    nodes: int | None,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
    **about_nodes: Any,
) -> None:
    """Run a program unchanged, one process per device, and time and trace its steps.

    Its processes get the environment that `torchrun` gives them. What stands behind `--` is the program's.

    Example: gpurun run train.py --devices cpu:2 -- --epochs 1

    Exit codes: 0 ok, 2 the command line is wrong, 3 the machine lacks what is asked for, 4 the program
    failed or ran out of memory, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt

    quit_on_interrupt()
    from gpurun.launcher.processes.guard import split_process

    if module is None and not words:
        raise SpecError("which program? gpurun run train.py, or gpurun run -m package.train")
    check_writable(out or Path("runs"))
    script, args = (None, words) if module is not None else (words[0], words[1:])
    with split_process() as guard:  # forks: nothing heavy may be imported before
        from gpurun.launcher.processes.pools import early_servers

        with early_servers(guard) as pools:
            from gpurun.launcher.run.job import Output
            from gpurun.launcher.run.open import program_invocation
            from gpurun.launcher.start import run_job

            overrides = (*overrides, *([f"nodes={nodes}"] if nodes else []))
            given = program_invocation(script, module, args, devices, overrides)
            output, flags = Output(quiet, only_rank), node_flags(**about_nodes)
            finished = run_job(guard, pools, given, out, None, output, flags)
    if finished is None:
        return  # node 0 has the results
    print_comparison(finished.comparison, finished.run.path, as_json)
    if finished.error is not None:
        raise finished.error
