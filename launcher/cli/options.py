"""How the command line's words are read: which is a job file, which a percentage, which a range of steps."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpurun.launcher.errors import SpecError

if TYPE_CHECKING:
    from gpurun.launcher.nodes.facts import NodeFlags

F = TypeVar("F", bound=Callable[..., Any])
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job: steps.rounds=12.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, for programs.")
only_rank_option = click.option(
    "--only-rank", type=click.IntRange(min=0), metavar="N", help="Of the ranks' output show only rank N's."
)
quiet_option = click.option(
    "--quiet", is_flag=True, help="Show nothing of what the ranks write; their logs have it."
)


class ProgramCommand(click.Command):
    """A command whose last words belong to a program, behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = error.option_name
            raise SpecError(f"gpurun run has no option {option}; the program's own go behind `--`") from None


class JobGroup(click.Group):
    """A group whose first argument may be a job file: `gpurun job.yaml` needs no word for "run"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "-h", "--version"}
        if args and args[0] not in own and args[0] not in self.commands and not self.is_typo(args[0]):
            args = ["job", *args]
        return super().parse_args(ctx, args)

    def is_typo(self, word: str) -> bool:
        """Whether a first word is more likely a mistyped command than a job file."""
        looks_like_file = word.startswith("-") or "." in word or "/" in word or Path(word).exists()
        return not looks_like_file

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args[0] not in self.commands:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"did you mean `gpurun {near[0]}`?" if near else "gpurun --help lists the commands"
            raise SpecError(f"there is no command or job file {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in self.commands if not self.commands[name].hidden]


def parse_percent(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """`3%` or `3`, as a number that is not negative."""
    if value is None:
        return None
    try:
        percent = float(value.strip().removesuffix("%"))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no percentage; write 3%") from None
    if not 0 <= percent < float("inf"):
        raise click.BadParameter(f"{value!r} must not be negative")
    return percent


def parse_ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`0,2-3` as 0, 2, 3."""
    if value is None:
        return None
    ranks: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ranks += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise click.BadParameter(f"{value!r} is no list of ranks; write 0,2-3") from None
    if not ranks or min(ranks) < 0:
        raise click.BadParameter(f"{value!r} names no rank; write 0,2-3")
    return tuple(dict.fromkeys(ranks))


def parse_steps(ctx: click.Context, param: click.Parameter, value: str | None) -> slice | None:
    """`A:B`, where either may be left out, as a slice of step numbers; `A` alone is that one step."""
    if value is None:
        return None
    first, colon, end = value.strip().partition(":")
    try:
        start, stop = (int(text) if text else None for text in (first, end))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no range of steps; write 10:20") from None
    if not colon:
        stop = None if start is None else start + 1
    if start is not None and stop is not None and stop <= start:
        raise click.BadParameter(f"{value!r} holds no step: the end is not part of the range")
    return slice(start, stop)


def node_options(command: F) -> F:
    """The flags by which a node of several knows its place."""
    options = (
        click.option(
            "--node-rank", type=click.IntRange(0), help="This node's number, from 0: for `nodes: N`."
        ),
        click.option(
            "--rendezvous", metavar="HOST[:PORT]", help="Where the nodes meet; HOST is node 0. Port: 29400."
        ),
        click.option(
            "--interface", metavar="NAME", help="Network interface; default: the one that leads to HOST."
        ),
        click.option(
            "--join-timeout",
            "join_timeout_s",
            callback=parse_wait,
            metavar="TIME",
            help="How long nodes wait for others; 10m.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def node_flags(
    node_rank: int | None, rendezvous: str | None, interface: str | None, join_timeout_s: float | None
) -> "NodeFlags":
    """What the command line says about nodes."""
    from gpurun.launcher.nodes.facts import DEFAULT_JOIN_TIMEOUT_S, NodeFlags

    return NodeFlags(node_rank, rendezvous, interface, join_timeout_s or DEFAULT_JOIN_TIMEOUT_S)


def parse_wait(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """`90s`, `10m`, `1h` or plain seconds, in seconds."""
    if value is None:
        return None
    from gpurun.launcher.jobfile.values import parse_duration

    try:
        return parse_duration(float(value) if value.isdecimal() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
