"""An attempt of a launch: what it is started with, and its ranks while they run.

It is started with the file that its ranks read, and one request per rank.
"""

import os
import platform
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.inspect.hang_diagnosis import Hang, diagnose, usage_of
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.logs.relay import STDOUT_FD, LogTail, Relay
from gpurun.launcher.machine.network import family_of
from gpurun.launcher.plan.devices import MachineLike
from gpurun.launcher.plan.launch_config import fit_at_once, launch_config_for, program_config, turns_of
from gpurun.launcher.plan.model import Launch, Plan, Process, Variant
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.processes.pool import OPTIMIZING, RankPool
from gpurun.launcher.processes.protocol import (
    PROGRAM_ENTRY,
    SERVICE_RANK,
    TERMINATE,
    WORKER_ENTRY,
    Exit,
    StartRequest,
)
from gpurun.launcher.run.attempts import attempt_id, num_restarts
from gpurun.launcher.run.watch import Due, Late, Tick
from gpurun.launcher.rundir.claim import entered
from gpurun.launcher.rundir.control import leave, read_states
from gpurun.launcher.rundir.files import (
    RunDir,
    append_lines,
    complete_lines,
    decoded_portion,
    read_json,
    write_json,
)
from gpurun.launcher.rundir.paths import main_file, num_bytes
from gpurun.launcher.rundir.rank_files import ERROR_FILE, RankFiles, line_prefix, write_error
from gpurun.launcher.rundir.records import Event, LeftProcess, Stage
from gpurun.launcher.rundir.remembered import remembered

OPTIMIZES = re.compile(rb"DistributedDataParallel|optim|Trainer|lightning|accelerate|compile")
"""Text in programs that import `torch._dynamo`."""
STORE_ENTRY = "gpurun.launcher.worker.base.process_group:serve_store"


