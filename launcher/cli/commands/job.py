"""`gpurun JOB.yaml` and `gpurun check` run a job file or show what it would do, `gpurun tune` searches it.

`gpurun run` needs none: it starts a program as one would with `torchrun`, `gpurun torchrun` by such a line.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import dropwhile, takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpurun.launcher.cli.completion import job_files, programs
from gpurun.launcher.cli.options import (
    JOB_METAVAR,
    MISSING_JOB,
    RunPath,
    devices_option,
    hang_timeout_option,
    job_argument,
    json_option,
    nodes_option,
    only_rank_option,
    option_meant,
    out_or_url_option,
    parse_wait,
    quiet_option,
    run_options,
    set_option,
    with_hang_timeout,
    written_url,
)
from gpurun.launcher.cli.output import print_comparison, rank_starters, run_and_print, show_json, width
from gpurun.launcher.errors import GpurunError, Problem, SpecError, StepsError

if TYPE_CHECKING:
    from gpurun.launcher.jobfile.torchrun import TorchrunLine
    from gpurun.launcher.plan.estimate import Earlier
    from gpurun.launcher.plan.model import Plan
    from gpurun.launcher.rundir.paths import Url


MISSING_RUN = (
    f"missing argument RUN or {JOB_METAVAR}; `gpurun --resume runs/NAME/latest` continues that run, "
    f"`gpurun {JOB_METAVAR} --resume` the newest one of the job"
)


@click.command("job")
@click.argument(
    "job_file",
    type=click.Path(path_type=Path),
    metavar="[JOB.yaml]",
    required=False,
    shell_complete=job_files,
)
@out_or_url_option
@click.option(
    "--resume",
    type=RunPath(written_url),
    is_flag=False,
    flag_value="latest",
    metavar="[RUN]",
    help="Continue a run, by default the newest one of this job; only what is missing is measured.",
)
@hang_timeout_option
@run_options
def job(
    job_file: Path | None,
    out: "tuple[Path | None, Url | None]",
    resume: "Path | Url | None",
    hang_timeout_s: float | None,
    overrides: tuple[str, ...],
    **how: Any,
) -> None:
    """Run every variant of JOB.yaml, measure and compare them.

    Example: gpurun examples/quickstart.yaml --set steps.rounds=12

    Exit codes: 0 ok (also with variants that are out of memory, skipped or unsteady), 2 the job file or the
    command line is wrong, 3 the machine lacks what the job needs, or results are missing at the URL of --out,
    4 a variant failed, timed out or hung, or all of them ran out of memory, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt

    quit_on_interrupt()  # until `run_job` handles it; the supervisor cleans up whatever exists by then
    if job_file is None and isinstance(resume, Path) and names_job_file(resume):
        job_file, resume = resume, Path("latest")  # `gpurun --resume job.yaml`
    if job_file is None and (resume is None or is_missing(resume)):
        raise SpecError(MISSING_JOB if resume is None else MISSING_RUN)
    overrides = with_hang_timeout(overrides, hang_timeout_s)

    run_and_print(named_job(job_file, overrides), out, resume, overrides if job_file is None else (), **how)


def named_job(path: Path | None, overrides: tuple[str, ...]) -> Callable[[], Any]:
    """Makes the invocation of a job file, after the fork; none where a run is continued."""

    def invocation() -> Any:
        from gpurun.launcher.run.open import Invocation

        return None if path is None else Invocation(path, overrides)

    return invocation


def names_job_file(path: Path) -> bool:
    """Whether a path means a job file and not a run; its name decides where nothing is there."""
    named = path.suffix in (".yaml", ".yml") and not path.exists()
    return named or (path.is_file() and path.name != "latest")


def is_missing(resume: "Path | Url") -> bool:
    """Whether `--resume` was given alone, where no run is: in `runs/NAME`, `latest` is one."""
    return resume == Path("latest") and not Path(resume).exists()


