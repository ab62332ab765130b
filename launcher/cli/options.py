"""Arguments and options that several commands have, and how their values are read."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpurun.launcher.cli.completion import device_words, job_files, job_keys, run_directories
from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile import DEVICES_HELP

if TYPE_CHECKING:
    from gpurun.launcher.jobfile.kinds import JobKind
    from gpurun.launcher.nodes.rendezvous import NodeFlags
    from gpurun.launcher.rundir.paths import Url
    from gpurun.launcher.trace.model import Table

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class WholeNumber(click.types.IntParamType):  # in older versions of click `ParamType` is no generic
    """A whole number in a range."""

    name = "n"
    """`N` in the help."""

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if number < self.least or (self.most is not None and number > self.most):
            range_ = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            self.fail(f"{value!r} is not a whole number {range_}", param, ctx)
        return number


def option_meant(error: click.NoSuchOption, kind: "JobKind | None" = None) -> str:
    """The advice for an option that isn't there: a key of the job, or a similar option.

    Args:
        kind: of the job whose keys can be set, where the command has only jobs of one.
    """
    from gpurun.launcher.jobfile.model import SECTIONS, JobSpec, keys_without_effect
    from gpurun.launcher.jobfile.yaml.describe import nearest

    key, ctx = error.option_name.strip("-").replace("-", "_"), error.ctx
    paths: dict[str, str] = {}
    for section, model in (("profile.", SECTIONS["profile"]), ("steps.", SECTIONS["steps"]), ("", JobSpec)):
        unset = keys_without_effect(model(), kind) if kind else frozenset()
        paths |= {name: f"{section}{name}" for name in model.keys if name not in {*unset, *SECTIONS}}
    for name, path in _SIZES.items():
        paths |= {name: paths[path]} if path in paths else {}
    if ctx is not None and key in paths and any(each.name == "overrides" for each in ctx.command.params):
        return f"; write --set {paths[key]}=VALUE"
    names: list[str] = []
    while ctx is not None:
        names += [name for each in ctx.command.get_params(ctx) for name in each.opts if name.startswith("--")]
        ctx = ctx.parent
    near = nearest(key, (name.removeprefix("--") for name in names))
    return f"; did you mean --{near}?" if near else ""


_SIZES = {"steps": "rounds"}
"""Keys of `steps`, by the name that the size of a run has elsewhere."""


class RunPath(click.Path):
    """A path, or the URL of a run."""

    def __init__(self, of_url: "Callable[[Url], Any]", is_used_here: bool = True) -> None:
        """Args:
        of_url: makes the value of a URL.
        is_used_here: whether whoever runs the command needs the store's package.
        """
        super().__init__(path_type=Path)
        self._of_url, self._is_used_here = of_url, is_used_here

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ":/" in str(value):
            from gpurun.launcher.rundir.paths import as_url

            if (url := as_url(str(value), self._is_used_here)) is not None:
                return self._of_url(url)
        return super().convert(value, param, ctx)


def read_copy(url: "Url") -> Path:
    """A copy of what is at the URL."""
    from gpurun.launcher.rundir.store import fetched

    return fetched(url)


def written_url(url: "Url") -> "Url":
    """The URL at which a run is to be kept."""
    from gpurun.launcher.rundir.paths import to_write

    return to_write(url)


def refuse_url(url: "Url") -> None:
    """Raises:
    SpecError: this option takes directories only.
    """
    raise SpecError(f"{url} is a URL; name a directory: this command keeps its runs on this machine")


def refuse_copy(url: "Url") -> None:
    """Raises:
    SpecError: this command looks at processes, and a URL has none.
    """
    raise SpecError(f"{url} is a copy; name the run directory, on the machine where the job runs (node 0)")


READ = RunPath(read_copy)
JOB_METAVAR = "JOB.yaml"
MISSING_JOB = f"missing argument {JOB_METAVAR}; `gpurun init` writes one"
job_argument = click.argument(
    "job", type=click.Path(path_type=Path), metavar=JOB_METAVAR, shell_complete=job_files
)
run_argument = click.argument("run", type=READ, metavar="RUN", shell_complete=run_directories)
running_argument = click.argument(
    "run",
    type=RunPath(refuse_copy, is_used_here=False),
    metavar="RUN",
    shell_complete=run_directories,
)
out_option = click.option(
    "--out", type=RunPath(refuse_url), help="The run directory; default: runs/NAME/TIME."
)


def directory_and_url(
    ctx: click.Context, param: click.Parameter, value: "tuple[Path | Url, ...]"
) -> "tuple[Path | None, Url | None]":
    """The run directory, and where it is kept too; each at most once."""
    urls = [url for url in value if isinstance(url, str)]
    paths = [path for path in value if isinstance(path, Path)]
    for kind, several in (("directories", paths), ("URLs", urls)):
        if len(several) > 1:
            raise click.BadParameter(f"{several[0]} and {several[1]} are two {kind}; name one", ctx, param)
    return next(iter(paths), None), next(iter(urls), None)


out_or_url_option = click.option(
    "--out",
    type=RunPath(written_url, is_used_here=False),  # of several nodes only the first one writes there
    multiple=True,
    callback=directory_and_url,
    metavar="PATH|URL",
    help="The run directory; default: runs/NAME/TIME. It is copied to a URL (s3://, …) as it grows.",
)
devices_option = click.option(
    "--devices",
    default="auto",
    metavar="DEVICES",
    shell_complete=device_words,
    help=DEVICES_HELP,
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=job_keys,
    help="Override a key of the job: seed=1. KEY=null removes it.",
)


def if_given(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """The callback of an option that may be left out."""
    return lambda ctx, param, value: None if value is None else parse(value)


@if_given
def parse_wait(value: str) -> float:
    """`90s`, `10m`, `1h` or plain seconds, in seconds."""
    from gpurun.launcher.jobfile.section import InvalidValue
    from gpurun.launcher.jobfile.values import parse_duration

    try:
        return parse_duration(float(value) if value.isdecimal() else value)
    except InvalidValue as wrong:
        raise click.BadParameter("; ".join(filter(None, (wrong.message, wrong.hint)))) from None


hang_timeout_option = click.option(
    "--hang-timeout",
    "hang_timeout_s",
    callback=parse_wait,
    metavar="TIME",
    help="End a launch that completes no step for so long, as the job's `hang_timeout` does.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
only_rank_option = click.option("--only-rank", type=WholeNumber(0), help="Show only the output of rank N.")
require_steps_option = click.option(
    "--require-steps", is_flag=True, help="Exit with 4 if a program ends well, but no step of it was timed."
)
quiet_option = click.option(
    "--quiet", is_flag=True, help="Don't show the ranks' output; it is still written to the logs."
)


LEAST_PERCENT = 0.5
"""Smaller numbers without `%` may be meant as shares."""


@if_given
def parse_percent(value: str) -> float:
    """`3%` or `3`, as a number that is not negative."""
    try:
        percent = float(value.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not math.isfinite(percent):
        raise click.BadParameter(f"{value!r} is not a percentage; write 3%")
    if percent < 0:
        raise click.BadParameter(f"{value!r} must not be negative")
    if 0 < percent < LEAST_PERCENT and "%" not in value:
        either = f"{100 * percent:g}% or {percent:g}%"
        raise click.BadParameter(f"{value!r} may be a share or a percentage; write {either}")
    return percent


@if_given
def parse_ranks(value: str) -> tuple[int, ...]:
    """`0,2-3` as 0, 2, 3."""
    from gpurun.launcher.plan.model import MAX_PROCESSES

    ranks: dict[int, None] = {}
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            named = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of ranks; write 0,2-3") from None
        if not named:
            raise click.BadParameter(f"{part.strip()!r} names no rank; write 0,2-3")
        if named.stop > MAX_PROCESSES:
            raise click.BadParameter(f"{value!r}: no run has a rank {named.stop - 1}; write 0,2-3")
        ranks |= dict.fromkeys(named)
    return tuple(ranks)


@if_given
def parse_nodes(value: str) -> int | str:
    """`4`, or a range `2..4`, as the key `nodes` has it."""
    from gpurun.launcher.jobfile.section import InvalidValue
    from gpurun.launcher.jobfile.values import parse_nodes

    try:
        return parse_nodes(int(value) if value.isdecimal() else value)
    except InvalidValue as wrong:
        raise click.BadParameter(f"{wrong}; write 2, or 2..4") from None


def nodes_option(more: str) -> Callable[[F], F]:
    """`--nodes`; `more` says what else there is to know about it."""
    text = f"Number of nodes, or the least and the most; {more}"
    return click.option("--nodes", callback=parse_nodes, metavar="N|A..B", help=text)


@if_given
def parse_steps(value: str) -> slice:
    """`A:B`, where either may be left out, as a slice of step numbers; `A` alone is that one step."""
    first, colon, end = value.strip().partition(":")
    if not re.fullmatch(r"(\d{1,18})?:?(\d{1,18})?", value.strip(), re.ASCII):
        ends = re.fullmatch(r"(\d{1,9})\s*(?:-|\.\.|,)\s*(\d{1,9})", value.strip(), re.ASCII)
        meant = f"{ends[1]}:{int(ends[2]) + 1}" if ends else "10:20"
        raise click.BadParameter(f"{value!r} is not a range of steps; write {meant}")
    start, stop = (int(text) if text else None for text in (first, end))
    if not colon:
        stop = None if start is None else start + 1
    if start is not None and stop is not None and stop <= start:
        raise click.BadParameter(f"{value!r} holds no step: the end is not part of the range")
    return slice(start, stop)


@if_given
def parse_tables(value: str) -> "tuple[Table, ...]":
    """`shapes,copies`, or `all`, as names of tables of `gpurun trace`."""
    from gpurun.launcher.jobfile.yaml.describe import near_or_all
    from gpurun.launcher.trace.model import TABLES

    names = list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    chosen = tuple(each for name in names for each in TABLES if name in (each, "all"))
    unknown = [name for name in names if name not in (*TABLES, "all")]
    if unknown or not chosen:
        wrong = unknown[0] if unknown else value
        raise click.BadParameter(f"{wrong!r}: {near_or_all(wrong, [*TABLES, 'all'], 'tables')}")
    return tuple(dict.fromkeys(chosen))


def with_hang_timeout(overrides: tuple[str, ...], hang_timeout_s: float | None) -> tuple[str, ...]:
    """The overrides of `--set`, and that of `--hang-timeout`."""
    return overrides if hang_timeout_s is None else (*overrides, f"hang_timeout={hang_timeout_s}")


def in_turn(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Adds these options to a command; its help has them in this order."""

    def added(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return added


node_options = in_turn(
    click.option(
        "--node-rank",
        type=WholeNumber(0),
        help="Rank of this node, from 0, where there are several.",
    ),
    click.option(
        "--rendezvous",
        metavar="HOST[:PORT]",
        help="Address of node 0, where the nodes meet; default port: 29400.",
    ),
    click.option(
        "--interface", metavar="NAME", help="Network interface; default: the one that routes to HOST."
    ),
    click.option(
        "--join-timeout",
        "join_timeout_s",
        callback=parse_wait,
        metavar="TIME",
        help="How long to wait for the other nodes; default: 10m.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Use no secret: anyone who reaches the port of node 0 can run code as you.",
    ),
)
"""The flags that give a node its place among several."""


def node_flags(
    node_rank: int | None,
    rendezvous: str | None,
    interface: str | None,
    join_timeout_s: float | None,
    insecure: bool,
) -> "NodeFlags":
    """The options about nodes from the command line."""
    from gpurun.launcher.nodes.rendezvous import DEFAULT_JOIN_TIMEOUT_S, NodeFlags

    return NodeFlags(node_rank, rendezvous, interface, join_timeout_s or DEFAULT_JOIN_TIMEOUT_S, insecure)


run_options = in_turn(
    node_options, only_rank_option, quiet_option, require_steps_option, json_option, set_option
)
"""The options that every command has which runs a job: about this node, its output and the job's keys."""
