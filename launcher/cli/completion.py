"""Shell completion of a file, a run, a key or a name; click itself completes commands and options."""

import re
from glob import escape, iglob
from itertools import islice

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from gpurun.launcher.errors import GpurunError

VARIABLE = "_GPURUN_COMPLETE"
"""Set by the lines that `gpurun completion` prints when they want to know how a command goes on."""
SHELLS = ("bash", "zsh", "fish")
MOST = 200
"""Suggestions, so that a directory of thousands of runs is completed at once."""
_PLAIN = re.compile(r"[\w./+=:@%-][\w./+=:@%~-]*")
"""Names that mean nothing else to a shell. A directory may be anyone's, and bash puts `$(…)` into the line as
it is; files of other names are suggested, and quoted, by the shell itself."""

NO_SPACE = (
    ("COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *= ]] && compopt -o nospace"),
    ('completions+=("$key")', '[[ "$key" == *= ]] && values+=("$key") || completions+=("$key")'),
    ("local -a response", "local -a response values"),
    (
        "compadd -U -V unsorted -a completions",
        "compadd -U -V unsorted -a completions\n    fi\n\n"
        '    if [ -n "$values" ]; then\n        compadd -U -S "" -V unsorted -a values',
    ),
)
"""In click's lines → in ours: after a key, `steps.rounds=`, its value follows without a space.

fish puts none after `=` anyway.
"""


def completer(command: click.Command, shell: str) -> ShellComplete:
    """Returns click's completion class for that shell, one of `SHELLS`."""
    found = get_completion_class(shell)
    assert found is not None
    return found(command, {}, "gpurun", VARIABLE)


def lines_for(command: click.Command, shell: str) -> str:
    """The lines that `gpurun completion` prints for a shell."""
    lines = completer(command, shell).source()
    for theirs, ours in NO_SPACE:
        lines = lines.replace(theirs, ours)
    return lines


def suggestions(command: click.Command, request: str) -> str:
    """The suggestions that the shell asks for; click would write them as bytes, which our output refuses.

    Args:
        command: all of `gpurun`.
        request: `bash_complete`, or that of another shell.
    """
    shell = request.partition("_")[0]
    try:
        return completer(command, shell).complete() if shell in SHELLS else ""
    except GpurunError:
        return ""  # such as a run that isn't there: nothing is known of it


def job_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Job files that begin with `incomplete`, or are in a directory that does."""
    start = escape(incomplete)
    return matching(incomplete, f"{start}*.yaml", f"{start}*.yml", f"{start}*/*.yaml")


def programs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Programs that begin with `incomplete`, or are in a directory that does."""
    return matching(incomplete, f"{escape(incomplete)}*.py", f"{escape(incomplete)}*/*.py")


def run_directories(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Runs below `runs/`; `latest` is the newest of its name."""
    return matching(incomplete, "runs/*/latest", "runs/*/*/")


def launch_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Launches of the run that the command line names already."""
    from gpurun.launcher.run.find import find_run

    if (run := ctx.params["run"]) is None:  # click has given up on the line
        return []
    launches = find_run(run).path / "launches"
    names = (path.name for path in sorted(launches.glob(f"{escape(incomplete)}*")))
    return [name for name in names if _PLAIN.fullmatch(name)]


def job_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Keys of a job file, with the equals sign that `--set` wants."""
    from gpurun.launcher.jobfile.model import SECTIONS, JobSpec

    within = [f"{name}.{key}" for name, section in SECTIONS.items() for key in section.keys]
    keys = [key for key in JobSpec.keys if key not in SECTIONS]
    return [f"{key}=" for key in (*keys, *within) if key.startswith(incomplete)]


def device_words(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Words that `--devices` takes on any machine; numbers of GPUs aren't completed."""
    from gpurun.launcher.jobfile.values import AUTO, GPU_KINDS
    from gpurun.launcher.machine.accelerators import CPU

    return [word for word in (AUTO, CPU.device(2), *GPU_KINDS) if word.startswith(incomplete)]


def workload_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Built-in workloads."""
    from gpurun.workloads.registry import BUILTINS

    return [name for name in BUILTINS if name.startswith(incomplete)]


def matching(incomplete: str, *patterns: str) -> list[CompletionItem]:
    """The paths of the patterns that begin with `incomplete`; where there is none, what the shell finds."""
    paths = (path for pattern in patterns for path in iglob(pattern) if path.startswith(incomplete))
    found = filter(_PLAIN.fullmatch, paths)
    return [CompletionItem(path) for path in sorted(set(islice(found, MOST)))] or [
        CompletionItem(incomplete, type="file")
    ]
