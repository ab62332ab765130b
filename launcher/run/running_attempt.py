"""The ranks of the attempt that runs now: started, followed and ended."""

import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.hang_diagnosis import Hang, diagnose
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.plan.model import Launch
from gpurun.launcher.processes.pool import OPTIMIZING
from gpurun.launcher.processes.pool_per_env import Ranks
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run import effects as do
from gpurun.launcher.run.attempts import attempt_id, finished_variants
from gpurun.launcher.run.start_requests import Starter, end_program, program_of
from gpurun.launcher.rundir.claim import entered
from gpurun.launcher.rundir.control import leave, read_states
from gpurun.launcher.rundir.files import complete_lines, decoded_portion, inode_of, num_bytes
from gpurun.launcher.rundir.records import Event

POLL_S = 0.2
"""How soon logs and progress are shown, at most; that a rank has ended is seen at once."""


@dataclass
class RunningAttempt:
    """An attempt of a launch, and its ranks."""

    starter: Starter
    launch: Launch
    number: int
    """Counts from 1 within the launch."""
    ranks: Ranks
    relay: Relay
    """Shows what the ranks write."""
    events_read: int = 0
    """Bytes of the events so far."""
    events_file: int = 0
    """The inode of their file: a rank replaces it when it holds too many."""
    newest_ns: int = 0
    """When the newest of them was written, by `time.monotonic_ns()`."""

    def __post_init__(self) -> None:
        self.run = self.starter.run
        self.name = attempt_id(self.launch, self.number)

    def start(self, action: do.Start) -> None:
        """Starts the ranks."""
        requests = self.starter.prepare(self.launch, self.name, action.rounds)
        entered(self.run, self.name)
        self.relay.follow(self.own_logs())
        if action.preloads == "before":
            self.ranks.preload(OPTIMIZING)
        self.ranks.start(requests)
        if action.preloads == "after":
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
        if shows_output and all(exit_.returncode == 0 for exit_ in exits):
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

    def read_steps(self) -> tuple[int, ...]:
        """Completed steps of every rank, on all nodes."""
        states = read_states(self.run.control(self.name)).values()
        return (*(state.steps for state in states), *self.ranks.steps_elsewhere())

    def diagnose(self) -> Hang:
        """What the ranks are doing."""
        return diagnose(self.ranks.observe(self.run.control(self.name)))

    def stop(self, action: do.Stop, stopped_ns: int) -> do.Stopped:
        """Ends the ranks, and reads their results."""
        try:
            self.ranks.stop(self.starter.spec.grace_s)
            if action.shows_output:
                self.relay.finish()
        finally:
            leave(self.run.control(self.name))
            entered(self.run, None)
        return do.Stopped((), stopped_ns) if action.why == "error" else self.read_results(action, stopped_ns)

    def read_results(self, action: do.Stop, stopped_ns: int) -> do.Stopped:
        """What the ranks measured, and how they ended."""
        exits = tuple(self.ranks.poll(0))
        program = program_of(self.starter.plan, self.launch)
        if program is not None and action.why == "ended":
            end_program(self.run, program, self.name, (*action.exits, *exits))
        finished = frozenset(finished_variants(self.run, self.launch))
        if finished >= set(action.variants):
            self.relay.finish()
        failures = tuple(self.run.read_failures(self.name))
        return do.Stopped(exits, stopped_ns, failures, finished, self.last_events())

    def last_events(self) -> dict[int, Event]:
        """The newest event of each rank of a workload; a program's ranks have none of their own."""
        if program_of(self.starter.plan, self.launch) is not None:
            return {}
        found = {p.rank: self.run.read_events(self.name, p.rank) for p in self.launch.processes}
        return {rank: events[-1] for rank, events in found.items() if events}

    def host_of(self, rank: int) -> str:
        """The machine that a rank runs on."""
        nodes = self.starter.plan.nodes
        return nodes[self.launch.processes[rank].node].host if nodes else platform.node()

    def own_logs(self) -> dict[int, Path]:
        """Where each rank writes; those of other nodes are shown there."""
        return {p.rank: self.run.log(self.name, p.rank) for p in self.launch.processes if p.node == 0}