THREADS = "OMP_NUM_THREADS"
PRESET = frozenset({THREADS, "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""Variables of a program's ranks that neither their node's shell nor the job need set."""


@dataclass(frozen=True)
class Streams:
    """The files that ranks of a program read and write in place of their logs."""

    stdin: str = ""
    """The path of a file or pipe; empty: there is none."""
    stdout: str = ""
    only_rank: int | None = None
    """The only rank whose stdout goes there; `None`: the stdout of all."""
    only_local_ranks: Collection[int] | None = None
    """The local ranks whose stdout goes there, on each node; `None`: all."""
    passes_to: int | None = None
    """The descriptor of the command that gets what is in the logs: stderr, unless that is a terminal; stdout
    where both are one file or pipe."""
    reads_terminal: bool = False
    as_torchrun: bool = False
    """Whether the command replaces torchrun."""
    files: RankFiles | None = None
    """Where torchrun's line says that streams go."""

    @property
    def takes_stdout(self) -> bool:
        """Whether the command's stdout is for what ranks write."""
        is_passed = self.files is not None and bool(self.files.passed)
        return bool(self.stdout) or self.passes_to == STDOUT_FD or is_passed

    def of(self, env: Mapping[str, str], log: str) -> dict[str, Any]:
        """The fields of the `StartRequest` of a rank with this environment and log.

        Raises:
            MachineError: its files can't be written.
        """
        rank, local_rank = int(env["RANK"]), int(env["LOCAL_RANK"])
        is_here = self.only_local_ranks is None or local_rank in self.only_local_ranks
        writes = self.only_rank in (None, rank) and is_here
        found: dict[str, Any] = {"stdin": self.stdin, "stdout": self.stdout if writes else ""}
        if self.files:
            found |= self.files.of(env, log)
            found["env"] = {**env, **self.files.env(env)}
        return found

    def shown(self, requests: Sequence[StartRequest]) -> list[LogTail]:
        """The files of ranks that are shown besides their logs."""
        return [
            LogTail(
                request.rank,
                path,
                fd=STDOUT_FD if is_stdout and self.takes_stdout else self.passes_to,
                beginning=line_prefix(request.env, os.environ) if is_tee else "",
            )
            for request in requests
            if self.files and request.entry == PROGRAM_ENTRY
            for path, is_stdout, is_tee in self.files.shown(request.env)
        ]


@dataclass(frozen=True)
class Starter:
    """Prepares the attempts of a run's launches."""

    plan: Plan
    spec: JobSpec
    run: RunDir
    job_dir: Path
    machine: MachineLike
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions that the launches are started with."""
    streams: Streams = Streams()
    """What ranks of a program read and write in this command."""
    unique: uuid.UUID = field(default_factory=uuid.uuid4)

    def run_id(self, launch: Launch) -> str:
        """The TORCHELASTIC_RUN_ID of a launch and its restarts, which no other run has."""
        return str(uuid.uuid5(self.unique, launch.id))

    def share_cores(self, launch: Launch) -> bool:
        """Whether this machine has more ranks than cores, which would import in turns."""
        return sum(process.node == 0 for process in launch.processes) > self.machine.cpu_cores

    def optimizes(self, launch: Launch) -> bool:
        """Whether the ranks import what an optimizer needs, as far as a program's file shows."""
        program = program_of(self.plan, launch)
        if program is None:
            return True
        try:
            return OPTIMIZES.search(self.script(launch, program).read_bytes()) is not None
        except OSError:
            return False  # there is no file: a module; or the rank will report that

    def packages(self, launch: Launch) -> tuple[str, ...]:
        """Modules that an earlier run of the program has imported, where ranks gain by sharing the import."""
        program = program_of(self.plan, launch)
        if program is None or not (self.share_cores(launch) or len(self.plan.launches) > 1):
            return ()
        return remembered(str(self.script(launch, program)), self.plan.environment(program.id)[1])

    def script(self, launch: Launch, program: Variant) -> Path:
        """The program's file; its directory for a module."""
        directory = self.code_dir(launch)
        return Path(main_file(str(directory / program.script))) if program.script else directory

    def code_dir(self, launch: Launch) -> Path:
        """The directory from which the job's file names start: in the version that the launch runs."""
        side = self.plan.side_of(launch.variants[0])
        return self.job_dir if side is None else Path(side.job_dir)

    def moved(self, launch: Launch) -> tuple[str, str] | None:
        """The old and new root of redirected imports: a gate's first version must not load the second."""
        gate = self.plan.gate
        side = self.plan.side_of(launch.variants[0])
        return (gate.b.root, gate.a.root) if gate is not None and side == gate.a else None

    def prepare_attempt(
        self, launch: Launch, name: str, rounds: Mapping[str, int]
    ) -> tuple[StartRequest, ...]:
        """Writes what the ranks read; what to start.

        Args:
            name: of the attempt: `03-ddp-2~2`.
            rounds: to be run, of each variant that is to be measured.
        """
        program = program_of(self.plan, launch)
        write_json(self.run.software(name), self.software)
        if program is None:
            self.write_config(launch, name, rounds)
            return self.rank_requests(launch, name, None)
        self.write_program_config(launch, name, program)
        return (self.store_request(launch, name, program), *self.rank_requests(launch, name, program))

    def write_config(self, launch: Launch, name: str, rounds: Mapping[str, int]) -> None:
        """Writes the file that the workers of an attempt read."""
        turns = turns_of(self.plan, launch, rounds.keys())
        first, *guests = (self.config(turn, name, rounds) for turn in turns)
        config = replace(first, guests=tuple(guests), takes_turns=self.fit_at_once(turns))
        write_json(self.run.launch_config(name), config)

    def fit_at_once(self, turns: Sequence[Launch]) -> bool:
        """Whether the memory holds the models of all strategies of a launch."""
        if len(turns) == 1:
            return True
        peaks = {variant: self.run.read_memory(variant) for turn in turns for variant in turn.variants}
        return fit_at_once(turns, peaks, read_json(self.run.host, dict[str, Any]))

    def config(self, launch: Launch, name: str, rounds: Mapping[str, int]) -> LaunchConfig:
        """The configuration that the workers need for one strategy."""
        config = launch_config_for(
            self.plan,
            self.spec,
            launch,
            run_dir=self.run.path.resolve(),
            job_dir=self.code_dir(launch),
            machine=self.machine,
            found=self.found_splits(launch),
            caps=found.caps if (found := self.run.read_max_batch()) else (),
        )
        most = max(rounds.values())
        variants = tuple(
            replace(variant, rounds=rounds[variant.id] if rounds[variant.id] < most else None)
            for variant in config.variants
        )
        return replace(config, launch=name, variants=variants, rounds=most)

    def found_splits(self, launch: Launch) -> Mapping[str, tuple[int, ...]]:
        """Balanced splits of this launch whose samples an earlier launch or attempt has found."""
        balances = {variant: self.run.read_balance(variant) for variant in launch.variants}
        return {variant: balance.best.split for variant, balance in balances.items() if balance}

    def write_program_config(self, launch: Launch, name: str, program: Variant) -> None:
        """Writes what the ranks of a program's attempt read."""
        run_dir, is_first = self.run.path.resolve(), launch.repetition == 0
        config = program_config(
            self.spec,
            program,
            name,
            run_dir=run_dir,
            job_dir=self.code_dir(launch),
            is_first=is_first,
            observe=self.plan.observe,
            seeds_steps=self.plan.seeds_steps,
        )
        write_json(self.run.launch_config(name), replace(config, as_torchrun=self.streams.as_torchrun))

    def store_request(self, launch: Launch, name: str, program: Variant) -> StartRequest:
        """The store through which the ranks of a program find each other."""
        log = self.run.log(name, 0).with_name("store.log")
        if self.spec.master_port is not None:
            check_port(self.plan.address, self.spec.master_port)
        return StartRequest(
            rank=SERVICE_RANK,
            args=(
                str(self.run.rendezvous(name).resolve()),
                str(program.world_size),
                self.plan.address,
                str(self.spec.master_port or 0),
            ),
            env={},
            log=str(log.resolve()),
            cwd=str(self.code_dir(launch)),
            entry=STORE_ENTRY,
        )

    def rank_requests(self, launch: Launch, name: str, program: Variant | None) -> tuple[StartRequest, ...]:
        """The ranks of an attempt, with its own file names."""
        config, streams = str(self.run.launch_config(name).resolve()), self.streams if program else None
        planned = {p.rank: self.rank_env(launch, name, p, program) for p in launch.processes}
        presets = PRESET - program.env.keys() if program else frozenset()
        envs = {rank: _only(env, env.keys() - presets) for rank, env in planned.items()}
        logs = {p.rank: str(self.run.log(name, p.rank).resolve()) for p in launch.processes}
        here = [p.rank for p in launch.processes if p.node == 0]
        own = {rank: streams.of(envs[rank], logs[rank]) for rank in here} if streams else {}
        requests = (
            StartRequest(
                rank=process.rank,
                args=(config, str(process.rank)),
                env=envs[process.rank],
                log=logs[process.rank],
                cwd=str(self.code_dir(launch)),
                entry=PROGRAM_ENTRY if program else WORKER_ENTRY,
                control=str(self.run.control(name).resolve()),
                cpus=process.cpus,
                moved=self.moved(launch),
                preset=_only(planned[process.rank], presets),
            )
            for process in launch.processes
        )
        return tuple(msgspec.structs.replace(request, **own.get(request.rank, {})) for request in requests)

    def rank_env(
        self, launch: Launch, name: str, process: Process, program: Variant | None
    ) -> dict[str, str]:
        """The variables that are added to the environment of a rank."""
        if program is None:
            return dict(process.env)
        own = {
            "TORCHELASTIC_RUN_ID": process.env.get("TORCHELASTIC_RUN_ID") or self.run_id(launch),
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts(self.run, launch)),
            ERROR_FILE: str(self.run.program_error(name, process.rank).resolve()),
        }
        planned = {**process.env, **own}
        return with_torchruns_threads(planned, program.env) if self.streams.as_torchrun else planned


def _only(variables: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in names}


def check_port(address: str, port: int) -> None:
    """Returns if a server can listen there.

    Raises:
        MachineError: it can't.
    """
    try:
        socket.create_server((address, port), family=family_of(address)).close()
    except OSError as error:
        raise MachineError(f"master_port {port} can't be used on {address}: {error.strerror}") from error


def program_of(plan: Plan, launch: Launch) -> Variant | None:
    """The variant of a launch that runs a program; `None` for a workload's."""
    first = plan.variant(launch.variants[0])
    return first if first.kind.runs_program else None


def with_torchruns_threads(planned: Mapping[str, str], stated: Mapping[str, str]) -> dict[str, str]:
    """The planned environment with the number of threads that torchrun sets: 1, or none for a lone rank.

    Source: torch/distributed/run.py, `config_from_args`
    """
    others = {name: value for name, value in planned.items() if name != THREADS}
    is_alone = planned["LOCAL_WORLD_SIZE"] == "1"
    threads = stated.get(THREADS, "" if is_alone else "1")
    return {**others, THREADS: threads} if threads else others


class TimeSource(Protocol):
    """The time; tests have a clock that never waits."""

    def monotonic(self) -> float:
        """Seconds, for durations."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970, for records."""

    def sleep(self, seconds: float) -> None:
        """Returns after so long."""


SETTLING_S = 0.05
"""How often to look whether what a program has left has ended."""
POLL_S = 0.2
"""How soon logs and progress are shown, at most; that a rank has ended is seen at once."""


@dataclass
class RunningAttempt:
    """An attempt of a launch, and its ranks."""

    starter: Starter
    launch: Launch
    number: int
    """Counts from 1 within the launch."""
    ranks: RankPool
    relay: Relay
    """Shows what the ranks write."""
    clock: TimeSource = time
    events_read: int = 0
    """Bytes of the events so far."""
    events_file: int = 0
    """The inode of their file: a rank replaces it when it holds too many."""
    error_files: Mapping[int, str] = field(default_factory=dict)
    """Where torch's `record` writes why a function has failed, of this node's ranks of a program."""
    newest_ns: int = 0
    """When the newest of them was written, by `time.monotonic_ns()`."""

    def __post_init__(self) -> None:
        self.run = self.starter.run
        self.name = attempt_id(self.launch, self.number)
        self.program = program_of(self.starter.plan, self.launch)

    def start(self, rounds: Mapping[str, int], preloads: Literal["before", "after"] | None) -> None:
        """Starts the ranks.

        Args:
            rounds: of each variant.
            preloads: when what only later ranks need is imported for them; that takes as long as the first
                ones build.
        """
        requests = self.starter.prepare_attempt(self.launch, self.name, rounds)
        self.record_program("start")
        entered(self.run, self.name)
        shown = self.starter.streams.shown(requests)
        own = self.own_logs()
        self.error_files = {request.rank: request.env.get(ERROR_FILE, "") for request in requests}
        self.relay.follow(own, more=[tail for tail in shown if tail.rank in own])
        if preloads == "before":
            self.ranks.preload(OPTIMIZING)
        if packages := self.starter.packages(self.launch):
            self.ranks.preload(packages, if_harmless=True)
        self.ranks.start(requests)
        if preloads == "after":
            self.ranks.preload(OPTIMIZING)

    def wait(self, shows_output: bool) -> tuple[tuple[Exit, ...], tuple[Event, ...]]:
        """Waits for a moment, and shows what the ranks wrote; the ranks that ended, and the new events.

        Raises:
            MachineError: someone has removed the run directory.
        """
        if not self.run.plan.exists():
            raise MachineError(
                f"{self.run.path} was removed while the run was in progress; its results are lost"
            )
        exits, events = tuple(self.ranks.poll(POLL_S)), self.new_events()
        # A rank records its failure before it prints the traceback, which the explanation will show.
        fails = self.run.has_failures(self.name) or any(exit_.returncode for exit_ in exits)
        if shows_output and not fails:
            self.relay.look()
        return exits, events

    def new_events(self) -> tuple[Event, ...]:
        """Events that were written since the last call."""
        path = self.run.events(self.name)
        inode, known_ns = inode_of(path), 0
        if inode != self.events_file or num_bytes(path) < self.events_read:
            self.events_file, self.events_read, known_ns = inode, 0, self.newest_ns
        text = complete_lines(path, self.events_read)
        self.events_read += len(text)
        events = tuple(decoded_portion(text, msgspec.json.Decoder(Event)))
        self.newest_ns = max((self.newest_ns, *(event.monotonic_ns for event in events)))
        return tuple(event for event in events if event.monotonic_ns > known_ns or not known_ns)

    def tick(self, exits: tuple[Exit, ...], events: tuple[Event, ...], due: Due) -> Tick:
        """The observations of this moment: these, and those that are due."""
        usage, now_s = None, self.clock.monotonic()
        if due.usage_s is not None and now_s >= due.usage_s:
            usage = usage_of(self.ranks.observe(self.run.control(self.name)))
            now_s = self.clock.monotonic()
        return Tick(now_s, exits, events, self.read_steps() if now_s >= due.steps_s else None, usage)

    def read_steps(self) -> tuple[int, ...]:
        """Completed steps of every rank, on all nodes."""
        states = read_states(self.run.control(self.name)).values()
        return (*(state.steps for state in states), *self.ranks.steps_elsewhere())

    def diagnose(self, late: Late, variant: str | None, reporter: Reporter) -> Hang:
        """Finds out what late ranks are doing, and reports it."""
        hang = diagnose(self.ranks.observe(self.run.control(self.name)))
        what = f"{variant or self.launch.id}: {late.text(hang)}"
        reporter.report_hang(hang, self.name, what, goes_on=not late.stops)
        return hang

    def await_leftovers(self, say: Callable[[str], None]) -> None:
        """Waits for what a program has left whose ranks have all ended well, or lets it go on."""
        if self.program is not None:
            self.record_program("done")
            waits = self.starter.spec.leftover == "wait"
            while not self.ranks.has_settled(say, waits, self.keep_left):
                self.relay.look()
                self.clock.sleep(SETTLING_S)

    def keep_left(self, what: str) -> None:
        """Keeps for the report what became of a process that the program has left."""
        append_lines(self.run.left, [LeftProcess(self.clock.time_ns(), self.name, what)])

    def stop(self, signals: tuple[int, ...] = TERMINATE) -> None:
        """Ends the ranks that are still running."""
        try:
            self.ranks.stop(self.starter.spec.grace_limit_s, signals)
        finally:
            leave(self.run.control(self.name))
            entered(self.run, None)

    def last_exits(self, before: Sequence[Exit], is_late: bool) -> tuple[Exit, ...]:
        """The exits that came with the stop; a program whose last ranks have ended well by then is done."""
        exits = tuple(self.ranks.poll(0))
        if exits and not is_late and self.have_ended_well((*before, *exits)):
            self.record_program("done")
        return exits

    def have_ended_well(self, exits: Sequence[Exit]) -> bool:
        """Whether every rank of the launch has exited with code 0."""
        return sum(exit_.returncode == 0 for exit_ in exits) == len(self.launch.processes)

    def pass_error_on(self, rank: int, code: int | None) -> None:
        """Writes a rank's error where the command's environment says, as torchrun does."""
        if ERROR_FILE in os.environ and self.relay.as_torchrun:
            write_error(self.error_files.get(rank, ""), os.environ[ERROR_FILE], code)

    def record_program(self, stage: Stage) -> None:
        """Writes an event of a program's attempt: its ranks write none, since each knows only of itself."""
        if self.program is not None:
            at_ns = round(1e9 * self.clock.monotonic())
            event = Event(self.clock.time_ns(), stage, self.program.id, monotonic_ns=at_ns)
            append_lines(self.run.events(self.name), [event])

    def last_events(self) -> dict[int, Event]:
        """The newest event of each rank of a workload; a program's ranks have none of their own."""
        if self.program is not None:
            return {}
        found = {p.rank: self.run.read_events(self.name, p.rank) for p in self.launch.processes}
        return {rank: events[-1] for rank, events in found.items() if events}

    def host_of(self, rank: int) -> str:
        """The machine that a rank runs on."""
        nodes = self.starter.plan.nodes
        return nodes[self.launch.processes[rank].node].host if nodes else platform.node()

    def place_of(self, rank: int) -> str:
        """`node 1 (hostb)`; empty where there is only one."""
        is_one = not self.starter.plan.nodes
        return "" if is_one else f"node {self.launch.processes[rank].node} ({self.host_of(rank)})"

    def own_logs(self) -> dict[int, Path]:
        """The logs of this node's ranks; other nodes show those of theirs."""
        return {p.rank: self.run.log(self.name, p.rank) for p in self.launch.processes if p.node == 0}


def inode_of(path: Path) -> int:
    """Which file has this name; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
