"""Executes a plan: asks `decisions.py` what to do, does it, and returns the result to it."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, assert_never

import msgspec

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import Interrupted, MachineError, ParamsError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.inspect.hang_diagnosis import diagnose
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.processes.pool import OPTIMIZING
from gpurun.launcher.processes.rank_starter import Pools, Ranks
from gpurun.launcher.run import decisions as do
from gpurun.launcher.run.attempts import (
    attempt_id,
    attempts,
    finished_variants,
    lost_status,
    merged_facts,
    missing_variants,
    num_restarts,
    rounds_done,
    status_of,
    untried_with_same_model,
)
from gpurun.launcher.run.start_requests import Starter, end_program, program_of
from gpurun.launcher.run.watch import Limits, Tick, limits_of
from gpurun.launcher.rundir.claim import entered
from gpurun.launcher.rundir.control import leave, read_states
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event, Restart, VariantStatus
from gpurun.launcher.units import format_duration, plural

POLL_S = 0.2
"""How soon logs and progress are shown, at most; that a rank has ended is seen at once."""

OnEvent = Callable[[Launch, int, Event | None], None]
"""Called with a launch, its position in the plan and what it does now."""


class Clock(Protocol):
    """The time; tests have a clock that never waits."""

    def monotonic(self) -> float:
        """Seconds, for durations."""

    def time_ns(self) -> int:
        """Nanoseconds since 1970, for records."""

    def sleep(self, seconds: float) -> None:
        """Returns after so long."""


class EventReader:
    """Follows the events of an attempt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> tuple[Event, ...]:
        """Events that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return ()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return tuple(msgspec.json.decode(line, type=Event) for line in text.splitlines())


@dataclass(frozen=True)
class Attempt:
    """An attempt of a launch: the processes that run now."""

    launch: Launch
    position: int
    """Of the launch in the plan."""
    name: str
    """`03-ddp-2~2`."""
    program: Variant | None
    events: EventReader


@dataclass
class Session:
    """One run of a plan in a run directory; may begin in the middle (`--resume`)."""

    starter: Starter
    pools: Pools
    """Start the ranks, one pool for every environment."""
    on_event: OnEvent
    reporter: Reporter
    relay: Relay | None = None
    """Shows what the ranks write; `None`: it isn't shown."""
    clock: Clock = time
    mistake: ParamsError | None = None
    """What is wrong with the job itself, where only building its workload could show it."""
    pool: Ranks = field(init=False)
    """Of the launch that runs now."""
    attempt: Attempt | None = None

    def __post_init__(self) -> None:
        self.pool = self.pools.get(self.plan.variants[0].env)

    @property
    def plan(self) -> Plan:
        return self.starter.plan

    @property
    def run(self) -> RunDir:
        return self.starter.run

    @property
    def limits(self) -> Limits:
        return limits_of(self.starter.spec)

    def execute(self) -> Comparison:
        """Runs what is missing; the comparison is written after every launch, whatever comes later.

        Raises:
            MachineError: the run directory can't be written any more.
            Interrupted: by Ctrl-C or SIGTERM, after the processes are gone.
        """
        state, action = do.begin(len(self.plan.launches), self.limits)
        while not isinstance(action, do.Finish | do.GiveUp):
            try:
                state, action = do.step(state, self.perform(action))
            except BaseException as error:  # whatever it is, the ranks are stopped first
                state, action = do.step(state, do.Broken(error))
        if isinstance(action, do.GiveUp):
            raise action.error
        return self.compare()

    def perform(self, action: do.Action) -> do.Happened:
        """Executes an action; its result."""
        match action:
            case do.ReadRemaining():
                return self.read_remaining(self.plan.launches[action.position])
            case do.Start():
                return self.start(action)
            case do.Wait():
                return self.wait(self.current, action)
            case do.Diagnose():
                return self.diagnose(self.current, action)
            case do.Stop():
                return self.stop(action)
            case do.Explain():
                host = self.host_of(self.current.launch, action.failure.rank)
                return do.Explained(self.reporter.report_failure(action.failure, self.current.name, host))
            case do.Restart():
                return self.pause(self.current, action)
            case do.Settle():
                return self.settle(self.current, action)
            case do.Compare():
                self.compare()
                return do.Done()
            case do.ReportFullDisk():
                raise self.full_disk(self.current, action.rank)
            case do.Finish() | do.GiveUp():
                return do.Done()
            case _:
                assert_never(action)

    @property
    def current(self) -> Attempt:
        """The attempt that was started last."""
        if self.attempt is None:
            raise RuntimeError("no launch has been started")
        return self.attempt

    def read_remaining(self, launch: Launch) -> do.Remaining:
        """What is still missing of a launch; the baseline runs next to it where it can: rounds are pairs."""
        missing = missing_variants(self.run, launch)
        status = self.run.read_status(self.plan.baseline)
        usable = status is None or status.status in ("ok", "unsteady")
        variants = [v for v in launch.variants if v in missing or (v == self.plan.baseline and usable)]
        rounds = launch.rounds - rounds_done(self.run, self.plan, launch, missing)
        return do.Remaining(tuple(missing), tuple(variants), rounds, num_restarts(self.run, launch))

    def start(self, action: do.Start) -> do.Started:
        """Starts the processes of a launch."""
        launch = self.plan.launches[action.position]
        name = attempt_id(launch, len(attempts(self.run, launch)) + 1)
        program, events = program_of(self.plan, launch), EventReader(self.run.events(name))
        self.attempt = Attempt(launch, action.position, name, program, events)
        if program is not None:
            self.pool = self.pools.get(program.env)
        requests = self.starter.prepare(launch, name, action.variants, action.rounds)
        self.on_event(launch, action.position, None)
        entered(self.run, name)
        if self.relay is not None:
            self.relay.follow(self.own_logs(launch, name))
        if name != launch.id:  # the ranks of all further attempts begin with it
            self.pool.preload(OPTIMIZING)
        self.pool.start(requests)
        if action.position == 0 and len(self.plan.launches) > 1:
            self.pool.preload(OPTIMIZING)
        return do.Started(len(launch.processes), self.clock.monotonic())

    def wait(self, attempt: Attempt, action: do.Wait) -> Tick:
        """Waits for a moment, and shows what is new."""
        exits = self.pool.poll(POLL_S)
        events = attempt.events.read()
        for event in events:
            self.on_event(attempt.launch, attempt.position, event)
        if self.relay is not None and not action.has_failed and all(exit_.returncode == 0 for exit_ in exits):
            self.relay.look()
        now_s = self.clock.monotonic()
        is_due = action.steps_due_s is not None and now_s >= action.steps_due_s
        return Tick(now_s, tuple(exits), events, self.read_steps(attempt) if is_due else None)

    def read_steps(self, attempt: Attempt) -> tuple[int, ...]:
        """Completed steps of every rank, on all nodes."""
        states = read_states(self.run.control(attempt.name)).values()
        return (*(state.steps for state in states), *self.pool.steps_elsewhere())

    def diagnose(self, attempt: Attempt, action: do.Diagnose) -> do.Diagnosed:
        """Reports what late ranks are doing."""
        hang = diagnose(self.pool.observe(self.run.control(attempt.name)))
        what = f"{action.variant or attempt.launch.id}: {action.late.text(hang)}"
        self.reporter.report_hang(hang, attempt.name, what)
        return do.Diagnosed(action.late, hang)

    def stop(self, action: do.Stop) -> do.Happened:
        """Ends the ranks, and reads their results.

        Their last output is shown (that a checkpoint was saved, for example), but not after a failure: then
        they would only report that their peer is gone.
        """
        grace_s = self.starter.spec.grace_s
        if action.interruption is not None:
            self.reporter.say(stopping_text(action.interruption, grace_s))
        attempt, stopped_ns = self.attempt, self.clock.time_ns()
        try:
            self.pool.stop(grace_s)
            if self.relay is not None and (action.interruption is not None or action.why == "late"):
                self.relay.finish()
        finally:
            if attempt is not None:
                leave(self.run.control(attempt.name))
                entered(self.run, None)
        if attempt is None or action.why == "error":
            return do.Stopped((), stopped_ns)
        return self.read_results(attempt, action, stopped_ns)

    def read_results(self, attempt: Attempt, action: do.Stop, stopped_ns: int) -> do.Stopped:
        """The results of an attempt's ranks, and how they ended."""
        exits = tuple(self.pool.poll(0))
        if attempt.program is not None and action.why == "ended":
            end_program(self.run, attempt.program, attempt.name, (*action.exits, *exits))
        finished = frozenset(finished_variants(self.run, attempt.launch))
        if self.relay is not None and finished >= set(action.variants):
            self.relay.finish()
        records = tuple(self.run.read_failures(attempt.name))
        return do.Stopped(exits, stopped_ns, records, finished)

    def pause(self, attempt: Attempt, action: do.Restart) -> do.Done:
        """Waits before a restart, and counts it."""
        record = Restart(self.clock.time_ns(), attempt.name, action.number, action.reason)
        append_lines(self.run.restarts, [record])
        of_all = f"{action.number} of {self.limits.restarts}"
        self.reporter.report(f"restart {of_all} of {attempt.launch.id} in {action.pause_s:g} s")
        self.clock.sleep(action.pause_s)
        return do.Done()

    def settle(self, attempt: Attempt, action: do.Settle) -> do.Done:
        """Writes down how the variants of an attempt ended."""
        for variant in finished_variants(self.run, attempt.launch):
            facts = merged_facts(self.run, self.plan, variant)
            write_json(self.run.facts(variant), facts)
            write_json(self.run.status(variant), status_of(facts))
        if action.lost:
            status = lost_status(self.run, attempt.name, action.ended)
            self.write_status(action.lost, status)
            if action.skips_same_failure:
                self.skip_same_failure(action.lost, status)
        self.mistake = action.mistake or self.mistake
        return do.Done()

    def skip_same_failure(self, lost: Sequence[str], status: VariantStatus) -> None:
        """Skips variants of other launches that would fail at the same mistake in building their model."""
        same = untried_with_same_model(self.run, self.plan, lost)
        self.write_status(same, status)
        if same:
            others = plural(len(same), "other variant")
            self.reporter.report(f"{others} would build the same model and fail in the same way: not started")

    def write_status(self, variants: Sequence[str], status: VariantStatus) -> None:
        for variant in variants:
            write_json(self.run.status(variant), status)

    def compare(self) -> Comparison:
        """The comparison of what has been measured so far, written to the run directory."""
        comparison = compare_run(self.run)
        write_json(self.run.comparison, comparison)
        return comparison

    def host_of(self, launch: Launch, rank: int) -> str:
        """The machine that a rank runs on."""
        nodes = self.plan.nodes
        return nodes[launch.processes[rank].node].host if nodes else platform.node()

    def own_logs(self, launch: Launch, name: str) -> dict[int, Path]:
        """Where each rank of an attempt writes; those of other nodes are shown there."""
        return {p.rank: self.run.log(name, p.rank) for p in launch.processes if p.node == 0}

    def full_disk(self, attempt: Attempt, rank: int) -> MachineError:
        """A rank that can't write its results ends the whole run, not only its variant."""
        where = f" on {self.host_of(attempt.launch, rank)}" if self.plan.nodes else ""
        return MachineError(
            f"the workers{where} can't write to {self.run.path}: "
            "the disk is full or the directory is not writable\n"
            f"    free some space, then continue: gpurun --resume {self.run.path}\n"
            f"    log: {self.run.log(attempt.name, rank)}"
        )


def stopping_text(interruption: Interrupted, grace_s: float) -> str:
    """The message for a person who waits for the ranks to end."""
    if grace_s <= 0:
        return f"{interruption.cause}: the ranks are killed"
    return (
        f"{interruption.cause}: the ranks are asked to end, and killed after {format_duration(grace_s)}; "
        "another Ctrl-C kills them at once"
    )
