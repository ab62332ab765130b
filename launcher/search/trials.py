"""Trials of combinations: by ranks that stay, where those can; a program, and what failed, has new ones."""

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from msgspec import structs

from gpurun.launcher.compare.figures.rounds import program_times
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.plan.launch_config import launch_config_for
from gpurun.launcher.plan.model import Launch
from gpurun.launcher.processes.pool import OPTIMIZING
from gpurun.launcher.processes.pool_per_env import Pools, RankPool
from gpurun.launcher.processes.protocol import TRIAL_ENTRY, Exit, StartRequest
from gpurun.launcher.run.attempts import attempt_id
from gpurun.launcher.run.running_attempt import RunningAttempt, Starter
from gpurun.launcher.run.watch import Watch, limits_of, located
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import TrialConfig, TrialRecord, TrialTimes
from gpurun.launcher.search.space import Space
from gpurun.launcher.stats.schedule import WINDOW_STEPS
from gpurun.launcher.units import GIB

FIRST_STEPS = 5
"""Timed steps of a combination's first trial; each further one has twice as many."""
SHARE_OF_BLOCK = 0.25
"""The length of the first trial's timed steps, at least, as a share of a block of a run."""
POLL_S = 0.02
"""Trials are short: what is waited for is looked for more often than in a run."""
LEAST_DEVIATION = 0.002
"""The least deviation of a step's logarithm: five steps may be alike by chance."""
MEDIAN_VARIANCE = math.pi / 2
"""Variance of the median of normal values, as a multiple of the mean's."""
PER_MAD = 1.4826
"""Standard deviation per median absolute deviation of normal values."""
ROUNDS = 4
"""The rounds of a program's first trial; it is ended then."""


