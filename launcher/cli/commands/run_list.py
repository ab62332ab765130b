"""`gpurun runs` lists runs, or deletes them."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.completion import run_directories
from gpurun.launcher.cli.options import READ, json_option
from gpurun.launcher.cli.output import line_width, show_json, warn
from gpurun.launcher.errors import SpecError

if TYPE_CHECKING:
    from gpurun.launcher.tensorboard_plugin.answers.runs import PastRun

DEFAULT = Path("runs")
HEADER = ("run", "written", "status", "size")


@click.command()
@click.argument("paths", type=READ, metavar="[PATH...]", nargs=-1, shell_complete=run_directories)
@click.option("--delete", "is_delete", is_flag=True, help="Delete these runs; each has to be named.")
@json_option
def runs(paths: tuple[Path, ...], is_delete: bool, as_json: bool) -> None:
    """List the runs in runs/, or at each PATH, the newest first, with what they found out.

    Example: gpurun runs runs/gpt-splits

    Example: gpurun runs --delete runs/gpt-splits/2026-11-02_*
    """
    if is_delete:
        if not paths:
            raise click.UsageError("--delete deletes the runs that you name: gpurun runs --delete RUN...")
        delete_runs(paths)
        return
    from gpurun.launcher.run.open import find_run
    from gpurun.launcher.tensorboard_plugin.answers.runs import past_runs

    places = paths or ((DEFAULT,) if DEFAULT.is_dir() else ())
    found = past_runs([path if path.is_dir() else find_run(path).path for path in places])
    if as_json:
        show_json(found)
    elif found:
        click.echo("\n".join(lines_of(found, line_width())))
    else:
        warn(f"no run in {', '.join(map(str, paths or (DEFAULT,)))}; `gpurun JOB.yaml` makes one")


def lines_of(found: "Sequence[PastRun]", width: int) -> list[str]:
    """A line for each run, and what it found out; names are never cut, since other commands take them."""
    from gpurun.launcher.report.terminal.grid import grid, wrap
    from gpurun.launcher.report.terminal.layout import clean
    from gpurun.launcher.units import GIB, format_gib

    def row(run: "PastRun") -> tuple[str, ...]:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s))
        return clean(run.run), written, run.status, format_gib(run.num_bytes / GIB)

    head, *rows = grid(HEADER, [row(run) for run in found], right={3})
    below = (wrap(f"    {run.headline}", width) if run.headline else [] for run in found)
    return [head, *(line for first, more in zip(rows, below, strict=True) for line in (first, *more))]


def delete_runs(paths: Sequence[Path]) -> None:
    """Deletes runs one by one, and says of each what it took."""
    from gpurun.launcher.rundir.claim import delete
    from gpurun.launcher.units import GIB, format_gib

    for directory in runs_to_delete(paths):
        click.echo(f"deleted {directory} ({format_gib(delete(directory) / GIB)})", err=True)


def runs_to_delete(paths: Sequence[Path]) -> list[Path]:
    """The runs that these paths name: each is a run directory, or `…/latest`.

    Raises:
        SpecError: one is something else. A directory of runs is not taken for the newest run in it.
    """
    return list({found.resolve(): found for found in map(run_to_delete, paths)}.values())


def run_to_delete(path: Path) -> Path:
    """The run directory to delete that this path means."""
    from gpurun.launcher.run.open import find_run, run_directory
    from gpurun.launcher.rundir.paths import LATEST, PLAN, is_ours
    from gpurun.launcher.rundir.store import source_of

    if not isinstance(source := source_of(path), Path):
        raise SpecError(f"{source} is in a store; delete it there, with the store's own tools")
    found = run_directory(path) or find_run(path).path  # whatever is in a run can be deleted
    if found != path and path.name != LATEST:
        words = shlex.quote(str(path))
        raise SpecError(
            f"{path} holds runs and is none; name those to delete\n    to list them: gpurun runs {words}"
        )
    if not is_ours(found):
        raise SpecError(f"{found} has a {PLAN}, but isn't a run of gpurun; remove it yourself if you want to")
    if found.is_symlink():
        raise SpecError(f"{found} is a link; name the run directory itself: {found.resolve()}")
    return found
