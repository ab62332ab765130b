"""`gpurun improve`: what makes a program or a workload faster, proven, as a change of its files."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gpurun.launcher.cli.completion import programs
from gpurun.launcher.cli.options import (
    devices_option,
    json_option,
    only_rank_option,
    out_option,
    parse_wait,
    quiet_option,
    set_option,
)
from gpurun.launcher.cli.output import rank_starters, show_improvement
from gpurun.launcher.errors import SpecError


@click.command()
@click.argument("words", nargs=-1, metavar="[SCRIPT.py | JOB.yaml] [-- ARGS...]", shell_complete=programs)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@devices_option
@click.option(
    "--budget", "budget_s", callback=parse_wait, metavar="TIME", help="The most time; default: 15m."
)
@out_option
@click.option(
    "--resume", type=click.Path(path_type=Path, exists=True), metavar="RUN",
    help="Continue a search, or apply its change.",
)  # fmt: skip
@click.option(
    "--allow-other-random-numbers",
    "allows_others",
    is_flag=True,
    help="Also keep what draws random numbers in another order, and trains the same otherwise.",
)
@click.option("--numerics", is_flag=True, help="Also try what computes with less precision, such as bf16.")
@click.option("--write", is_flag=True, help="Apply the change to your files, after asking.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option("--force", is_flag=True, help="Also files that git doesn't track, or with hard links.")
@only_rank_option
@quiet_option
@json_option
@set_option
def improve(
    words: tuple[str, ...],
    module: str | None,
    devices: str,
    budget_s: float | None,
    out: Path | None,
    resume: Path | None,
    allows_others: bool,
    numerics: bool,
    write: bool,
    yes: bool,
    force: bool,
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Try every remedy on a program or workload, and keep those that are proven to make it faster.

    A program's DataLoaders, optimizers and DistributedDataParallel get other arguments from outside, a
    workload's job other keys. What helps alone is compared together, and without each part, in launches of
    their own. A change that trains otherwise is kept only where an option allows it. Ctrl-C keeps what was
    measured; --resume goes on from there.

    Example: gpurun improve train.py --devices cpu:2 -- --epochs 1

    Example: gpurun improve job.yaml --budget 5m

    Exit codes: 0 ok, also if --write has nothing to apply, 2 the command line is wrong, nothing can be
    changed from outside or a file has changed, 3 the machine lacks what it asks for, 4 it fails as it is, 130
    interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    began_s = time.monotonic()
    quit_on_interrupt()
    resume = search_to_resume(words, module, resume, devices, out)
    if write and not yes and not sys.stdin.isatty():
        raise SpecError("--write asks before it changes files: add --yes where nobody can answer")
    if resume is None:
        check_writable(out or Path("runs"))
    given = given_by(words, module, devices, overrides, resume)
    script = "" if module is not None or not words else words[0]
    how = (out, resume, only_rank, quiet, allows_others, numerics, began_s)
    found, path, error = finished(given, script, budget_s, *how)
    if write and resume is not None:  # whose answer was shown before
        check_change(found, given().directory)
    is_last = as_json and write and yes and error is None
    if not is_last:
        show_improvement(found, str(path), as_json, writes=write)
    if error is not None:
        raise error
    try:
        if write and apply(found, given(), yes, force):
            found = noted_written(found, path, given().directory)
    finally:
        if is_last:  # it says whether the change is written
            show_improvement(found, str(path), as_json)


def search_to_resume(
    words: tuple[str, ...],
    module: str | None,
    resume: Path | None,
    devices: str = "auto",
    out: Path | None = None,
) -> Path | None:
    """The directory of the search that is resumed; `None` where a program begins one.

    Raises:
        SpecError: the command line doesn't name exactly one program or search.
    """
    if resume is not None and (words or module is not None):
        raise SpecError("--resume goes on with the program of that search: leave it and its arguments out")
    if resume is not None and (out is not None or devices != "auto"):
        raise SpecError("--resume goes on in that search, on its devices: leave --out and --devices out")
    if resume is None and module is None and not words:
        raise SpecError(
            "missing argument SCRIPT.py or JOB.yaml; or run a module: gpurun improve -m package.train"
        )
    if resume is None:
        return None
    from gpurun.launcher.run.find import search_directory

    if (found := search_directory(resume)) is None:
        raise SpecError(f"no search of `gpurun improve` is in {resume.absolute()}")
    return found


def given_by(
    words: tuple[str, ...],
    module: str | None,
    devices: str,
    overrides: tuple[str, ...],
    resume: Path | None,
) -> Callable[[], Any]:
    """Finds the command line of the program: after the fork, since it imports much."""

    def invocation() -> Any:
        from gpurun.launcher.run.open import measured_in, program_invocation, read_invocation
        from gpurun.launcher.rundir.paths import PLAN, check_owner

        if resume is not None:
            check_owner(resume)  # what it says is run, and written into files
            if not (resume / "1-original" / PLAN).is_file():
                raise SpecError(f"the search in {resume} ended before its first launch: begin anew")
            if not (measured := measured_in(resume / "1-original")).is_dir():
                raise SpecError(f"the search was made in {measured}: --resume and --write work there only")
            first = read_invocation(resume / "1-original")
            # The last is the limit of its launches, which follows from the budget.
            return replace(first, overrides=(*first.overrides[:-1], *overrides))
        if module is None and words[0].endswith((".yaml", ".yml")):
            return job_invocation(words, devices, overrides)
        script, args = (None, words) if module is not None else (words[0], words[1:])
        return program_invocation(script, module, args, devices, overrides, {})

    return invocation


def job_invocation(words: tuple[str, ...], devices: str, overrides: tuple[str, ...]) -> Any:
    """The command line of a job file; `devices` are those that the command states, or `auto`.

    Raises:
        SpecError: arguments follow it, which belong into the file.
    """
    from gpurun.launcher.jobfile.load import split_devices
    from gpurun.launcher.run.open import Invocation

    if words[1:]:
        raise SpecError(f"a job file takes no arguments: {' '.join(words[1:])}")
    stated = () if devices == "auto" else (f"devices={json.dumps(split_devices(devices))}",)
    return Invocation(Path(words[0]), (*stated, *overrides))


def finished(
    given: Callable[[], Any],
    script: str,
    budget_s: float | None,
    out: Path | None,
    resume: Path | None,
    only_rank: int | None,
    quiet: bool,
    allows_others: bool,
    numerics: bool,
    began_s: float,
) -> Any:
    """The finished search, its directory, and the error that it ends with; no process of it is left."""
    with rank_starters(script) as pools:
        import gc

        from gpurun.launcher.improve.improve import run_improve
        from gpurun.launcher.run.job import Output
        from gpurun.launcher.run.open import check_free, load_invocation, name_newest, new_directory

        gc.enable()
        invocation = given()
        name = f"{load_invocation(invocation).name}-improve"
        if resume is None and out is not None:
            check_free(out)
        path = resume or out or new_directory(Path("runs") / name)
        output = Output(quiet, only_rank, is_part=True)

        def say(text: str) -> None:
            click.echo(text, err=True)

        options = (allows_others, numerics, began_s)
        found, error = run_improve(pools, invocation, budget_s, path, output, say, *options)
        if not (resume or out):
            name_newest(path)
        return found, path, error


def check_change(found: Any, directory: Path) -> None:
    """Returns if the change that an earlier command has found can be written from here.

    Args:
        directory: the one in which it was measured, of which this may be a copy.

    Raises:
        SpecError: it can't, or a file isn't as it was measured.
    """
    from gpurun.launcher.improve.improve import changes_to_write

    here = Path.cwd()
    if not (here.is_relative_to(directory) or directory.is_relative_to(here)):
        raise SpecError(f"{found.name} was measured in {directory}: --write works there only")
    if not found.written:
        changes_to_write(found, directory)


def apply(found: Any, given: Any, yes: bool, force: bool) -> bool:
    """Writes the change into the files of the program, or of the job; whether it has changed some.

    Raises:
        SpecError: a file isn't as it was measured, or can't be changed.
    """
    from gpurun.launcher.improve.improve import changes_to_write
    from gpurun.launcher.improve.rewrite import write_changes
    from gpurun.launcher.inspect.stacks import file_hash

    left = found.written_code.items()
    if left and all(file_hash(given.directory / name) == was for name, was in left):
        click.echo("no file is changed: the change has been written already", err=True)
        return False
    changes = changes_to_write(found, given.directory)
    if not changes:
        why = (
            "what is kept is for you to write or set, see above"
            if found.kept
            else "nothing is proven to help"
        )
        click.echo(f"no file is changed: {why}", err=True)
        return False
    names = ", ".join(str(path.relative_to(given.directory)) for path in changes)
    if not yes and not click.confirm(f"Change {names}?", err=True):
        return False
    write_changes(changes, given.directory, force)
    click.echo(f"changed {', '.join(str(path) for path in changes)}", err=True)
    return True


def noted_written(found: Any, path: Path, directory: Path) -> Any:
    """What a search has found, with the note that its change is in the files; shows what to do next."""
    from gpurun.launcher.inspect.stacks import file_hash
    from gpurun.launcher.report.terminal.improve import answer
    from gpurun.launcher.rundir.files import write_json
    from gpurun.launcher.rundir.paths import IMPROVEMENT

    left = {name: file_hash(directory / name) for name in found.code}
    written = replace(found, written=True, written_code=left)
    write_json(path / IMPROVEMENT, written)
    click.echo(f"next: {dict(answer(written, str(path)))['Next']}", err=True)
    return written
