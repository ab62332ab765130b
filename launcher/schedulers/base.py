"""The interface to a scheduler: which node this is, where the nodes meet, and how to submit a job."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher import __version__
from gpurun.launcher.compare.label import value_text
from gpurun.launcher.errors import CTRL_C, Interrupted, MachineError, SpecError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.section import InvalidValue
from gpurun.launcher.jobfile.values import AUTO, GPU_KINDS, Nodes, node_bounds, parse_duration
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.process_tree import die_with
from gpurun.launcher.processes.incoming_signals import forwarded, interruptible

Environ = Mapping[str, str]


@dataclass(frozen=True)
class SubmitOptions:
    """The command line's options for the scheduler; `None` leaves it to the cluster's default."""

    nodes: Nodes | None = None
    time: int | None = None
    """The limit in seconds."""
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    image: str | None = None
    gpu: str | None = None
    """The kind of GPU, as Kubernetes names resources: `amd.com/gpu`."""
    volume: str | None = None
    """The PersistentVolumeClaim that keeps run directories."""
    out: str | None = None
    """The URL below which run directories are kept too."""
    further: tuple[str, ...] = ()
    """Other options of the command that submits, as they are: `--constraint=a100`."""


_CLOCK = re.compile(
    r"(?:(?P<days>\d{1,3})-)?(?:(?P<hours>\d{1,4})(?::(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?)?)",
    re.ASCII,
)
"""`D-H`, `D-H:MM`, `D-H:MM:SS`, `H:MM:SS`. Source: `man sbatch`, "--time"."""


def time_limit(text: str) -> int:
    """Seconds, from `90m`, `1.5h` or one of Slurm's forms: `2:00:00`, `30:00` (minutes), `1-12`.

    Raises:
        SpecError: it is something else, such as a number alone, which is minutes or seconds elsewhere.
    """
    if text.isascii() and text.isdecimal():
        raise SpecError(f"--time {text}: a number alone has no unit\n    write {text}m or {text}s")
    match = _CLOCK.fullmatch(text)
    if match is None:
        try:
            return max(1, round(parse_duration(text)))
        except InvalidValue as wrong:
            raise SpecError(f"--time: {wrong}; or 2:00:00, 1-12:00:00") from None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    if match["days"] is None and match["seconds"] is None:
        hours, minutes, seconds = 0, hours, minutes  # Slurm's MM:SS
    limit_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if limit_s == 0:
        raise SpecError(f"--time {text}: it must be longer than 0 s")
    return limit_s


def those_among(options: Sequence[str], names: Set[str]) -> list[str]:
    """The options with these names and their values, as words: options that other commands know too."""
    kept, is_known = [], False
    for word in options:
        if word.startswith("-"):
            is_known = word.partition("=")[0] in names or (not word.startswith("--") and word[:2] in names)
        if is_known:
            kept.append(word)
    return kept


def _unmistakable(path: Path) -> str:
    """A relative path that is no option and no command of gpurun: `job.yaml`, `./-j.yaml`, `./report`."""
    return str(path) if path.suffix and not str(path).startswith("-") else f"./{path}"


@dataclass(frozen=True)
class Submission:
    """The job that the script runs."""

    spec: JobSpec
    job_file: Path
    """Absolute."""
    directory: Path
    """Absolute; where the command was given, and `runs/` is."""
    overrides: tuple[str, ...]
    gpurun: tuple[str, ...]
    """How this gpurun is called: absolute, since a batch script has an environment of its own."""
    label: str = "job-0"
    """Name of this submission alone, `gpt-splits-1a2b3c`: lower-case letters, digits, `-`, a letter first."""

    def num_nodes(self, options: SubmitOptions) -> int:
        """The number of nodes; the most of a range."""
        return node_bounds(self.nodes(options))[1]

    def nodes(self, options: SubmitOptions) -> Nodes:
        """The number of nodes, or the range, as a job states it."""
        return options.nodes or self.spec.nodes

    def command(self, options: SubmitOptions, nodes: Nodes | None = None) -> list[str]:
        """The command that starts the job on a node that has this machine's file system at the same paths.

        Args:
            nodes: that the job gets, if not `num_nodes`.
        """
        return [*self.gpurun, str(self.job_file), *self._overrides(nodes or self.num_nodes(options))]

    def command_in_image(self, options: SubmitOptions) -> list[str]:
        """The command that starts it in a working directory that has the same files as `directory`.

        Raises:
            SpecError: the job file isn't in `directory`.
        """
        if not self.job_file.is_relative_to(self.directory):
            raise SpecError(
                f"{self.job_file} is not in {self.directory}, whose files the image has to hold\n"
                "    submit from a directory that holds the job file"
            )
        return [
            "gpurun",
            _unmistakable(self.job_file.relative_to(self.directory)),
            *self._overrides(self.num_nodes(options)),
        ]

    def store(self, options: SubmitOptions, name: str) -> list[str]:
        """The words with which a run is kept in the store too, called `name` there."""
        return ["--out", f"{options.out}/{name}"] if options.out else []

    def store_in_bash(self, options: SubmitOptions, name: str) -> str:
        """The words with which a run is kept in the store too, for a script in which bash expands `name`."""
        return f' --out {shlex.quote(options.out)}/"{name}"' if options.out else ""

    def report(self, options: SubmitOptions, name: str) -> str:
        """The command that shows a run called `name`, from wherever its results can be seen."""
        place = f"{options.out}/{name}" if options.out else f"runs/{self.spec.name}/{name}"
        return f"gpurun report {shlex.quote(place)}"

    def _overrides(self, nodes: Nodes) -> list[str]:
        changed = [f"nodes={nodes}"] if nodes != self.spec.nodes else []
        return [word for override in (*self.overrides, *changed) for word in ("--set", override)]

    def num_gpus(self, options: SubmitOptions) -> int | None:
        """How many GPUs a node needs at least; `None` if it can't be seen from here.

        Raises:
            SpecError: `--gpus-per-node` are fewer.
        """
        needed, given = self._gpus_named, options.gpus_per_node
        if given and needed and given < needed:
            devices = value_text(self.spec.devices)
            raise SpecError(
                f"--gpus-per-node {given}: `devices: {devices}` needs {needed} on one node\n"
                f"    leave it away, or give {needed}"
            )
        return given or needed

    @property
    def _gpus_named(self) -> int | None:
        """The number of GPUs that `devices` names; `None` where it names no number."""
        devices = self.spec.devices
        if devices == AUTO or devices in GPU_KINDS:
            return None
        if isinstance(devices, str) or accelerator_of(devices[0]).is_host:
            return 0
        names = [name.partition("@")[0] for name in devices]
        indices = [int(name.partition(":")[2]) for name in names if ":" in name]  # others are UUIDs
        return 1 + max(indices) if len(indices) == len(devices) else None

    @property
    def leaves_gpus_open(self) -> str:
        """The sentence about a job of which `num_gpus` is not known."""
        return f"`devices: {self.spec.devices}` leaves open how many GPUs a node has"

    def stated_gpus(self, options: SubmitOptions) -> int:
        """The GPUs of a node, for schedulers that give none unless asked.

        Raises:
            SpecError: the number can't be seen from here.
        """
        number = self.num_gpus(options)
        if number == 0 and options.gpu:
            raise SpecError(
                f"--gpu {options.gpu}: `devices: {value_text(self.spec.devices)}` uses no GPU\n"
                "    --gpus-per-node 1 requests one, and --set devices=auto uses it; or leave out --gpu"
            )
        if number is None:
            raise SpecError(f"{self.leaves_gpus_open}\n    add --gpus-per-node 8, or --set devices=cpu:2")
        return number


@dataclass(frozen=True)
class SubmitCommand:
    """A command that hands a job over."""

    argv: tuple[str, ...]
    stdin: str = ""


@dataclass(frozen=True)
class Queue:
    """How a scheduler takes a job."""

    command: str
    """The command that submits a script; `--COMMAND` passes on any of its options."""
    option_example: str
    script_name: str
    """The name of the script in `runs/NAME/`; with `LABEL` in it, where the job reads it only later."""
    takes: frozenset[str]
    """The fields of `SubmitOptions` that it obeys, besides `nodes` and `further`."""
    script: Callable[[Submission, SubmitOptions], str]
    """The batch script or manifest, the same for the same arguments; it holds no secret."""
    call: Callable[[Submission, SubmitOptions, Path, str], SubmitCommand]
    """Hands the script at this path over, with a new secret for those whose script can't make one."""
    next_commands: Callable[[Submission, SubmitOptions, str], Mapping[str, str]]
    """How to look after the job of this id; keys are `state`, `logs`, `results`, `cancel`."""
    job_id: Callable[[Submission, str], str | None] = lambda submission, output: submission.label
    """The job's id, from what the command prints; `None`: that is no id."""
    undo: Callable[[SubmitCommand, str], str] = lambda call, output: ""
    """The command that removes what a refused call made, from what it printed; empty: it made nothing."""
    requeue: Callable[[str], str] = lambda directory: ""
    """The command that queues the job of a run again, from the name of the run's directory; empty: none."""
    note: Callable[[Submission, SubmitOptions], str | None] = lambda submission, options: None
    """The note on what the script may lack, which the scheduler takes as it is."""
    fewer: str = ""
    """The number of nodes that a job with `nodes: 2..4` begins with, for the documentation; empty: all 4."""
    is_foreground: bool = False
    """Whether the command lasts as long as the job, and shows its output."""


