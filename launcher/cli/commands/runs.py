"""`gpurun runs` lists or deletes runs; `gpurun stacks`, `capture` and `logs` look into one."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.completion import launch_ids, run_directories
from gpurun.launcher.cli.options import (
    READ,
    WholeNumber,
    json_option,
    parse_ranks,
    run_argument,
    running_argument,
)
from gpurun.launcher.cli.output import line_width, show_json, warn
from gpurun.launcher.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpurun.launcher.inspect.hang_diagnosis import Hang, RankView
    from gpurun.launcher.inspect.stacks import Frame, Stack
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
    from gpurun.launcher.run.find import find_run
    from gpurun.launcher.tensorboard_plugin.answers.runs import past_runs

    places = paths or ((DEFAULT,) if DEFAULT.is_dir() else ())
    found = past_runs([path if path.is_dir() else find_run(path).path for path in places])
    if as_json:
        show_json(found)
    elif found:
        click.echo("\n".join(lines_of(found, line_width())))
    else:
        warn(f"no run in {', '.join(map(str, paths or (DEFAULT,)))}; `gpurun JOB.yaml` makes one")


def lines_of(found: Sequence[PastRun], width: int) -> list[str]:
    """A line for each run, and what it found out; names are never cut, since other commands take them."""
    from gpurun.launcher.report.terminal.grid import grid, wrap
    from gpurun.launcher.report.terminal.layout import clean
    from gpurun.launcher.units import GIB, format_gib

    def row(run: PastRun) -> tuple[str, ...]:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed_s))
        return clean(run.run), written, run.status, format_gib(run.num_bytes / GIB)

    head, *rows = grid(HEADER, [row(run) for run in found], right={3})
    below = (wrap(f"    {run.headline}", width) if run.headline else [] for run in found)
    return [head, *(line for first, more in zip(rows, below, strict=True) for line in (first, *more))]


def delete_runs(paths: Sequence[Path]) -> None:
    """Deletes runs one by one, and says of each what it took.

    Raises:
        SpecError: a path is something else; nothing is deleted then.
    """
    from gpurun.launcher.rundir.claim import delete
    from gpurun.launcher.units import GIB, format_gib

    named = {found.resolve(): found for found in map(run_to_delete, paths)}
    for directory in named.values():
        click.echo(f"deleted {directory} ({format_gib(delete(directory) / GIB)})", err=True)


def run_to_delete(path: Path) -> Path:
    """The run directory to delete that this path means: itself, or that of `…/latest`.

    Raises:
        SpecError: it is something else. A directory of runs is not taken for the newest run in it.
    """
    from gpurun.launcher.run.find import find_run, run_directory, search_directory
    from gpurun.launcher.rundir.paths import LATEST, PLAN, is_our_search, is_ours
    from gpurun.launcher.rundir.store import source_of

    if not isinstance(source := source_of(path), Path):
        raise SpecError(f"{source} is in a store; delete it there, with the store's own tools")
    search = search_directory(path) if path.name == LATEST else path
    if search is not None and is_our_search(search) and not path.is_symlink():
        return search
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


@click.command()
@running_argument
@json_option
def stacks(run: Path, as_json: bool) -> None:
    """Show what every rank of a running job is doing, and which rank the others wait for.

    The ranks are not stopped. This works even while a rank is in C code that holds the GIL. The ranks receive
    a signal, so a sleep in C code that is not resumed after a signal (EINTR) ends early.

    Example: gpurun stacks runs/gpt-splits/latest
    """
    from gpurun.launcher.inspect.hang_diagnosis import diagnose
    from gpurun.launcher.inspect.requests import node_names, take_snapshots
    from gpurun.launcher.run.find import find_run
    from gpurun.launcher.rundir.claim import running_launch

    found = find_run(run)
    launch = running_launch(found)
    seen = diagnose(take_snapshots(found, launch))
    if as_json:
        import msgspec

        show_json({"launch": launch, **msgspec.to_builtins(seen)})
        return
    click.echo(render_stacks(launch, seen, node_names(found, launch)))


@click.command()
@running_argument
@click.option(
    "--steps",
    type=WholeNumber(1, 1000),
    default=3,
    help="Steps in each trace, at most 1000; default: 3.",
)
@click.option("--ranks", callback=parse_ranks, metavar="LIST", help="Ranks to record: 0,2-3; default: all.")
@click.option(
    "--timeout", "timeout_s", default=120.0, metavar="SECONDS", help="How long to wait; default: 120."
)
def capture(run: Path, steps: int, ranks: tuple[int, ...] | None, timeout_s: float) -> None:
    """Take torch.profiler traces of a job that is running, in steps that are not timed.

    Example: gpurun capture runs/gpt-splits/latest --steps 3 --ranks 0
    """
    from gpurun.launcher.inspect.requests import capture_running
    from gpurun.launcher.run.find import find_run

    directory = capture_running(find_run(run), steps, ranks, timeout_s)
    click.echo(f"{directory}")
    click.echo(f"to analyse them: gpurun trace {directory}", err=True)


@click.command()
@run_argument
@click.option("--rank", type=WholeNumber(0), help="Only this rank; default: all.")
@click.option(
    "--launch",
    metavar="ID",
    help="Which launch of the run; default: the newest.",
    shell_complete=launch_ids,
)
@click.option("--follow", "-f", is_flag=True, help="Print new lines as they appear, until the run ends.")
def logs(run: Path, rank: int | None, launch: str | None, follow: bool) -> None:
    """Print what the ranks of a run have written, each line with its rank; of more than 1 GiB, the end.

    It reads the logs only, so that it works where the run's plan or another record is damaged.

    Example: gpurun logs runs/gpt-splits/latest --rank 0 --follow
    """
    if launch and follow:
        raise click.UsageError("--launch and --follow: choose one; --follow prints each launch as it begins")

    import os

    from gpurun.launcher.cli.streams import is_reader_gone
    from gpurun.launcher.logs.lines import has_colour
    from gpurun.launcher.logs.relay import all_lines, newest_lines
    from gpurun.launcher.run.find import find_run

    found = find_run(run)
    colour = has_colour(sys.stdout, os.environ)
    lines = newest_lines(found, rank, colour) if follow else all_lines(found, rank, launch, colour)
    for line in lines:
        click.echo(line, color=colour)
        if is_reader_gone():
            return


def render_stacks(launch: str, seen: Hang, nodes: Mapping[int, str]) -> str:
    """Each rank's activity, with the main thread's stack, innermost call first; the finding at the end."""
    from gpurun.launcher.rundir.control import NOT_STARTED
    from gpurun.launcher.units import plural

    if not seen.ranks:
        return f"{launch}: {NOT_STARTED}"
    parts = [f"{launch}: {plural(len(seen.ranks), 'rank')}"]
    parts += [_rank(view, nodes.get(view.rank)) for view in seen.ranks]
    if seen.headline:
        parts.append(f"{seen.headline[0].upper()}{seen.headline[1:]}.")
    return "\n\n".join(parts)


def _rank(view: RankView, node: str | None) -> str:
    from gpurun.launcher.inspect.stacks import MOST_RECORDED
    from gpurun.launcher.units import plural

    newest = ", ".join(map(str, view.collectives))
    called = f"; last collective: {newest}" if newest else ""
    rank = f"rank {view.rank} of {node}" if node else f"rank {view.rank}"
    lines = [f"{rank} (process {view.pid}, {plural(view.steps, 'step')}{called}) {view.doing}"]
    main = view.threads[0] if view.threads else None
    lines += [f"    {call}" for call in _calls(outside_launcher(main.frames if main else ()))]
    if main and main.is_cut:
        lines.append(f"    … (calls further out than the innermost {MOST_RECORDED} are not recorded)")
    others = len(view.threads) - 1
    if others > 0:
        lines.append(f"    (and {plural(others, 'other thread')}: --json shows them)")
    return "\n".join(lines)


def _calls(frames: Iterable[Frame]) -> Iterator[str]:
    """A line for each call, and a single one for a call that is repeated by itself."""
    for frame, same in groupby(frames):
        times = len(tuple(same))
        yield str(frame) if times == 1 else f"{frame} (repeated {times} times)"


def outside_launcher(frames: Stack) -> tuple[Frame, ...]:
    """A stack without the import system, and without what lies below a program: how gpurun has started it."""
    from gpurun.launcher.inspect.stacks import OURS, in_files

    shown = list(in_files(frames))
    while len(shown) > 1 and shown[-1].file.startswith((OURS, "<frozen ")):
        shown.pop()
    return tuple(shown)
