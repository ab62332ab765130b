"""What gpurun asks a batch system: which node this is, where the nodes meet, and how to submit a job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.model import JobSpec

Environ = Mapping[str, str]


@dataclass(frozen=True)
class SubmitOptions:
    """What the command line asks of the batch system; `None` leaves it to the cluster's default."""

    nodes: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    further: tuple[str, ...] = ()
    """Other options of the batch system as they are: `--constraint=a100`."""


@dataclass(frozen=True)
class Submission:
    """What the script runs."""

    spec: JobSpec
    job_file: Path
    """Absolute."""
    directory: Path
    """Absolute; where the command was given, and `runs/` is."""
    overrides: tuple[str, ...]
    gpurun: tuple[str, ...]
    """How this gpurun is called: absolute, since a batch script has an environment of its own."""


@dataclass(frozen=True)
class BatchQueue:
    """How a batch system takes a job."""

    command: str
    """What submits a script; `--COMMAND` passes on any of its options."""
    option_example: str
    time_example: str
    """A time limit, as the batch system writes it."""
    script_name: str
    """Of the script in `runs/NAME/`."""
    script: Callable[[Submission, SubmitOptions], str]
    """The batch script."""
    submit: Callable[[Path], int]
    """Hands the script over; the job's id."""
    next_commands: Callable[[int, Path], str]
    """How to look after the job, by the batch system's own commands."""


@dataclass(frozen=True)
class Scheduler:
    """A batch system. Its functions read the environment of a process; `None`: it says nothing there."""

    name: str
    """As messages call it."""
    start_hint: str
    """How to start one gpurun per node with it."""
    node_rank: Callable[[Environ], int | None]
    """Which node this is, from 0."""
    rendezvous: Callable[[Environ], str | None]
    """Where the nodes meet: HOST[:PORT], on node 0."""
    num_nodes: Callable[[Environ], int | None]
    names_resolve_late: bool = False
    """Whether the name of node 0 exists only once that node does, perhaps after this one."""
    queue: BatchQueue | None = None
    """`None`: gpurun does not submit to it."""


def number(environ: Environ, key: str) -> int | None:
    """The number in a variable; `None` where it is not set.

    Raises:
        SpecError: it is no number.
    """
    text = environ.get(key)
    if text is None or text == "":
        return None
    if not text.isdecimal():
        raise SpecError(f"the environment variable {key} should be a number, not {text!r}")
    return int(text)


def number_if_plain(environ: Environ, key: str) -> int | None:
    """Likewise; `None` also for anything but a plain number, such as the range `1:4`."""
    text = environ.get(key, "")
    return int(text) if text.isdecimal() else None


def several_on_one_node(starter: str, remedy: str) -> SpecError:
    """The error that more than one gpurun was started on this node."""
    return SpecError(
        f"{starter} started several processes on this node; gpurun starts the ranks itself\n    {remedy}"
    )