@dataclass(frozen=True)
class Scheduler:
    """Starts one gpurun per node. Its functions read the environment of a process; `None`: not known."""

    name: str
    """The name of the scheduler in messages."""
    preemption: str
    """How a node learns that it is taken away, and what happens to the job."""
    node_rank: Callable[[Environ], int | None] = lambda environ: None
    """Which node this is, from 0."""
    rendezvous: Callable[[Environ], str | None] = lambda environ: None
    """The place at which the nodes meet: HOST[:PORT], on node 0."""
    num_nodes: Callable[[Environ], int | None] = lambda environ: None
    names_resolve_late: bool = False
    """Whether the name of node 0 exists only once that node does, perhaps after this one."""
    queue: Queue | None = None
    """`None`: gpurun does not submit to it."""


WRITTEN_BY = f"Written by gpurun {__version__}"
"""How a script begins."""
REASON_LINES = 3
"""How much is shown of what a command says that refuses a job."""


def range_note(name: str, queue: Queue, submission: Submission, options: SubmitOptions) -> str | None:
    """The note on how `nodes: 2..4` is used, unless as it says."""
    nodes = submission.nodes(options)
    least, most = node_bounds(nodes)
    if least == most or queue.fewer:
        return None
    return (
        f"nodes: {nodes}: {name} takes no range; the job asks for {most} nodes, and begins "
        f"when all {most} are there\n    --nodes {least} asks for fewer"
    )