@click.command()
@job_argument
@click.option(
    "--memory", "with_memory", is_flag=True, help="Estimate each variant's peak memory, by part; loads torch."
)
@json_option
@set_option
def check(job: Path, with_memory: bool, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Check a job file and print its plan, without running anything.

    With --memory a process builds the model on the CPU and traces a step without data, in 10 minutes at most.

    Example: gpurun check job.yaml --set global_batch=128
    """
    from gpurun.launcher.jobfile.load import load_job
    from gpurun.launcher.jobfile.values import node_bounds
    from gpurun.launcher.machine.host import inspect_machine
    from gpurun.launcher.plan.build import build_plan, with_mistakes_of_plan
    from gpurun.launcher.plan.devices import assumed_nodes, core_notes, with_free_cores

    with with_mistakes_of_plan(inspect_machine):
        spec = load_job(job, overrides, runs_here=True)
    machine = with_free_cores(spec, inspect_machine())
    plan = build_plan(spec, machine, assumed_nodes(machine, node_bounds(spec.nodes)[1]))
    if not spec.is_on_nodes:
        plan = replace(plan, notes=(*plan.notes, *core_notes(plan.variants, machine)))
    memory = None
    if with_memory:
        from gpurun.launcher.run.memory_estimate import estimated_memory

        memory = estimated_memory(plan, spec, machine, job.parent)
    if as_json:
        show_json(plan if memory is None else {**fields_of(plan), "memory": memory})
        return
    from gpurun.launcher.report.terminal.plan import render_memory, render_plan

    plain = not sys.stdout.isatty()
    earlier = earlier_run(spec.name, machine.hostname)
    click.echo(render_plan(plan, spec, width(), plain=plain, earlier=earlier))
    if memory is not None:
        click.echo("\n" + render_memory(memory, width(), plain=plain))


def fields_of(plan: "Plan") -> dict[str, Any]:
    """The plan by the names of its fields, as it is shown in JSON."""
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


def earlier_run(job: str, hostname: str) -> "Earlier | None":
    """One that shows what can be detected; without any, the modules that read it aren't loaded."""
    if not Path("runs").is_dir():
        return None
    from gpurun.launcher.run.open import find_earlier

    return find_earlier(job, hostname)


PYTHONS = frozenset({"python", "python3"})
LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "accelerate-launch": "accelerate",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "mpirun": "mpirun",
}
"""Commands, and modules, that start a program elsewhere, and have no place after `gpurun run`."""

NUM_PROCESSES = ("--nproc-per-node", "--num-processes", "--num-gpus", "-np", "--np", "-n")
"""Options of other launchers that say how many processes to start."""
AS_TORCHRUN = {
    **dict.fromkeys(("--num-machines", "--num-nodes"), "--nnodes"),
    **dict.fromkeys(("--machine-rank", "--node-rank"), "--node-rank"),
    **dict.fromkeys(("--main-process-ip", "--master-addr"), "--master-addr"),
    **dict.fromkeys(("--main-process-port", "--master-port"), "--master-port"),
}
"""Their options about several nodes, and what torchrun calls them."""
USE_ENV = frozenset({"--use-env", "--use_env"})
"""What torchrun always does."""


