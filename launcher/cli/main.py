"""The command line: one table of commands. Only this package prints and exits."""

import gc
import os
import re
import shlex
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from gpurun.launcher import __version__
from gpurun.launcher.cli.completion import VARIABLE, job_files, suggestions
from gpurun.launcher.errors import GpurunError, Interrupted, SpecError


@dataclass(frozen=True)
class Entry:
    """A command, which is imported when it is used."""

    module: str
    """In `commands/`."""
    function: str
    summary: str
    """One line of `gpurun --help`: at most 65 characters, so that none is cut in 80 columns."""


GROUPS: dict[str, dict[str, Entry]] = {
    "Run": {
        "job": Entry("job", "job", "Run a job file; the word `job` may be left out."),
        "run": Entry("job", "run", "Run a training script unchanged; time and trace its steps."),
        "torchrun": Entry("job", "torchrun", "Run a command line of torchrun: write gpurun in front of it."),
        "check": Entry("job", "check", "Check a job file and print its plan; runs nothing."),
        "init": Entry("job_file", "init", "Write a commented job file to start from."),
        "submit": Entry("submit", "submit", "Write a batch script for a job file, and submit it."),
    },
    "Results": {
        "report": Entry("report", "report", "Show the results of a run again; runs nothing."),
        "explain": Entry("report", "explain", "Explain a finding of a report by its code."),
        "runs": Entry("runs", "runs", "List runs, the newest first, or delete some."),
        "view": Entry("report", "view", "Open a run, or a directory of runs or traces, in TensorBoard."),
        "trace": Entry("traces", "trace", "Show where the time goes in Kineto traces."),
    },
    "Compare and decide": {
        "improve": Entry("improve", "improve", "Try every remedy on a script or job; keep what is proven."),
        "tune": Entry("job", "tune", "Find the fastest of hundreds of combinations, in minutes."),
        "gate": Entry("gate", "gate", "Is the code slower than at another commit? For CI."),
        "diff": Entry("traces", "diff", "Compare two runs, or two directories of traces."),
    },
    "While it runs": {
        "stacks": Entry("runs", "stacks", "Show what every rank of a running job is doing."),
        "capture": Entry("runs", "capture", "Take profiler traces of a running job."),
        "logs": Entry("runs", "logs", "Print what the ranks of a run have written."),
    },
    "This machine and help": {
        "devices": Entry("job_file", "devices", "Show this machine's GPUs and CPU."),
        "selftest": Entry("selftest", "selftest", "Check that this machine's devices and links work."),
        "help": Entry("job_file", "help_", "Show the help of a command; --all lists all commands."),
    },
}
"""Commands by the title over them in `gpurun --help`."""
FURTHER = {
    "metrics": Entry("report", "metrics", "Serve the live figures of a run to Prometheus."),
    "examples": Entry("job_file", "examples", "List, show or copy the examples that come with gpurun."),
    "schema": Entry("job_file", "schema", "Print the JSON Schema of job files, for editors."),
    "completion": Entry("job_file", "completion", "Print what makes bash, zsh or fish complete commands."),
    "workloads": Entry("job_file", "workloads", "List the built-in workloads and their parameters."),
}
"""Commands that `gpurun help --all` lists, too."""
COMMANDS = {name: entry for group in (*GROUPS.values(), FURTHER) for name, entry in group.items()}
"""All commands by name."""


SHOWS_ALL = "gpurun.all"
"""Whether the help lists further commands."""