def submit(queue: Queue, call: SubmitCommand, path: Path, submission: Submission) -> str:
    """Hands the script at `path` over; the job's id.

    Raises:
        MachineError: the command isn't installed here, or the scheduler refuses the job.
    """
    require(call.argv[0])
    done = subprocess.run(
        call.argv,
        input=call.stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    job_id = queue.job_id(submission, done.stdout.strip()) if done.returncode == 0 else None
    if job_id is None:
        last = "\n".join(done.stderr.strip().splitlines()[-REASON_LINES:])  # a traceback ends with the reason
        reason = last or f"it answered {done.stdout.strip()!r}"
        undo = queue.undo(call, done.stdout)
        made = f"\n    what it made before that is still there; to delete it: {undo}" if undo else ""
        raise MachineError(f"{call.argv[0]} rejected the job: {reason}\n    the script is {path}{made}")
    return job_id


def follow(queue: Queue, call: SubmitCommand) -> int:
    """Carries out a command that lasts as long as the job; its exit code.

    It has a session of its own, and gets each signal once, from here.

    Raises:
        MachineError: it isn't installed here.
        Interrupted: a signal came. After Ctrl-C, `mpirun` of MPICH ends with 0.
    """
    require(queue.command)
    parent = os.getpid()

    def end(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    with interruptible(lambda: end(signal.SIGINT)):
        process = subprocess.Popen(
            call.argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent, signal.SIGTERM),
        )
        with forwarded(process.send_signal):
            try:
                return process.wait()
            except Interrupted as ended:
                end(signal.SIGINT if ended.cause == CTRL_C else signal.SIGTERM)
                process.wait()
                raise


def require(command: str) -> None:
    """Returns if the command is installed here.

    Raises:
        MachineError: it isn't.
    """
    if shutil.which(command) is None:
        raise MachineError(
            f"{command} was not found; submit from a machine that has it\n"
            "    --dry-run prints the script, which you can copy there"
        )


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
    """The number in a variable; `None` without it, and for anything but a plain number, such as `1:4`."""
    text = environ.get(key, "")
    return int(text) if text.isdecimal() else None


def several_on_one_node(starter: str, remedy: str) -> SpecError:
    """The error that more than one gpurun was started on this node."""
    return SpecError(
        f"{starter} started several processes on this node; gpurun starts the ranks itself\n    {remedy}"
    )