class ProgramCommand(click.Command):
    """A command whose last arguments, after `--`, belong to a program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (meant_line := without_launcher(behind_options(args, self.params))) is not None:
            raise SpecError(meant_line)
        try:
            return super().parse_args(ctx, [*args])  # click takes words away
        except click.NoSuchOption as error:
            from gpurun.launcher.jobfile.kinds import PROGRAM

            meant = option_meant(error, PROGRAM).removeprefix("; ")
            if error.option_name.replace("_", "-") in NUM_PROCESSES:
                meant = "each device gets one process: all GPUs, or the devices of --devices"
            own = f"the program's own options go after `--`: {after_dashes(args, error.option_name)}"
            # A key of a job is called as an option of many programs is; what resembles an option, is one.
            first, then = (own, meant) if meant.startswith("write ") else (meant, own)
            ways = [way for way in (first, then) if way]
            text = f"gpurun run has no option {error.option_name}; " + "\n    otherwise, ".join(ways)
            raise SpecError(text) from None


def behind_options(args: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """The arguments from the first that is no option of these, nor the value of one; or from `-m` on."""
    options = (each for each in params if isinstance(each, click.Option) and not each.is_flag)
    takes_value = {name for each in options for name in each.opts}
    for at, word in enumerate(args):
        if word == "-m" or not (word.startswith("-") or (at and args[at - 1] in takes_value)):
            return [*args[at:]]
    return []


def without_launcher(words: Sequence[str]) -> Problem | None:
    """What to write instead of a line that begins with another launcher, or with Python, or `None`.

    Args:
        words: a command with its arguments, `-m` and a module, or a module alone.
    """
    words = words[1:] if words[:1] == ["-m"] else words
    first = Path(words[0]).name if words else ""
    if first in PYTHONS:
        as_module = [*dropwhile(lambda word: word.startswith("-") and word != "-m", words[1:])]
        if as_module[:1] == ["-m"] and (found := without_launcher(as_module)) is not None:
            return found
    elif first not in LAUNCHERS or _is_job_file(words[0]):
        return None
    launcher, rest = LAUNCHERS.get(first, first), list(words[1:])
    if launcher == "torchrun":
        text = f"`{first}` has its own command"
        if first == "torch.distributed.launch" and not USE_ENV & {*rest}:
            text += "; it passes no --local-rank to the program, which reads LOCAL_RANK instead"
        return Problem(text, f"gpurun torchrun {shlex.join(word for word in rest if word not in USE_ENV)}")
    program, args, before = _program_in(rest[1:] if rest[:1] == ["launch"] else rest)
    given = _options_in(before)
    num = next((given.pop(name) for name in NUM_PROCESSES if name in given), "")
    if num.isdecimal():
        nodes = {AS_TORCHRUN[name]: given.pop(name) for name in AS_TORCHRUN if name in given}
        num_nodes = nodes.get("--nnodes", "1")
        if launcher == "accelerate" and num_nodes.isdecimal():  # it counts those of all nodes
            num = str(max(1, int(num) // max(1, int(num_nodes))))
        lost = sorted(given.keys() - {"--multi-gpu"})
        text = f"`{first}` has no place here" + (f"; this line leaves out {', '.join(lost)}" if lost else "")
        of_nodes = [word for pair in nodes.items() for word in pair] if num_nodes != "1" else []
        line = [*of_nodes, "--nproc-per-node", num, *program, *args]
        return Problem(text, f"gpurun torchrun {shlex.join(line)}")
    own = f" -- {shlex.join(args)}" if args else ""
    text = f"leave `{first}` and its options out: gpurun runs one process per device"
    return Problem(text, f"gpurun run {shlex.join(program)}{own}")


def _options_in(words: Sequence[str]) -> dict[str, str]:
    """Options, spelled with dashes, and their values; a flag's is empty."""
    found: dict[str, str] = {}
    for word, following in zip_longest(words, words[1:], fillvalue="-"):
        if word.startswith("-"):
            name, _, value = word.partition("=")
            found[name.replace("_", "-")] = value or ("" if following.startswith("-") else following)
    return found


def _is_job_file(word: str) -> bool:
    """Whether a word that could be a launcher names a file that nobody could execute, or has no directory."""
    path = Path(word)
    return path.exists() and (path.name == word or not os.access(path, os.X_OK))