class Commands(click.Group):
    """The commands of `COMMANDS`. The first argument may also be a job file: `gpurun job.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "-h", "--version"}
        args = args or ["--help"]
        if (line := behind_own_options(args)) is not None:
            args = line
        elif args[0] == "-m" or (len(args) > 1 and (args[0].startswith("torch.") or "/" in args[0])):
            refuse_launcher(args)
        if line is None and args[0] not in own and args[0] not in COMMANDS and not is_typo(args[0]):
            args = ["job", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = import_module(f"gpurun.launcher.cli.commands.{entry.module}")
        command = getattr(module, entry.function)
        return command if isinstance(command, click.Command) else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands and, since `job` may be left out, job files."""
        commands = super().shell_complete(ctx, incomplete)
        files = job_files(ctx, self.params[0], incomplete)
        return [*commands, *(file for file in files if file.type == "plain")] or files

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = {**GROUPS, "Further": FURTHER} if ctx.meta.get(SHOWS_ALL) else GROUPS
        width = max(map(len, COMMANDS))
        formatter.write_paragraph()
        for title, group in groups.items():
            formatter.write(f"{title}:\n")
            for name, entry in group.items():
                formatter.write(f"  {name:{width}}  {entry.summary}\n")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            import difflib

            refuse_launcher(args)
            near = difflib.get_close_matches(args[0], [*COMMANDS, "help", "--version"], n=1)
            hint = f"did you mean `gpurun {near[0]}`?" if near else "`gpurun --help` lists the commands"
            if (at := next((at for at, word in enumerate(args) if word in GOES_BEHIND), 0)) > 0:
                hint = f"what starts gpurun goes before it: {shlex.join([*args[:at], 'gpurun', *args[at:]])}"
            raise SpecError(f"there is no command or job file {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


TORCHRUN = "torchrun"
GOES_BEHIND = frozenset({TORCHRUN, "run"})
"""First words of a line behind `gpurun`."""


def behind_own_options(args: list[str]) -> list[str] | None:
    """The arguments of the command where `torchrun` stands behind options only, which are gpurun's."""
    if TORCHRUN not in args or not (args[0].startswith("-") or args[0] == TORCHRUN):
        return None
    from gpurun.launcher.cli.commands.job import behind_options, torchrun

    line = behind_options(args, torchrun.params)
    if line[:1] != [TORCHRUN]:
        return None
    own, rest = args[: len(args) - len(line)], line[1:]
    is_help = rest[:1] in (["--help"], ["-h"])
    return [TORCHRUN, *own, *(rest[:1] if is_help else ["--", *rest])]


def refuse_launcher(args: list[str]) -> None:
    """Says how a line is written that begins with another launcher.

    Raises:
        SpecError: it does.
    """
    from gpurun.launcher.cli.commands.job import without_launcher

    if (meant := without_launcher(args)) is not None:
        raise SpecError(meant)


def is_typo(word: str) -> bool:
    """Whether a first word is more likely a mistyped command than a job file."""
    looks_like_file = word.startswith("-") or "." in word or "/" in word or Path(word).exists()
    return not looks_like_file


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="Example: gpurun init && gpurun job.yaml",
)
@click.version_option(__version__, prog_name="gpurun")
def cli() -> None:
    """Measure and compare ways to split a training batch over this machine's devices.

    \b
    gpurun JOB.yaml [--out RUN] [--json] [--resume [RUN]] [--set KEY=VALUE]
    gpurun run TRAIN.py [--devices cpu:2] [-- ARGS...]
    """


def missing_argument(param: click.Parameter, ctx: click.Context) -> str:
    """The message for a missing argument, and where to get one or to see an example."""
    from gpurun.launcher.cli.options import JOB_METAVAR, MISSING_JOB

    name = param.metavar or param.human_readable_name.upper()
    if name == JOB_METAVAR:
        return MISSING_JOB
    what = f"option {param.opts[0]}" if isinstance(param, click.Option) else "argument"
    return f"missing {what} {name}; `gpurun {ctx.info_name} --help` shows an example"


def _choice_meant(error: click.ClickException, message: str) -> str:
    """`; did you mean wall?`: the option's value that is most like a wrong value; empty if none is."""
    import difflib

    kind = error.param.type if isinstance(error, click.BadParameter) and error.param else None
    wrong = re.search(r"'([^']*)' is not one of", message)
    if not isinstance(kind, click.Choice) or wrong is None:
        return ""
    near = difflib.get_close_matches(wrong[1].lower(), [str(choice) for choice in kind.choices], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def usage_message(error: click.ClickException) -> str:
    """A mistake on the command line in words, with where to read on."""
    ctx = getattr(error, "ctx", None)
    if isinstance(error, click.MissingParameter) and error.param is not None and ctx is not None:
        return missing_argument(error.param, ctx)
    if ctx is not None and (command := str(ctx.params.get("job_file"))) in COMMANDS:
        return (
            f"options come after the command: gpurun {command} … --option\n    see `gpurun {command} --help`"
        )
    if isinstance(error, click.NoSuchOption):
        from gpurun.launcher.cli.options import option_meant

        if sys.argv[1:2] and sys.argv[1].endswith(".py"):
            line = shlex.join(["gpurun", "run", sys.argv[1], "--", *sys.argv[2:]])
            return f"{sys.argv[1]} is a program, not a job file\n    to run it: {line}"
        text = f"there is no option {error.option_name}{option_meant(error)}"
    else:
        message = error.format_message()
        text = f"{message[0].lower()}{message[1:]}".rstrip(".") + _choice_meant(error, message)
    return f"{text}\n    see `{ctx.command_path} --help`" if ctx is not None else text


def shown(error: GpurunError) -> int:
    """Prints what happened; the exit code for it."""
    for mistake in error.problems if isinstance(error, SpecError) else (error,):
        click.echo(f"gpurun: {mistake}", err=True)
    return error.exit_code


def main() -> None:
    """Runs the command.

    Users' mistakes and exhausted limits become a message and an exit code; our own keep their traceback.
    """
    if request := os.environ.get(VARIABLE):
        click.echo(suggestions(cli, request))
        return
    gc.disable()  # imports make many objects and no garbage: looking for some is a tenth of the start-up
    try:
        code = cli.main(prog_name="gpurun", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(Interrupted.exit_code)
    except click.ClickException as error:
        click.echo(f"gpurun: {usage_message(error)}", err=True)
        sys.exit(error.exit_code)
    except GpurunError as error:
        sys.exit(shown(error))
    except (OSError, RuntimeError, MemoryError) as error:
        from gpurun.launcher.machine.resource_limits import exhausted

        if (limit := exhausted(error)) is None:
            raise
        sys.exit(shown(limit))
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
