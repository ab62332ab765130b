"""Executes a plan: asks `decisions.py` what to do, does it, and returns the result to it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.interference import load_so_far
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import ParamsError
from gpurun.launcher.failures.reporter import Reporter, full_disk, stopping_text
from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.machine.cores import becomes_quiet
from gpurun.launcher.plan.model import Launch
from gpurun.launcher.processes.pool_per_env import Pools, Ranks
from gpurun.launcher.run import decisions
from gpurun.launcher.run import effects as do
from gpurun.launcher.run.attempts import record_outcomes, remaining
from gpurun.launcher.run.budget import Budget
from gpurun.launcher.run.running_attempt import Clock, RunningAttempt, Starter
from gpurun.launcher.run.watch import Tick, limits_of
from gpurun.launcher.rundir.files import append_lines, write_json
from gpurun.launcher.rundir.records import Command, Event, QuietWait, Restart, Resumption
from gpurun.launcher.units import format_duration, plural

OnEvent = Callable[[Launch, Event | None], None]
"""Called with a launch and what it does now."""


NOT_COUNTED = "`wait_for_quiet` has no effect: the kernel doesn't say how busy the cores are"
LOAD_EVERY_S = 2.0
"""How often other load is looked for, at the most."""


@dataclass
class Session:
    """One run of a plan in a run directory; may begin in the middle (`--resume`)."""

    starter: Starter
    pools: Pools
    """Start the ranks, one pool for every environment."""
    on_event: OnEvent
    reporter: Reporter
    relay: Relay
    """Shows what the ranks write."""
    clock: Clock = time
    resumed: Resumption | None = None
    """What the run keeps that it goes on with."""
    mistake: ParamsError | None = None
    """The mistake in the job itself, where only building its workload could show it."""
    ranks: Ranks = field(init=False)
    """The ranks of the launch that runs now."""
    attempt: RunningAttempt | None = None
    used: list[Ranks] = field(default_factory=list)
    """The starters of ranks so far."""
    load_due_s: float | None = 0.0
    """When to look for other load next; `None` once it has been reported."""

    def __post_init__(self) -> None:
        self.plan, self.run = self.starter.plan, self.starter.run
        self.ranks = self.pools.get(*self.plan.environment(self.plan.variants[0].id))
        self.budget = Budget(self.plan, self.run, self.clock.monotonic)

    def execute(self) -> Comparison:
        """Runs what is missing; the comparison is written after every launch, whatever comes later.

        Raises:
            MachineError: the run directory can't be written any more.
            Interrupted: by Ctrl-C or SIGTERM, after the processes are gone.
        """
        append_lines(self.run.commands, [Command(self.clock.time_ns(), self.resumed)])
        repetitions = [launch.repetition for launch in self.plan.launches]
        has_budget = self.plan.budget_s is not None
        state, action = decisions.begin(repetitions, limits_of(self.starter.spec), has_budget)
        while not isinstance(action, do.Finish):
            try:
                state, action = decisions.step(state, self.perform(action))
            except BaseException as error:  # whatever it is, the ranks are stopped first
                state, action = decisions.fail(state, error)
        if action.error is not None:
            raise action.error
        return self.compare()

    def perform(self, action: do.Effect) -> do.Happened:
        """Executes an action; its result."""
        match action:
            case do.ReadRemaining():
                launch = self.plan.launches[action.position]
                rounds = action.rounds if self.budget.fits(launch, action.rounds) else {}
                return remaining(self.run, self.plan, launch, rounds)
            case do.Review():
                return do.Reviewed(self.budget.review(action.repetitions, self.compare))
            case do.Start():
                return self.start(action)
            case do.Wait():
                return self.wait(action)
            case do.Diagnose():
                hang = self.current.diagnose()
                what = action.text(hang, self.current.launch.id)
                self.reporter.report_hang(hang, self.current.name, what, goes_on=not action.late.stops)
                return do.Diagnosed(action.late, hang)
            case do.Stop():
                return self.stop(action)
            case do.Explain(failure):
                self.refuse_arguments(failure)
                place = self.current.host_of(failure.rank), self.current.place_of(failure.rank)
                return do.Explained(self.reporter.report_failure(failure, self.current.name, *place))
            case do.Restart():
                record = Restart(self.clock.time_ns(), self.current.name, action.number, action.reason)
                self.reporter.report_restart(record, action.text(self.current.launch.id))
                self.clock.sleep(action.pause_s)
            case do.Settle():
                self.settle(action)
            case do.Compare():
                self.compare()
            case do.ReportFullDisk(rank):
                where = self.current.host_of(rank) if self.plan.nodes else None
                raise full_disk(self.run, self.current.name, rank, where)
            case _:
                assert_never(action)
        return None

    @property
    def current(self) -> RunningAttempt:
        """The attempt that was started last."""
        if self.attempt is None:
            raise RuntimeError("no attempt has been started")
        return self.attempt

    def start(self, action: do.Start) -> do.Started:
        """Starts the ranks of a launch."""
        launch = self.plan.launches[action.position]
        self.ranks = self.pools.get(*self.plan.environment(launch.variants[0]))
        self.attempt = RunningAttempt(
            self.starter, launch, action.attempt, self.ranks, self.relay, self.clock
        )
        self.wait_for_quiet(self.attempt.name)
        self.attempt.start(self.preloading(action))
        self.on_event(launch, None)
        return do.Started(len(launch.processes), self.clock.monotonic())

    def wait_for_quiet(self, attempt: str) -> None:
        """Waits for other programs to leave the cores, if the job says so."""
        limit_s, began_s = self.starter.spec.wait_for_quiet_s, self.clock.monotonic()
        if limit_s is None or NOT_COUNTED in self.reporter.messages:
            return
        if not self.run.waits.exists():
            each = f"each launch waits at most {format_duration(limit_s)}"
            self.reporter.say(f"{each} for other programs to leave the cores")
        is_quiet = becomes_quiet(limit_s, self.clock.monotonic, self.clock.sleep)
        if is_quiet is None:
            self.reporter.report(NOT_COUNTED)
            return
        waited_s = self.clock.monotonic() - began_s
        append_lines(self.run.waits, [QuietWait(self.clock.time_ns(), attempt, waited_s, is_quiet)])

    def preloading(self, action: do.Start) -> do.Start:
        """The action, which preloads modules too where ranks start in an environment for the first time."""
        is_new = not any(self.ranks is ranks for ranks in self.used)
        if is_new:
            self.used.append(self.ranks)
        if action.preloads is not None or not is_new or len(self.plan.launches) == 1:
            return action
        return replace(action, preloads="after")

    def wait(self, action: do.Wait) -> Tick:
        """Waits for a moment, and shows what is new."""
        attempt = self.current
        exits, events = attempt.wait(shows_output=not action.has_failed)
        for event in events:
            self.on_event(attempt.launch, event)
        self.warn_of_load(self.clock.monotonic())
        return attempt.tick(exits, events, action.due)

    def warn_of_load(self, now_s: float) -> None:
        """Reports once that ranks wait for other programs, as long as something can be done about it.

        It reads all records: so rarely that this takes at most a hundredth of the time.
        """
        if self.load_due_s is None or now_s < self.load_due_s:
            return
        found = load_so_far(self.run, self.plan, self.current.launch)
        took_s = self.clock.monotonic() - now_s
        self.load_due_s = now_s + max(LOAD_EVERY_S, 100 * took_s)
        if found is not None:
            self.load_due_s = None
            self.reporter.report(found)

    def stop(self, action: do.Stop) -> do.Stopped:
        """Ends the ranks, and reads their results."""
        if action.interruption is not None:
            self.reporter.say(stopping_text(action.interruption, self.starter.spec.grace_s))
        stopped_ns = self.clock.time_ns()
        return self.attempt.stop(action, stopped_ns) if self.attempt else do.Stopped((), stopped_ns)

    def refuse_arguments(self, failure: Failure) -> None:
        """Ends the run if a program refuses the arguments of a variant, none of whose steps is measured.

        Raises:
            SpecError: it does. Other variants would hardly do better, and each would say the same.
        """
        first = self.plan.variant(self.current.launch.variants[0])
        is_compared = len({variant.line for variant in self.plan.variants}) > 1
        if not is_compared or self.run.read_steps(first.id):
            return
        if refused := self.reporter.refused_arguments(failure, self.current.name, variant_label(first)):
            raise refused

    def settle(self, action: do.Settle) -> None:
        """Writes down how the variants of an attempt ended."""
        self.mistake = action.mistake or self.mistake
        skipped = record_outcomes(self.run, self.plan, self.current.launch, self.current.name, action)
        if skipped:
            others = plural(len(skipped), "other variant")
            self.reporter.report(f"{others} would build the same model and fail in the same way: not started")

    def compare(self) -> Comparison:
        """The comparison of what has been measured so far, written to the run directory."""
        comparison = compare_run(self.run)
        write_json(self.run.comparison, comparison)
        return comparison
