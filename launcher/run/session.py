"""Executes a plan: one launch after the other, each attempted until nothing of it is missing."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.load_findings import load_so_far
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.compare.notes import killed_note
from gpurun.launcher.errors import CTRL_C, Interrupted, MachineError, ParamsError
from gpurun.launcher.failures.reporter import Reporter, full_disk, stopping_text
from gpurun.launcher.failures.root_cause import NUM_LINES, Failure, is_transient, root_cause, short_status
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.jobfile.values import BECOMES_COMMAND
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.machine.process_tree import becomes_quiet
from gpurun.launcher.plan.model import Launch
from gpurun.launcher.processes.pool import Pools, RankPool
from gpurun.launcher.processes.protocol import TERMINATE, Exit
from gpurun.launcher.run.attempts import (
    Ended,
    Remaining,
    attempts,
    finished_variants,
    num_restarts,
    record_outcomes,
    remaining,
)
from gpurun.launcher.run.budget import Budget
from gpurun.launcher.run.running_attempt import RunningAttempt, Starter, TimeSource
from gpurun.launcher.run.watch import Tick, Watch, located
from gpurun.launcher.rundir.files import append_lines, write_json
from gpurun.launcher.rundir.paths import check_writable
from gpurun.launcher.rundir.records import Command, Event, Killed, QuietWait, Restart, Resumption
from gpurun.launcher.units import format_duration, listed, plural

NOT_COUNTED = "`wait_for_quiet` has no effect: the kernel doesn't say how busy the cores are"
LOAD_EVERY_S = 2.0
"""How often other load is looked for, at the most."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass
class Session:
    """One run of a plan in a run directory; may begin in the middle (`--resume`)."""

    starter: Starter
    pools: Pools
    """Start the ranks, one pool for every environment."""
    on_event: Callable[[Launch, Event | None], None]
    """Called with a launch and what it does now; `None`: it is started."""
    reporter: Reporter
    relay: Relay
    """Shows what the ranks write."""
    clock: TimeSource = time
    resumed: Resumption | None = None
    """The parts of the run that are kept when it goes on."""
    is_part: bool = False
    """Whether the command makes several runs."""
    mistake: ParamsError | None = None
    """The mistake in the job itself, where only building its workload could show it."""
    ranks: RankPool = field(init=False)
    """The ranks of the launch that runs now."""
    attempt: RunningAttempt = field(init=False)
    """The attempt that was started last."""
    longest_step_s: float = 0.0
    """The longest time until a step was completed, in all launches so far."""
    may_run: bool = False
    """Whether its ranks may be running."""
    interruption: Interrupted | None = None
    """The signal that came when a launch had ended well, whose program had left something."""
    used: list[RankPool] = field(default_factory=list)
    """The starters of ranks so far."""
    load_due_s: float | None = field(init=False)
    """When to look for other load next; `None` once it has been reported."""

    def __post_init__(self) -> None:
        self.plan, self.spec, self.run = self.starter.plan, self.starter.spec, self.starter.run
        self.ranks = self.pools.get(*self.plan.environment(self.plan.variants[0].id))
        self.budget = Budget(self.plan, self.run, self.clock.monotonic)
        self.load_due_s = None if self.is_part else 0.0

    def execute(self) -> Comparison:
        """Runs what is missing; the comparison is written after every launch, whatever comes later.

        Raises:
            MachineError: the run directory can't be written any more.
            Interrupted: by Ctrl-C or SIGTERM, after the processes are gone.
        """
        append_lines(self.run.commands, [Command(self.clock.time_ns(), self.resumed)])
        try:
            self.measure()
        except BaseException as error:  # whatever it is, the ranks are stopped first
            if self.may_run:
                self.stop_after(error)
            raise
        return self.compare()

    def measure(self) -> None:
        """Measures what is missing; with a budget, what the review after each repetition chooses."""
        rounds: Mapping[str, int] | None = None
        has_budget, reviewed = self.plan.budget_s is not None, 0
        last_of = {launch.repetition: launch for launch in self.plan.launches}
        for launch in self.plan.launches:
            if has_budget and launch.repetition != reviewed and not attempts(self.run, launch):
                reviewed = launch.repetition
                if not (rounds := self.budget.review(reviewed, self.compare)):
                    return
            if self.interruption is not None:
                raise self.interruption
            was_missing = self.complete(launch, rounds)
            is_reviewed = has_budget and launch is last_of[launch.repetition]
            if was_missing and not is_reviewed:  # which compares, too
                self.compare()
        if has_budget:
            self.budget.review(self.plan.launches[-1].repetition + 1, self.compare)

    def complete(self, launch: Launch, rounds: Mapping[str, int] | None) -> bool:
        """Attempts a launch until nothing of it is missing; whether something was.

        Args:
            launch: of the plan.
            rounds: of each variant that is measured; `None`: as planned.
        """
        was_missing = False
        while True:
            has_time = self.budget.fits(launch, rounds)
            left = remaining(self.run, self.plan, launch, rounds if has_time else {})
            if not left.missing:
                return was_missing
            was_missing = True
            ended, number = self.attempted(launch, left), num_restarts(self.run, launch) + 1
            if should_restart(ended, number, self.spec, self.relay.as_torchrun):
                self.restart(ended, number)
            else:
                self.record(ended, left.missing)

    def attempted(self, launch: Launch, left: Remaining) -> Ended:
        """Starts the ranks of a launch, and watches them until they have ended; how they did.

        Raises:
            MachineError: a rank could not write its results.
        """
        attempt = self.start(launch, left)
        watch = Watch.begin(len(launch.processes), self.clock.monotonic(), self.longest_step_s)
        late = None
        while not watch.is_over and not (late and late.stops):
            watch = watch.after(self.wait(attempt, watch), self.spec)
            late = None if watch.is_over else watch.late(self.spec)
            if late is not None:
                watch = replace(watch, hang_reported=watch.hang_reported or late.is_hang)
                hang = attempt.diagnose(late, watch.variant, self.reporter)
        stopped_ns = self.clock.time_ns()
        self.longest_step_s = watch.longest_step_s
        if late is None and attempt.have_ended_well(watch.exits):
            self.await_leftovers(attempt)
        attempt.stop()
        self.may_run = False
        exits = (*watch.exits, *attempt.last_exits(watch.exits, late is not None))
        has_all = finished_variants(self.run, launch) >= left.rounds.keys()
        if has_all or late is not None or self.relay.as_torchrun:
            self.relay.finish()
        self.note_killed(exits)
        if late is not None:
            return Ended(late=late.text(hang), is_hung=late.is_hang, hang=hang, variant=watch.variant)
        return Ended() if has_all else self.failed(watch, exits, stopped_ns)

    def await_leftovers(self, attempt: RunningAttempt) -> None:
        """Waits for what a program has left; Ctrl-C ends that, and the run after this launch."""
        try:
            attempt.await_leftovers(self.reporter.report)
        except Interrupted as interruption:
            self.reporter.say(f"{interruption.cause}: what the program has left is ended")
            self.interruption = interruption

    def failed(self, watch: Watch, exits: tuple[Exit, ...], stopped_ns: int) -> Ended:
        """Why an attempt ended early: a full disk, or a rank's failure, which is reported.

        A rank's own record of its variant counts more than the events. Rank 0, which writes those, may have
        reached a variant while another rank was still building.

        Raises:
            MachineError: a rank could not write its results.
        """
        attempt = self.attempt
        ended = [exit_.rank for exit_ in exits if exit_.returncode == os.EX_IOERR]
        if full := [rank for rank in ended if self.lacks_room(rank)]:
            where = attempt.host_of(full[0]) if self.plan.nodes else None
            raise full_disk(self.run, attempt.name, full[0], where)
        cause = root_cause(exits, tuple(self.run.read_failures(attempt.name)), stopped_ns)
        cause = located(cause, attempt.last_events().get(cause.rank), watch)
        self.refuse_arguments(cause)
        place = attempt.host_of(cause.rank), attempt.place_of(cause.rank)
        num_lines = 0 if self.relay.as_torchrun else NUM_LINES
        failure = self.reporter.report_failure(cause, attempt.name, *place, num_lines)
        return Ended(failure=failure, variant=failure.variant if failure.stage else watch.variant)

    def lacks_room(self, rank: int) -> bool:
        """Whether a rank that ended with EX_IOERR couldn't write: a program may end with that code, too."""
        spec, attempt = self.starter.spec, self.attempt
        if not spec.kind.runs_program:
            return True
        if any(failure.rank == rank for failure in self.run.read_failures(attempt.name)):
            return False
        if attempt.launch.processes[rank].node != 0:  # whose disk can't be asked
            return self.spec.module != BECOMES_COMMAND  # which leaves no record
        try:
            check_writable(self.run.path)
        except MachineError:
            return True
        return False

    def start(self, launch: Launch, left: Remaining) -> RunningAttempt:
        """Starts the ranks of a launch."""
        self.ranks = self.pools.get(*self.plan.environment(launch.variants[0]))
        self.attempt = RunningAttempt(
            self.starter, launch, left.attempts + 1, self.ranks, self.relay, self.clock
        )
        self.wait_for_quiet(self.attempt.name)
        self.may_run = True
        self.attempt.start(left.rounds, self.preloads(launch, left))
        self.on_event(launch, None)
        return self.attempt

    def preloads(self, launch: Launch, left: Remaining) -> Literal["before", "after"] | None:
        """When to import what launches after the first in an environment, and further attempts, find."""
        is_new = not any(self.ranks is ranks for ranks in self.used)
        if is_new:
            self.used.append(self.ranks)
        in_turns = self.starter.share_cores(launch) and self.starter.optimizes(launch)
        if left.attempts or (is_new and in_turns):
            return "before"
        has_later = len(self.plan.launches) > 1
        return "after" if has_later and (is_new or launch == self.plan.launches[0]) else None

    def restart(self, ended: Ended, number: int) -> None:
        """Reports that the launch starts again as it was, and waits before."""
        reason = ended.failure.reason if ended.failure else str(ended.late)
        record = Restart(self.clock.time_ns(), self.attempt.name, number, reason)
        which = f"{number} of {self.spec.restarts} of {self.attempt.launch.id}"
        self.reporter.report_restart(record, f"restart {which} in {pause_s(number):g} s")
        self.clock.sleep(pause_s(number))

    def wait_for_quiet(self, attempt: str) -> None:
        """Waits for other programs to leave the cores, if the job says so."""
        limit_s, began_s = self.spec.wait_for_quiet_s, self.clock.monotonic()
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

    def wait(self, attempt: RunningAttempt, watch: Watch) -> Tick:
        """Waits for a moment, and shows what is new; after a failure, other ranks only lost their peer."""
        exits, events = attempt.wait(shows_output=not watch.has_failed)
        for event in events:
            self.on_event(attempt.launch, event)
        self.warn_of_load(self.clock.monotonic())
        return attempt.tick(exits, events, watch.due(self.spec))

    def warn_of_load(self, now_s: float) -> None:
        """Reports once that ranks wait for other programs, as long as something can be done about it.

        It reads all records: so rarely that this takes at most a hundredth of the time.
        """
        if self.load_due_s is None or now_s < self.load_due_s:
            return
        found = load_so_far(self.run, self.plan, self.attempt.launch, self.starter.machine.cpu_cores)
        took_s = self.clock.monotonic() - now_s
        self.load_due_s = now_s + max(LOAD_EVERY_S, 100 * took_s)
        if found is not None:
            self.load_due_s = None
            self.reporter.report(found)

    def stop_after(self, error: BaseException) -> None:
        """Ends the ranks after an error; if that fails, the new error ends the run."""
        is_interrupted, signals = isinstance(error, Interrupted), TERMINATE
        if isinstance(error, Interrupted):
            may_save = self.spec.kind.runs_program
            self.reporter.say(stopping_text(error, self.spec.grace_limit_s, may_save))
            if may_save:  # first what the command got
                number = signal.SIGINT if error.cause == CTRL_C else signal.Signals[error.cause]
                signals = tuple(dict.fromkeys((number, *TERMINATE)))
        self.attempt.stop(signals)
        if is_interrupted and not self.is_part:
            self.relay.finish()
        self.note_killed(self.ranks.poll(0), error.cause if isinstance(error, Interrupted) else "")

    def note_killed(self, exits: Sequence[Exit], cause: str = "") -> None:
        """Reports a program that was stopped, and ranks whose time to end was over.

        Args:
            exits: of the ranks that ended then.
            cause: the signal that the command got, if that was why.
        """
        killed = tuple(sorted(exit_.rank for exit_ in exits if exit_.was_killed))
        if (killed or cause) and self.spec.kind.runs_program:
            now_ns, limit_s = self.clock.time_ns(), self.spec.grace_limit_s
            ended = listed(sorted({short_status(exit_.returncode) for exit_ in exits}))
            hurried = any(exit_.hurried for exit_ in exits)
            record = Killed(now_ns, self.attempt.name, killed, limit_s, cause, ended, hurried)
            append_lines(self.run.killed, [record])
            self.reporter.report(killed_note(record).text)

    def refuse_arguments(self, failure: Failure) -> None:
        """Ends the run if a program refuses the arguments of a variant, none of whose steps is measured.

        Raises:
            SpecError: it does. Other variants would hardly do better, and each would say the same.
        """
        first = self.plan.variant(self.attempt.launch.variants[0])
        is_compared = len({variant.line for variant in self.plan.variants}) > 1
        if not is_compared or self.run.read_steps(first.id):
            return
        if refused := self.reporter.refused_arguments(failure, self.attempt.name, variant_label(first)):
            raise refused

    def record(self, ended: Ended, missing: Sequence[str]) -> None:
        """Writes down how the variants of an attempt ended."""
        self.mistake = ended.mistake or self.mistake
        attempt = self.attempt
        if ended.failure is not None:
            attempt.pass_error_on(ended.failure.rank, ended.failure.code)
        skipped = record_outcomes(self.run, self.plan, attempt.launch, attempt.name, ended, missing)
        if skipped:
            others = plural(len(skipped), "other variant")
            self.reporter.report(f"{others} would build the same model and fail in the same way: not started")

    def compare(self) -> Comparison:
        """The comparison of what has been measured so far, written to the run directory."""
        comparison = compare_run(self.run)
        write_json(self.run.comparison, comparison)
        return comparison


def should_restart(ended: Ended, number: int, spec: JobSpec, always: bool = False) -> bool:
    """Whether restart `number` is allowed, and may help; `always`: whatever it is that failed."""
    if ended.is_well or number > spec.restarts:
        return False
    return ended.failure is None or always or is_transient(ended.failure)


def pause_s(restart: int) -> float:
    """Seconds to wait before restart number `restart`, from 1: doubled each time, up to a limit."""
    return float(min(FIRST_PAUSE_S * 2 ** min(restart - 1, 20), LONGEST_PAUSE_S))
