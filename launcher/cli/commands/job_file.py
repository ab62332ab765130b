"""Commands that help to write job files and commands: `gpurun init`, `examples`, `schema` and `completion`.

`gpurun workloads` and `gpurun devices` show what is built in, and what this machine has.
"""

import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from gpurun.launcher.cli.completion import SHELLS, lines_for, workload_names
from gpurun.launcher.cli.options import json_option
from gpurun.launcher.cli.output import line_width, show_json, width
from gpurun.launcher.errors import Problem, SpecError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default="job.yaml", metavar="[JOB.yaml]")
@click.option(
    "--workload",
    metavar="FILE.py:FUNCTION",
    help="Train this one, which is looked for next to the job file and not run, or a built-in.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(path: Path, workload: str | None, force: bool) -> None:
    """Write a commented job file to start from.

    Example: gpurun init job.yaml --workload train.py:build
    """
    from gpurun.launcher.errors import no_directory
    from gpurun.launcher.jobfile.schema import SCHEMA_FILE, job_schema, job_template
    from gpurun.launcher.rundir.files import write_bytes, write_json

    if path.is_dir():
        raise SpecError(f"{path} is a directory; name a file in it: gpurun init {path / 'job.yaml'}")
    if path.exists() and not force:
        raise SpecError(f"{path} exists; --force overwrites it")
    if not path.parent.exists():
        command = f"mkdir -p {shlex.quote(str(path.parent))}"
        raise SpecError(f"{no_directory(path.parent)} first: {command}")
    params = checked_workload(workload, path.parent) if workload is not None else ()
    write_bytes(path, job_template(workload, params).encode())
    write_json(path.parent / SCHEMA_FILE, job_schema())
    click.echo(
        f"wrote {path}, and {path.parent / SCHEMA_FILE} for editors\n"
        f"next: gpurun check {path}, then: gpurun {path}"
    )


def checked_workload(name: str, job_dir: Path) -> Sequence[str]:
    """The parameters of a workload that a job in this directory may name, as far as its source shows them.

    Raises:
        SpecError: it isn't there, or trains nothing.
    """
    from gpurun.launcher.jobfile.checks.code import function_mistakes, params_taken
    from gpurun.launcher.jobfile.kinds import workload_kind
    from gpurun.launcher.jobfile.model import JobSpec
    from gpurun.launcher.jobfile.section import InvalidValue
    from gpurun.launcher.jobfile.values import parse_workload

    try:
        parse_workload(name)
    except InvalidValue as error:
        raise SpecError(Problem(f"--workload: {error.message}", error.hint)) from error
    if problems := [*function_mistakes(JobSpec(workload=name), job_dir, ())]:
        raise SpecError(*problems)
    if ":" not in name and not workload_kind(name).trains:
        raise SpecError(
            Problem(f"{name} is a micro-benchmark, whose jobs have other keys", "`gpurun examples` has some")
        )
    return params_taken(name, job_dir)


@click.command()
@click.argument(
    "names", metavar="[NAME...]", nargs=-1, shell_complete=lambda _, __, start: examples_from(start)
)
@click.option("--copy", type=click.Path(path_type=Path), metavar="DIR", help="Copy them to DIR instead.")
def examples(names: tuple[str, ...], copy: Path | None) -> None:
    """List the examples that come with gpurun, show some, or copy them.

    A job file is copied with the programs that it names; without a NAME, all are copied.

    Example: gpurun examples --copy examples
    """
    from gpurun.launcher.units import plural

    found = [named_example(name) for name in names]
    if copy is not None:
        files, num_written = copy_examples(found or example_names(), copy)
        jobs = [file for file in files if file.suffix == ".yaml"]
        jobs.sort(key=lambda file: file.name != "quickstart.yaml")
        following = f"; next: gpurun {jobs[0]}" if jobs else ""
        click.echo(f"wrote {plural(num_written, 'file')}{following}")
    elif names:
        click.echo("\n\n".join((examples_directory() / name).read_text().rstrip() for name in found))
    else:
        indent = " " * (max(map(len, example_names())) + 2)
        for name in example_names():
            lines = textwrap.wrap(subject(name), line_width() - len(indent))
            click.echo(name.ljust(len(indent)) + f"\n{indent}".join(lines))
        click.echo("\nTo show one: gpurun examples NAME; to copy all: gpurun examples --copy examples")


def examples_directory() -> Path:
    """Part of the package: in a checkout a link to `examples/`."""
    import gpurun

    return Path(gpurun.__file__).parent / "examples"


def example_names() -> list[str]:
    """Paths below the directory, job files first."""
    root = examples_directory()
    found = (
        path for pattern in ("*.yaml", "*/*.yaml", "*.py", "*/*.py") for path in sorted(root.glob(pattern))
    )
    return [path.relative_to(root).as_posix() for path in found]


def examples_from(start: str) -> list[str]:
    """Examples whose names begin so, with or without their directory."""
    return [name for name in example_names() if name.startswith(start) or Path(name).name.startswith(start)]


def named_example(name: str) -> str:
    """The example of that name, with or without directory and ending; job files come first.

    Raises:
        SpecError: there is none.
    """
    from gpurun.launcher.jobfile.yaml.describe import nearest

    known = {
        key: example
        for example in reversed(example_names())
        for key in (Path(example).stem, Path(example).name, example)
    }
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else "`gpurun examples` lists them"
        raise SpecError(f"there is no example {name!r}; {hint}")
    return known[name]


def subject(name: str) -> str:
    """The first sentence of a job file's comment, or of a program's docstring."""
    first = (examples_directory() / name).read_text().partition("\n")[0].strip('#" ')
    return re.split(r"(?<=[.?])\s+(?=[A-Z])|:\s{2,}", first)[0].rstrip(":.")


def copy_examples(names: Sequence[str], directory: Path) -> tuple[list[Path], int]:
    """Copies examples and the programs that they name; their files, and how many of them were missing.

    Raises:
        SpecError: one of them is there with another content.
        MachineError: the directory can't be written.
    """
    from gpurun.launcher.rundir.files import write_bytes

    wanted = dict.fromkeys(file for name in names for file in (name, *programs_of(name)))
    contents = {directory / file: (examples_directory() / file).read_bytes() for file in wanted}
    missing = {path: content for path, content in contents.items() if not path.exists()}
    there = [path for path in contents if path not in missing]
    if other := next((path for path in there if not _holds(path, contents[path])), None):
        raise SpecError(f"{other} exists with another content; choose another directory")
    for path, content in missing.items():
        write_bytes(path, content)
    return list(contents), len(missing)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


def programs_of(name: str) -> list[str]:
    """The examples next to a job file that it names as its program or workload."""
    job = examples_directory() / name
    named = re.findall(r"^(?:script|workload): (\w+\.py)", job.read_text(), re.MULTILINE)
    return [Path(name).with_name(file).as_posix() for file in named if job.with_name(file).exists()]


@click.command()
@click.argument("of", type=click.Choice(("job", "improve")), default="job", metavar="[job|improve]")
def schema(of: str) -> None:
    """Print the JSON Schema of job files, for editors; or of what `gpurun improve --json` prints.

    Example: gpurun schema > job.schema.json
    """
    from gpurun.launcher.jobfile.schema import improvement_schema, job_schema

    show_json(job_schema() if of == "job" else improvement_schema())


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), metavar="|".join(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the lines that make a shell complete commands, options, files, runs, keys and names.

    For zsh, put them in ~/.zshrc after compinit; for fish, in ~/.config/fish/completions/gpurun.fish.

    Example: gpurun completion bash >> ~/.bashrc
    """
    click.echo(lines_for(ctx.find_root().command, shell))


@click.command("workloads")
@click.argument("names", metavar="[NAME...]", nargs=-1, shell_complete=workload_names)
@json_option
def workloads(names: tuple[str, ...], as_json: bool) -> None:
    """List the built-in workloads: what they do, what bounds them, and their parameters.

    With a NAME, show only that workload and what each of its parameters means.

    Example: gpurun workloads gpt
    """
    from gpurun.launcher.jobfile.params import catalogue, render_catalogue, render_entry

    entries = [entry for entry in catalogue() if entry.name in _known(names)] if names else catalogue()
    if as_json:
        show_json({"schema": 1, "workloads": entries})
    elif names:
        click.echo("\n\n".join(render_entry(entry, width()) for entry in entries))
    else:
        click.echo(render_catalogue(width()))


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, all of which are built-in workloads.

    Raises:
        SpecError: one is not.
    """
    from gpurun.launcher.jobfile.kinds import no_such_builtin
    from gpurun.workloads.registry import BUILTINS

    for name in names:
        if name not in BUILTINS:
            raise SpecError(Problem(*no_such_builtin(name)))
    return names


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """Show this machine's GPUs and CPU.

    Example: gpurun devices --json
    """
    from gpurun.launcher.machine.host import inspect_machine

    machine = inspect_machine()
    if as_json:
        show_json(machine)
        return
    from gpurun.launcher.report.terminal.hardware import render_devices

    click.echo(render_devices(machine, width()))


@click.command("help")
@click.argument("command", required=False)
@click.option("--all", "shows_all", is_flag=True, help="List all commands.")
@click.pass_context
def help_(ctx: click.Context, command: str | None, shows_all: bool) -> None:
    """Show the help of a command.

    Example: gpurun help run
    """
    from gpurun.launcher.cli.main import SHOWS_ALL, cli

    group = ctx.parent or ctx
    if command is None:
        group.meta[SHOWS_ALL] = shows_all
        click.echo(cli.get_help(group))
        return
    found = cli.get_command(group, command)
    if found is None:
        raise SpecError(f"there is no command {command!r}; `gpurun help --all` lists the commands")
    click.echo(found.get_help(click.Context(found, info_name=command, parent=group)))