def _program_in(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The program in another launcher's arguments, with the program's arguments, and what is before it.

    Which of the words is the program is known where it is a module, ends with `.py`, or comes first.
    """
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return ["-m", words[at + 1]], [*words[at + 2 :]], [*words[:at]]
        if word.endswith(".py") or (at == 0 and not word.startswith("-")):
            return [word], [*words[at + 1 :]], [*words[:at]]
    return ["train.py"], [], [*words]


def after_dashes(args: Sequence[str], name: str) -> str:
    """`gpurun run train.py -- --steps 15`: how the option `name` of these arguments reaches the program."""
    from gpurun.launcher.masking import is_secret

    words = [*takewhile(lambda word: word != "--", args)]
    at = next((number for number, word in enumerate(words) if word.partition("=")[0] == name), None)
    own = words[at : at + 1] if at is not None else [name]
    value = words[at + 1 : at + 2] if at is not None and own == [name] else []
    script = next((word for word in words[:1] if not word.startswith("-")), None) or next(
        (word for word in words if word.endswith(".py") and not word.startswith("-")), None
    )
    if value and not value[0].startswith("-") and value[0] != script:
        own += value
    if is_secret(name.strip("-")):
        own = [name, "VALUE"]
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    program = ["-m", *module] if module else [script or "train.py"]
    return f"gpurun run {shlex.join(program)} -- {shlex.join(own)}"


@click.command("run", cls=ProgramCommand)
@click.argument("words", nargs=-1, metavar="[SCRIPT.py] [-- ARGS...]", shell_complete=programs)
@click.option(
    "-m", "module", metavar="MODULE", help="Run a module, as `python -m` does, instead of a script."
)
@click.option(
    "--compare",
    multiple=True,
    metavar="KEY=A,B",
    help="Compare values of an option: workers=0,2; a flag: amp=on,off; a key of Hydra: +model.width=64,128; "
    "an environment variable: env:OMP_NUM_THREADS=1,2. Of several, all combinations.",
)
@devices_option
@out_or_url_option
@nodes_option("run the same command on each.")
@hang_timeout_option
@run_options
def run(
    words: tuple[str, ...],
    module: str | None,
    compare: tuple[str, ...],
    devices: str,
    out: "tuple[Path | None, Url | None]",
    nodes: int | str | None,
    hang_timeout_s: float | None,
    overrides: tuple[str, ...],
    **how: Any,
) -> None:
    """Run a program unchanged, one process per device, and time and trace its steps.

    Its processes get the environment that `torchrun` sets. What follows `--` is passed to the program.

    With --compare the program runs with each of the values, and the report says which is fastest.

    Example: gpurun run train.py --compare workers=0,2 -- --epochs 1

    Exit codes: 0 ok, 2 the command line is wrong, 3 the machine lacks what the command asks for, or
    results are missing at the URL of --out, 4 the program failed, hung or ran out of memory, 130 interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt

    quit_on_interrupt()
    if module is None and not words:
        raise SpecError("missing argument SCRIPT.py; or run a module: gpurun run -m package.train")
    if module is not None and module.endswith(".py"):
        raise SpecError(Problem(f"{module} is a file, not a module", f"to run it: gpurun run {module}"))
    script, args = (None, words) if module is not None else (words[0], words[1:])

    def invocation() -> Any:
        from gpurun.launcher.jobfile.load import compared
        from gpurun.launcher.run.open import program_invocation

        more = (f"nodes={nodes}",) if nodes else ()
        given = with_hang_timeout((*overrides, *more), hang_timeout_s)
        return program_invocation(script, module, args, devices, given, compared(compare))

    run_and_print(invocation, out, None, script=script or "", **how)


FAILED = 1
"""The exit code of torchrun, whatever has failed."""


class TorchrunCommand(click.Command):
    """A command whose options go before its name."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("gpurun", "[OPTIONS] torchrun ARGS...")


@click.command("torchrun", cls=TorchrunCommand)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="ARGS...")
@click.option("--devices", metavar="DEVICES", help="The devices, instead of --nproc-per-node: cpu:2.")
@out_or_url_option
@hang_timeout_option
@run_options
def torchrun(
    words: tuple[str, ...],
    devices: str | None,
    out: "tuple[Path | None, Url | None]",
    hang_timeout_s: float | None,
    overrides: tuple[str, ...],
    **how: Any,
) -> int:
    """Run a program by a command line of torchrun, and time and trace its steps.

    Write `gpurun` in front of the line; its own options go before `torchrun`. The program is launched once.
    Where stdout is no terminal, the program's output goes there as it is, and the report to stderr. A
    failed launch starts again as often as --max-restarts says, whatever has failed.

    Example: gpurun --out RUN torchrun --nproc-per-node 2 train.py --epochs 1

    Exit codes: those of torchrun, which are 0 ok, 1 the program failed or was interrupted, 2 the command line
    is wrong.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.cli.main import shown
    from gpurun.launcher.jobfile.torchrun import UnknownOption, read_line

    quit_on_interrupt()
    try:
        line = read_line(words, os.environ)
    except UnknownOption as error:
        raise SpecError(before_torchrun(words, error.option) or str(error)) from None
    if line.nodes > 1 and line.rendezvous and line.node_rank is None and how["node_rank"] is None:
        line = numbered(line)

    def invocation() -> Any:
        from gpurun.launcher.run.open import program_invocation

        given = with_hang_timeout((*line.overrides, *overrides), hang_timeout_s)
        chosen = devices or devices_here(line)
        return program_invocation(line.script, line.module, line.args, chosen, given, {})

    try:
        more = {**how, **from_line(line, how)}
        run_and_print(invocation, out, None, passes_through=True, script=line.script or "", **more)
    except GpurunError as error:
        is_mistake = error.exit_code == SpecError.exit_code  # perhaps one that another node has found
        if isinstance(error, StepsError) or (is_mistake and can_begin(line)):
            raise
        shown(error)  # for torchrun, a script that isn't there, or is no Python, is a program that fails
        return FAILED
    return 0


def before_torchrun(words: Sequence[str], option: str) -> Problem | None:
    """What to write for a line of torchrun with an option that is gpurun's own; `None`: it isn't."""
    name = option.partition("=")[0]
    own = next((each for each in torchrun.params if name in each.opts), None)
    if not isinstance(own, click.Option):
        return None
    at = words.index(option)
    end = at + (1 if own.is_flag or name != option else 2)
    line = ["gpurun", *words[at:end], "torchrun", *words[:at], *words[end:]]
    return Problem(f"`{name}` is gpurun's own option, and goes before `torchrun`", shlex.join(line))


def numbered(line: "TorchrunLine") -> "TorchrunLine":
    """The line with the rank of this node, which only a scheduler may say; with `static` the default is 0.

    Raises:
        SpecError: the rank isn't known.
    """
    from gpurun.launcher.schedulers import scheduler_here

    if scheduler_here(os.environ) is not None:
        return line
    if line.is_static:
        return replace(line, node_rank=0)
    raise SpecError(
        "gpurun doesn't number nodes in the order in which they come: add --node-rank to each line, 0 on the "
        "host of the endpoint"
    )


def can_begin(line: "TorchrunLine") -> bool:
    """Whether Python would begin to run the line's program: it is there, and compiles."""
    from gpurun.launcher.jobfile.checks.code import find_program_mistakes
    from gpurun.launcher.jobfile.model import JobSpec
    from gpurun.launcher.jobfile.read import Draft

    spec = JobSpec(script=line.script, module=line.module)
    return not any(find_program_mistakes(Draft(spec), Path.cwd()))


def from_line(line: "TorchrunLine", given: dict[str, Any]) -> dict[str, Any]:
    """The flags that the line has for this node and its output; gpurun's own have precedence."""
    found = {
        "node_rank": line.node_rank,
        "rendezvous": line.rendezvous,
        "interface": line.interface,
        "join_timeout_s": line.join_timeout_s,
        "only_local_ranks": None if given["only_rank"] is not None else line.only_local_ranks,
        "files": line.files,
    }
    said = {name: value for name, value in found.items() if value is not None and given.get(name) is None}
    return {**said, "quiet": given["quiet"] or line.quiet}


def devices_here(line: "TorchrunLine") -> str:
    """The devices of this machine that have one process each."""
    from gpurun.launcher.jobfile.torchrun import devices_text
    from gpurun.launcher.machine.host import inspect_machine

    machine = inspect_machine()
    kind = machine.gpus[0].kind if machine.gpus else ""
    return devices_text(line, len(machine.gpus), machine.cpu_cores, kind)


@click.command()
@click.argument(
    "job", type=click.Path(path_type=Path), metavar="[JOB.yaml]", required=False, shell_complete=job_files
)
@click.option(
    "--budget", "budget_s", callback=parse_wait, metavar="TIME", help="The most time; default: 15m."
)
@out_or_url_option
@click.option(
    "--resume",
    type=RunPath(written_url),
    is_flag=False,
    flag_value="latest",
    metavar="[RUN]",
    help="Continue a search, by default the newest one of this job.",
)
@only_rank_option
@quiet_option
@json_option
@set_option
def tune(
    job: Path | None,
    budget_s: float | None,
    out: "tuple[Path | None, Url | None]",
    resume: "Path | Url | None",
    only_rank: int | None,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Find the fastest of all combinations under `compare`, without measuring each of them at length.

    Combinations are tried for a few steps each, by ranks that build the next model where the last one was. A
    model of their times chooses what is tried next, and says what can't be much faster. The five best and the
    job's own setting, which its keys at the top state, are then compared as in any run.

    Ctrl-C keeps what was measured; --resume goes on from there.

    Example: gpurun tune examples/tune.yaml --budget 10m

    Exit codes: 0 ok, 2 the job file or the command line is wrong, 3 the machine lacks what the job needs, or
    results are missing at the URL of --out, 4 a combination that was to be compared in the end failed, 130
    interrupted.
    """
    from gpurun.launcher.cli.interrupt import quit_on_interrupt
    from gpurun.launcher.rundir.paths import check_writable

    quit_on_interrupt()
    if job is None and (resume is None or is_missing(resume)):
        raise SpecError(MISSING_JOB)
    if resume is None:
        check_writable(out[0] or Path("runs"))

    with rank_starters() as pools:
        from gpurun.launcher.run.job import Output
        from gpurun.launcher.rundir.store import fetched
        from gpurun.launcher.search.tune import run_tune

        (directory, url), output = out, Output(quiet, only_rank)
        before = fetched(resume) if isinstance(resume, str) else resume
        finished = run_tune(pools, named_job(job, overrides), budget_s, directory, before, output, url)
    print_comparison(finished.comparison, finished.run, as_json, finished.reported)
    if finished.error is not None:
        raise finished.error
