"""Output that several commands share: JSON, the comparison, the outcome of a run."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpurun.launcher.errors import GateError, MachineError, StepsError, UndecidedError

if TYPE_CHECKING:
    from gpurun.launcher.processes.pool import WorkerPools
    from gpurun.launcher.run.running_attempt import Streams
    from gpurun.launcher.rundir.paths import Url
    from gpurun.launcher.rundir.rank_files import RankFiles


def width() -> int:
    """Columns of the terminal; 80 where there is none, so that piped output is the same everywhere."""
    if not sys.stdout.isatty():
        return 80
    return shutil.get_terminal_size((80, 24)).columns


def line_width() -> int:
    """Columns of lines that may be as long as their text where there is no terminal."""
    from gpurun.launcher.report.terminal.layout import NEVER_WRAPPED

    return width() if sys.stdout.isatty() else NEVER_WRAPPED


def show_json(value: Any) -> None:
    """Prints the value for a program; NaN and infinity become `null`."""
    import msgspec

    from gpurun.launcher.logs.lines import escaped

    click.echo(escaped(msgspec.json.format(_encoded(value), indent=2).decode()))


def show_improvement(found: Any, name: str, as_json: bool, writes: bool = False) -> None:
    """Prints what a search of `gpurun improve` has found.

    Args:
        name: of the search, as commands take it.
        writes: whether the command then applies the change.
    """
    from gpurun.launcher.report.terminal.improve import improve_lines

    if as_json:
        show_json({"improve": found})
    else:
        click.echo("\n".join(improve_lines(found, name, writes)))


def _encoded(value: Any) -> bytes:
    """The value as JSON; bytes of file names that are no UTF-8 are shown as `\\udcff`."""
    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_readable(msgspec.to_builtins(value)))


def _readable(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_readable(key): _readable(item) for key, item in value.items()}
        case list() | tuple():
            return [_readable(item) for item in value]
    return value


def print_comparison(
    comparison: Any,
    run: Any,
    as_json: bool,
    reported: Sequence[str] = (),
    details: bool = False,
    err: bool = False,
) -> None:
    """The table for a person, or the whole comparison for a program.

    Args:
        reported: what stderr has shown of failures; not repeated if stdout goes there too.
        details: show all that was found.
        err: the table goes to stderr.
    """
    if not comparison.complete:
        from gpurun.launcher.report.footnotes import with_next_step
        from gpurun.launcher.rundir.claim import progress_of

        comparison = with_next_step(comparison, run.path.name, progress_of(run))
    if as_json:
        from gpurun.launcher.report.metrics import with_figures

        show_json(with_figures(comparison))
        return
    from gpurun.launcher.logs.lines import has_colour
    from gpurun.launcher.report.terminal.table import render_table
    from gpurun.launcher.rundir.store import source_of

    plain, colour = not sys.stdout.isatty(), has_colour(sys.stdout, os.environ)
    name = str(source_of(run.path))
    above = tuple(reported) if _is_one_place() else ()
    height = None if plain else shutil.get_terminal_size().lines
    click.echo(render_table(comparison, width(), plain, name, colour, above, details, height), err=err)


def own_streams(lends_stdout: bool) -> "Streams":
    """This process's stdin and stdout by path, for ranks; of terminals, only one that it may read.

    Args:
        lends_stdout: whether ranks may write to stdout.
    """
    from gpurun.launcher.logs.relay import STDERR_FD, STDOUT_FD
    from gpurun.launcher.processes.incoming_signals import is_in_foreground
    from gpurun.launcher.run.running_attempt import Streams
    from gpurun.launcher.rundir.rank_files import STDOUT, RankFiles

    def path(fd: int, flags: int) -> str:
        """Empty for a socket, and for what belongs to another user (`su`): ranks can't open it."""
        found = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            os.close(os.open(found, flags | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError:
            return ""
        return found

    reads_terminal = is_in_foreground(0)
    stdin = path(0, os.O_RDONLY) if reads_terminal or not os.isatty(0) else ""
    stdout, passes_to, files = "", None if os.isatty(STDERR_FD) else STDERR_FD, None
    if lends_stdout and not os.isatty(STDOUT_FD):
        stdout = path(STDOUT_FD, os.O_WRONLY | os.O_APPEND)
        if os.path.sameopenfile(STDOUT_FD, STDERR_FD):
            # Written by a rank itself, a line would be before the line of stderr that came first.
            stdout, passes_to = "", STDOUT_FD
        elif not stdout:
            files = RankFiles("", redirects=0, tee=0, passed=STDOUT)
    if stdout:
        # A rank opens a file anew: else both would write at places of their own.
        for fd in (STDOUT_FD, STDERR_FD):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    reads_terminal &= bool(stdin)
    return Streams(stdin, stdout, passes_to=passes_to, reads_terminal=reads_terminal, files=files)


def rank_streams(passes_through: bool, lends_stdout: bool) -> "Streams":
    """Streams of ranks: this process's own where a program's pass through, as under torchrun."""
    from gpurun.launcher.run.running_attempt import Streams

    return replace(own_streams(lends_stdout), as_torchrun=True) if passes_through else Streams()


def _is_one_place() -> bool:
    """Whether stdout and stderr go to the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


@contextmanager
def rank_starters(script: str = "") -> "Iterator[WorkerPools]":
    """The starters of a command's ranks; afterwards no process of it is left.

    Forks: nothing heavy may be imported before.

    Args:
        script: the program's path, if it is known.
    """
    from gpurun.launcher.processes.guard import split_process

    with split_process() as guard:
        from gpurun.launcher.processes.pool import early_servers

        with early_servers(guard, script) as pools:
            yield pools


def run_and_print(
    invocation: Callable[[], Any],
    out: "tuple[Path | None, Url | None]",
    resume: "Path | Url | None",
    overrides: tuple[str, ...] = (),
    *,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    require_steps: bool,
    passes_through: bool = False,
    script: str = "",
    only_local_ranks: Collection[int] | None = None,
    files: "RankFiles | None" = None,
    **place: Any,
) -> None:
    """Runs a job and prints the comparison, on node 0.

    Args:
        invocation: what to run; called after the fork, since it imports much.
        out: the run directory, and a URL at which the run is kept too.
        resume: the run to continue.
        overrides: of the command line, where the job is that of the run to continue.
        require_steps: whether a program without a timed step is an error.
        passes_through: whether stdout, unless it is a terminal, takes the program's, as it is; the comparison
            goes to stderr then.
        script: the program's path, if it is known.
        only_local_ranks: those of each node whose output is shown; `None`: all.
        files: what else takes streams of a program's ranks.
        place: the flags about this node.

    Raises:
        GpurunError: what the command ends with.
    """
    directory, keep_at = out
    if resume is None:
        check_writable_on_node_0(directory or Path("runs"), place)
    with rank_starters(script) as pools:
        from gpurun.launcher.cli.options import node_flags
        from gpurun.launcher.run.job import Output
        from gpurun.launcher.rundir.store import fetched
        from gpurun.launcher.start import run_job

        streams = rank_streams(passes_through, not (as_json or quiet))
        if files is not None and streams.files is not None:
            files = replace(files, passed=streams.files.passed)
        files = files or streams.files
        streams = replace(streams, only_rank=only_rank, only_local_ranks=only_local_ranks, files=files)
        output = Output(quiet, only_rank, streams)
        flags = node_flags(**place)
        before = fetched(resume) if isinstance(resume, str) else resume
        finished = run_job(pools, invocation, directory, before, output, flags, keep_at, overrides)
    if finished is None:
        return  # node 0 has the results
    print_comparison(finished.comparison, finished.run, as_json, finished.reported, err=streams.takes_stdout)
    if finished.error is not None:
        raise finished.error
    if require_steps:
        check_steps(finished.comparison)


def check_steps(comparison: Any) -> None:
    """Returns if every program that ended well has a timed step.

    Raises:
        StepsError: one has none; its warnings say why.
    """
    from gpurun.launcher.compare.label import variant_label
    from gpurun.launcher.rundir.records import MEASURED

    programs = [each for each in comparison.variants if each.kind.runs_program and each.status in MEASURED]
    if without := [variant_label(each) for each in programs if each.step_ms is None]:
        raise StepsError(f"no step was timed, which --require-steps asks for: {', '.join(without)}")


def check_writable_on_node_0(directory: Path, place: Mapping[str, Any]) -> None:
    """Returns if a run directory can be written, or if that is left to node 0.

    Raises:
        MachineError: it can't be; if there are other nodes, they get to know that.
    """
    from gpurun.launcher.rundir.paths import check_writable

    try:
        check_writable(directory)
    except MachineError:
        from gpurun.launcher.cli.options import node_flags
        from gpurun.launcher.nodes.rendezvous import facts_without_job
        from gpurun.launcher.start import reported_to_nodes

        flags = node_flags(**place)
        with reported_to_nodes(flags):
            known = facts_without_job(flags, os.environ)
            if known is None or known[0].rank == 0:
                raise


def check_gate(gate: Any, requires_decision: bool = False) -> None:
    """Ends the command by what its gate found.

    Raises:
        GateError: a variant is slower by more than the threshold, or undecided, where that isn't enough.
        UndecidedError: none is, but of some (or all) that can't be said: no gate passes them silently.
    """
    from gpurun.launcher.compare.gate import NOT_SLOWER, SLOWER, percent_text

    if gate.outcome == SLOWER:
        names = ", ".join(row.label for row in gate.of(SLOWER))
        raise GateError(f"the gate fails: slower by more than {percent_text(gate)}: {names}")
    if gate.outcome != NOT_SLOWER:
        error = GateError if requires_decision else UndecidedError
        raise error(f"the gate is undecided at {percent_text(gate)}, so it doesn't pass")


def warn(text: str) -> None:
    """Says on stderr what doesn't end the command."""
    click.echo(f"gpurun: {text}", err=True)


SAID_FROM_BYTES = 500_000_000
"""A terminal is warned of more steps; to read so many takes some seconds."""


def say_if_large(*runs: Any) -> None:
    """Says on a terminal why nothing is shown for a while."""
    from gpurun.launcher.rundir.paths import num_bytes

    num = sum(num_bytes(file) for run in runs for file in run.path.glob("variants/*/rank*.jsonl"))
    if num >= SAID_FROM_BYTES and sys.stderr.isatty():
        warn(f"reading {num / 1e9:.1f} GB of recorded steps … (Ctrl-C ends it)")