@dataclass
class Trials:
    """Tries one combination after the other."""

    space: Space
    starter: Starter
    """The starter of the directory for what ranks write."""
    pools: Pools
    reporter: Reporter
    relay: Relay
    on_stage: Callable[[str, str], None] = lambda variant, stage: None
    """Called with the variant that is tried, and what its ranks do."""
    attempt: RunningAttempt | None = None
    """Ranks that are there."""
    ranks: RankPool | None = None
    """The starter of ranks that was used last."""
    started: dict[str, int] = field(default_factory=dict)
    """How often each launch has been started."""
    number: int = 0
    """Trials so far, of this command."""
    watch: Watch | None = None
    """The watch of the newest trial."""

    def run(self, variant: str, number: int) -> TrialRecord:
        """Tries a variant, for the time with this number."""
        began_s = time.monotonic()
        launch = self.space.launch_of(variant)
        is_program = self.starter.plan.variant(variant).kind.runs_program
        record = (self.program if is_program else self.workload)(launch, variant, number)
        return replace(record, seconds=time.monotonic() - began_s)

    def workload(self, launch: Launch, variant: str, number: int) -> TrialRecord:
        """A trial by ranks that stay; other ranks end first, since they would take memory and time."""
        if self.attempt is None or self.attempt.launch != launch:
            self.stop()
            self.number = 0
            attempt = self.next_attempt(launch)
        else:
            attempt = self.attempt
        self.number += 1
        write_json(
            attempt.run.trial(attempt.name, self.number), self.config(launch, attempt.name, variant, number)
        )
        if self.attempt is None:
            self.begin(attempt, self.live_requests(launch, attempt.name))
        result = attempt.run.trial_times(attempt.name, self.number)
        failed = self.wait(attempt, variant, result.exists)
        if failed is not None:
            return replace(failed, number=number)
        return record_of(variant, number, read_json(result, TrialTimes))

    def live_requests(self, launch: Launch, name: str) -> tuple[StartRequest, ...]:
        first = str(self.starter.run.trial(name, self.number).resolve())
        requests = self.starter.rank_requests(launch, name, None)
        return tuple(
            structs.replace(request, args=(first, str(request.rank)), entry=TRIAL_ENTRY)
            for request in requests
        )

    def config(self, launch: Launch, name: str, variant: str, number: int) -> TrialConfig:
        """The configuration that the ranks read for one trial."""
        only, starter = replace(launch, id=name, variants=(variant,)), self.starter
        config = launch_config_for(
            self.space.plan,
            starter.spec,
            only,
            run_dir=starter.run.path.resolve(),
            job_dir=starter.code_dir(only),
            machine=starter.machine,
            found=starter.found_splits(only),
        )
        memory = config.memory and number == 1
        config = replace(config, baseline=None, profile=None, gradient_check=False, memory=memory)
        times = 2 ** (number - 1)
        return TrialConfig(config, FIRST_STEPS * times, SHARE_OF_BLOCK * config.block_ms * times)

    def program(self, launch: Launch, variant: str, number: int) -> TrialRecord:
        """A trial of a program, which is ended as soon as enough of its steps are timed."""
        self.stop()
        attempt = self.next_attempt(launch)
        run, wanted = attempt.run, ROUNDS * 2 ** (number - 1)
        self.begin(attempt, self.starter.prepare(launch, attempt.name, {variant: 1}))
        size = len(launch.processes)

        def rounds_ms() -> list[float]:
            times = program_times(run.read_steps(variant), size)
            return [time.step_ns / 1e6 for time in times if time.launch == attempt.name]

        failed = self.wait(attempt, variant, lambda: len(rounds_ms()) >= wanted, poll_s=0.25)
        self.stop()
        found = rounds_ms()
        if failed is not None and not found:
            return replace(failed, number=number)
        return record_of(variant, number, TrialTimes(tuple(ms * 1e6 for ms in found)), WINDOW_STEPS)

    def next_attempt(self, launch: Launch) -> RunningAttempt:
        """Ranks that are still to be started."""
        number = self.started.get(launch.id, 0) + 1
        while self.starter.run.launch(attempt_id(launch, number)).exists():
            number += 1  # before a `--resume`
        self.started[launch.id] = number
        self.ranks = self.pools.get(*self.space.plan.environment(launch.variants[0]))
        return RunningAttempt(self.starter, launch, number, self.ranks, self.relay)

    def begin(self, attempt: RunningAttempt, requests: tuple[StartRequest, ...]) -> None:
        """Starts ranks; what optimizers import is there for later ones."""
        self.attempt = attempt
        self.relay.follow(attempt.own_logs())
        attempt.ranks.start(requests)
        attempt.ranks.preload(OPTIMIZING)

    def stop(self) -> tuple[Exit, ...]:
        """Ends the ranks, where there are any; how they ended."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return ()
        attempt.stop()
        return tuple(attempt.ranks.poll(0))

    def wait(
        self, attempt: RunningAttempt, variant: str, is_done: Callable[[], bool], poll_s: float = POLL_S
    ) -> TrialRecord | None:
        """Returns when the trial is done; if it fails, the ranks are ended, and its record is returned."""
        limits = limits_of(self.starter.spec)
        watch = Watch.begin(len(attempt.launch.processes), time.monotonic(), self.watch)
        while not is_done():
            exits = tuple(attempt.ranks.poll(poll_s))
            events = attempt.new_events()
            for event in events:
                self.on_stage(variant, event.stage)
            self.watch = watch = watch.after(attempt.tick(exits, events, watch.due(limits)), limits)
            if watch.is_over and not is_done():
                return self.failed(attempt, variant, watch)
            if (late := watch.late(limits)) is not None:
                hang = attempt.diagnose()
                what = f"{variant}: {late.text(hang)}"
                self.reporter.report_hang(hang, attempt.name, what, goes_on=not late.stops)
                if not late.stops:
                    watch = replace(watch, hang_reported=True)
                    continue
                self.stop()
                status: Literal["hung", "timeout"] = "hung" if late.is_hang else "timeout"
                return TrialRecord(variant, 0, status, 0.0, reason=late.text(hang))
        self.relay.look()
        return None

    def failed(self, attempt: RunningAttempt, variant: str, watch: Watch) -> TrialRecord:
        """Why the ranks have ended."""
        stopped_ns = time.time_ns()
        exits = (*watch.exits, *self.stop())
        if exits and all(exit_.returncode == 0 for exit_ in exits):
            return TrialRecord(
                variant, 0, "failed", 0.0, reason="it ended before enough of its steps were timed"
            )
        cause = root_cause(exits, attempt.run.read_failures(attempt.name), stopped_ns)
        cause = located(cause, attempt.last_events().get(cause.rank), watch)
        cause = self.reporter.report_failure(cause, attempt.name, platform.node())
        status: Literal["oom", "failed"] = "oom" if cause.kind == "oom" else "failed"
        return TrialRecord(variant, 0, status, 0.0, reason=cause.reason)


def record_of(variant: str, number: int, times: TrialTimes, steps_per_value: int = 1) -> TrialRecord:
    """The record of a trial.

    Args:
        variant: its id.
        number: of the trial.
        times: in ns.
        steps_per_value: of how many steps each of the times is the mean.
    """
    middle = median(times.step_ns)
    deviation = PER_MAD * median(abs(ns - middle) for ns in times.step_ns) / middle
    variance = MEDIAN_VARIANCE * max(deviation, LEAST_DEVIATION) ** 2 / len(times.step_ns)
    peak_gib = None if times.peak_bytes is None else times.peak_bytes / GIB
    return TrialRecord(variant, number, "ok", 0.0, step_ms=middle / 1e6, variance=variance, peak_gib=peak_gib)
