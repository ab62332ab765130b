"""`gpurun run`: a program without a job file, as one would start it with `torchrun`."""

from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.options import (
    WholeNumber,
    devices_option,
    json_option,
    node_options,
    only_rank_option,
    out_option,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import run_and_print
from gpurun.launcher.errors import SpecError


class ProgramCommand(click.Command):
    """A command whose last arguments, after `--`, belong to a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = f"did you mean {error.possibilities[0]}? Else " if error.possibilities else ""
            raise SpecError(
                f"gpurun run has no option {error.option_name}; {near}the program's own options go after `--`"
            ) from None


@click.command("run", cls=ProgramCommand)
@click.argument("words", nargs=-1, metavar="[SCRIPT.py] [-- ARGS...]")
@click.option(
    "-m", "module", metavar="MODULE", help="Run a module, as `python -m` does, instead of a script."
)
@devices_option
@out_option
@click.option("--nodes", type=WholeNumber(1), help="Number of nodes; run the same command on each.")
@node_options
@only_rank_option
@quiet_option
@json_option
@set_option
def run(
    words: tuple[str, ...],
    module: str | None,
    devices: str,
    out: Path | None,
    nodes: int | None,
    overrides: tuple[str, ...],
    **how: Any,
) -> None:
    """Run a program unchanged, one process per device, and time and trace its steps.

    Its processes get the environment that `torchrun` sets. What follows `--` is passed to the program.

    Example: gpurun run train.py --devices cpu:2 -- --epochs 1

    Exit codes: 0 ok, 2 the command line is wrong, 3 the machine lacks what the command asks for, 4 the
    program failed or ran out of memory, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt

    quit_on_interrupt()
    if module is None and not words:
        raise SpecError("missing argument SCRIPT.py; or run a module: gpurun run -m package.train")
    script, args = (None, words) if module is not None else (words[0], words[1:])

    def invocation() -> Any:
        from gpurun.launcher.run.open import program_invocation

        more = (f"nodes={nodes}",) if nodes else ()
        return program_invocation(script, module, args, devices, (*overrides, *more))

    run_and_print(invocation, out, None, **how)
