"""`gpurun stacks`, `capture` and `logs`: a run that is in progress."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpurun.launcher.cli.completion import launch_ids
from gpurun.launcher.cli.options import WholeNumber, json_option, parse_ranks, run_argument, running_argument
from gpurun.launcher.cli.output import show_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gpurun.launcher.inspect.hang_diagnosis import Hang, RankView
    from gpurun.launcher.inspect.stacks import Frame, Stack


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
    from gpurun.launcher.inspect.questions import node_names, take_snapshots
    from gpurun.launcher.run.open import find_run
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
    from gpurun.launcher.inspect.capture import capture_running
    from gpurun.launcher.run.open import find_run

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
    import os

    from gpurun.launcher.cli.streams import is_reader_gone
    from gpurun.launcher.logs.lines import has_colour
    from gpurun.launcher.logs.relay import all_lines, newest_lines
    from gpurun.launcher.run.open import find_run

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
