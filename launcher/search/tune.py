"""`gpurun tune` from the job file to the comparison: combinations in short trials, the best as in any run.

Trials are by ranks that stay, where those can; a program, and what failed, has new ones.
"""

import gc
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from msgspec import structs

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.figures.recorded import program_times
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.errors import Interrupted, SpecError
from gpurun.launcher.failures.reporter import Reporter, stopping_text
from gpurun.launcher.failures.root_cause import root_cause
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.machine.host import Machine, inspect_machine, software_of
from gpurun.launcher.masking import hidden
from gpurun.launcher.plan.build import build_plan, with_mistakes_of_plan
from gpurun.launcher.plan.launch_config import launch_config_for
from gpurun.launcher.plan.model import Launch, Variant
from gpurun.launcher.plan.rank_config import TrialConfig
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool import OPTIMIZING, Pools, WorkerPools
from gpurun.launcher.processes.protocol import TRIAL_ENTRY, Exit, StartRequest
from gpurun.launcher.run.attempts import attempt_id
from gpurun.launcher.run.job import Finished, Job, Output, Prepared, attended, check_store, execute
from gpurun.launcher.run.open import (
    OTHER_JOB,
    Invocation,
    as_planned_for,
    load_invocation,
    open_run,
    own_run,
    read_invocation,
)
from gpurun.launcher.run.progress_line import Progress, Status
from gpurun.launcher.run.running_attempt import RunningAttempt, Starter
from gpurun.launcher.run.watch import Watch, located
from gpurun.launcher.rundir.claim import refuse_if_alive
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.paths import Url
from gpurun.launcher.rundir.records import Effect, SearchRecord, TrialRecord, TrialTimes, Unmeasured
from gpurun.launcher.rundir.store import keep_at, source_of
from gpurun.launcher.search.policy import FINALISTS, Search, SearchOutcome, Trial, measured
from gpurun.launcher.search.space import (
    Space,
    build_space,
    effects,
    levels_of,
    refusals,
    settings_text,
)
from gpurun.launcher.units import GIB, format_duration, format_ms, format_number, plural

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
    number: int = 0
    """Trials so far, of this command."""
    longest_step_s: float = 0.0
    """The longest time until a step was completed, in all trials so far."""

    def run(self, variant: str, number: int) -> TrialRecord:
        """Tries a variant, for the time with this number."""
        began_s = time.monotonic()
        launch = self.space.launch_of(variant)
        is_program = self.starter.plan.variant(variant).kind.runs_program
        record = (self.program if is_program else self.workload)(launch, variant, number)
        return replace(record, number=number, seconds=time.monotonic() - began_s)

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
        return failed or record_of(variant, read_json(result, TrialTimes))

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
        self.begin(attempt, self.starter.prepare_attempt(launch, attempt.name, {variant: 1}))
        size = len(launch.processes)

        def rounds_ms() -> list[float]:
            times = program_times(run.read_steps(variant), size)
            return [time.step_ns / 1e6 for time in times if time.launch == attempt.name]

        failed = self.wait(attempt, variant, lambda: len(rounds_ms()) >= wanted, poll_s=0.25)
        self.stop()
        found = rounds_ms()
        if failed is not None and not found:
            return failed
        return record_of(variant, TrialTimes(tuple(ms * 1e6 for ms in found)))

    def next_attempt(self, launch: Launch) -> RunningAttempt:
        """Ranks that are still to be started."""
        number = 1
        while self.starter.run.launch(attempt_id(launch, number)).exists():
            number += 1
        ranks = self.pools.get(*self.space.plan.environment(launch.variants[0]))
        return RunningAttempt(self.starter, launch, number, ranks, self.relay)

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
        spec = self.starter.spec
        watch = Watch.begin(len(attempt.launch.processes), time.monotonic(), self.longest_step_s)
        while not is_done():
            exits = tuple(attempt.ranks.poll(poll_s))
            events = attempt.new_events()
            for event in events:
                self.on_stage(variant, event.stage)
            watch = watch.after(attempt.tick(exits, events, watch.due(spec)), spec)
            self.longest_step_s = watch.longest_step_s
            if watch.is_over and not is_done():
                return self.failed(attempt, variant, watch)
            if (late := watch.late(spec)) is not None:
                hang = attempt.diagnose(late, variant, self.reporter)
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


def record_of(variant: str, times: TrialTimes) -> TrialRecord:
    """The record of a trial of the variant with this id and these times, without its number and length."""
    middle = median(times.step_ns)
    deviation = PER_MAD * median(abs(ns - middle) for ns in times.step_ns) / middle
    variance = MEDIAN_VARIANCE * max(deviation, LEAST_DEVIATION) ** 2 / len(times.step_ns)
    peak_gib = None if times.peak_bytes is None else times.peak_bytes / GIB
    return TrialRecord(variant, 0, "ok", 0.0, step_ms=middle / 1e6, variance=variance, peak_gib=peak_gib)


BUDGET_S = 900.0
SHARE_OF_TRIALS = 0.6
"""The share of the budget, at the most; the rest is for the comparison of the best."""


@dataclass(frozen=True)
class Tuning:
    """A search, and where it is kept."""

    spec: JobSpec
    machine: Machine
    space: Space
    run: RunDir
    job_dir: Path
    budget_s: float

    @property
    def memory_gib(self) -> float | None:
        """The memory that a combination may take, where the job states it."""
        return None if self.spec.memory_bytes is None else self.spec.memory_bytes / GIB

    def trial_of(self, record: TrialRecord) -> Trial:
        """A trial as the search sees it: where batches differ, by the time of a sample."""
        position = next(i for i, variant in enumerate(self.space.variants) if variant.id == record.variant)
        if record.step_ms is None or record.is_too_large(self.memory_gib):
            return Trial(position, None, 0.0, record.seconds)
        samples = self.space.variants[position].global_batch or 1
        return Trial(position, math.log(record.step_ms / samples), record.variance, record.seconds)


def run_tune(
    pools: WorkerPools,
    invocation: Callable[[], Invocation | None],
    budget_s: float | None,
    out: Path | None,
    resume: Path | None,
    output: Output,
    url: Url | None = None,
) -> Finished:
    """Tries combinations, then compares the best ones; after Ctrl-C it returns what was measured.

    Args:
        pools: start the ranks.
        invocation: finds the job file and its overrides; `None` takes those of the search that is resumed.
        budget_s: for all of it; by default 15 minutes, or what the search had that is resumed.
        out: the run directory, if not one under `runs/`.
        resume: a search to continue; `latest` is the newest of this job.
        output: what to show of the ranks' output.
        url: where the search is kept too.

    Raises:
        SpecError: the job file or the command line is wrong.
        MachineError: the machine lacks what the job asks for, or the run directory can't be written.
    """
    gc.enable()
    given = invocation() or read_invocation(resume or Path())
    with with_mistakes_of_plan(inspect_machine):
        spec = job_to_tune(load_invocation(given))
    job = Job(given, spec, out, resume, output, url)
    check_store(url, job.resumed)
    pools.know(spec)
    machine = as_planned_for(spec, inspect_machine(), job.resumed)
    space = build_space(spec, machine)
    if job.resumed is not None:
        run = resumed(own_run(job.resumed), space)
    else:
        first = build_plan(spec, machine, chosen=(space.variants[space.own].id,))
        run = open_run(given, spec, first, machine, out)
    if url is not None:
        keep_at(run.path, url)
    known = run.read_search()
    budget_s = budget_s or (known.budget_s if known else BUDGET_S)
    tuning = Tuning(spec, machine, space, run, given.directory, budget_s)
    return attended(run, lambda progress: search(tuning, pools, output, progress))


def job_to_tune(spec: JobSpec) -> JobSpec:
    """The job as a search runs it: the comparison at its end lasts until all is decided.

    Raises:
        SpecError: there is no search of such a job.
    """
    if wrong := refusals(spec):
        raise SpecError(*wrong)
    steps = replace(spec.steps, launches=None, stated=frozenset())
    return replace(spec, name=f"{spec.name}-tune", until="decided", steps=steps)


def resumed(run: RunDir, space: Space) -> RunDir:
    """The search to continue.

    Raises:
        SpecError: it is no search, or another job's, or another command works on it.
    """
    refuse_if_alive(run)
    known, name = run.read_search(), source_of(run.path)
    if known is None:
        raise SpecError(f"{name} is no search; continue that run: gpurun --resume {name}")
    ids = {variant.id for variant in space.variants}
    if known.distinct != len(ids) or any(trial.variant not in ids for trial in run.read_trials()):
        raise SpecError(f"{name} {OTHER_JOB}\n    start a new search: gpurun tune JOB.yaml")
    return run


def search(tuning: Tuning, pools: WorkerPools, output: Output, progress: Progress) -> Finished:
    """Tries combinations, unless the best are known already, and compares the best."""
    known = tuning.run.read_search()
    record = known if known and known.finalists else screen(tuning, pools, output, progress)
    if isinstance(record, Finished):
        return record
    return execute(finals(tuning, record), pools, output, progress)


def finals(tuning: Tuning, record: SearchRecord) -> Prepared:
    """The comparison of the best, with the time that is left."""
    spent_s = sum(trial.seconds for trial in tuning.run.read_trials())
    left_s = max(tuning.budget_s - spent_s, (1 - SHARE_OF_TRIALS) * tuning.budget_s)
    spec = replace(tuning.spec, budget_s=left_s)
    plan = build_plan(spec, tuning.machine, chosen=record.finalists)
    write_json(tuning.run.plan, plan)
    write_json(tuning.run.spec, spec.resolved())
    return Prepared(plan, spec, tuning.run, tuning.job_dir, tuning.machine)


def screen(tuning: Tuning, pools: WorkerPools, output: Output, progress: Progress) -> SearchRecord | Finished:
    """Tries combinations until the best are known or the time is up; after Ctrl-C what there is then."""
    known = (*os.environ.items(), *tuning.spec.stated_secrets)

    def say(text: str) -> None:
        progress.say(hidden(text, known))

    screening = Screening(tuning, progress, say)
    trials = screening.trials_with(pools, output)
    try:
        with forwarded(lambda number: trials.attempt.ranks.forward(number) if trials.attempt else None):
            screening.run(trials)
    except Interrupted as ended:
        say(stopping_text(ended, tuning.spec.grace_limit_s))
        screening.conclude(is_over=False)
        return interrupted(tuning.run, ended)
    finally:
        trials.stop()
    return screening.conclude(is_over=True)


def interrupted(run: RunDir, ended: Interrupted) -> Finished:
    """The message after Ctrl-C: the results so far, and how to go on."""
    comparison = compare_run(run)
    write_json(run.comparison, comparison)
    return Finished(run, comparison, Interrupted(ended.cause, kept=True))


@dataclass
class Screening:
    """The part of a search that tries combinations."""

    tuning: Tuning
    progress: Progress
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.records = list(self.tuning.run.read_trials())
        space = self.tuning.space
        self.search = Search(levels_of(space.variants), first=(space.own,))
        self.began_s = time.monotonic() - sum(record.seconds for record in self.records)

    @property
    def spent_s(self) -> float:
        """Seconds of all trials so far, and of what lies between those of this command."""
        return time.monotonic() - self.began_s

    def trials_with(self, pools: WorkerPools, output: Output) -> Trials:
        """Tries combinations in a directory of its own: steps of trials are no rounds of the run."""
        tuning = self.tuning
        directory = RunDir(tuning.run.screening)
        starter = Starter(
            tuning.space.plan,
            tuning.spec,
            directory,
            tuning.job_dir,
            tuning.machine,
            software_of(tuning.machine),
        )
        relay = output.relay(self.say, tuning.spec.logs.keep_bytes)
        reporter = Reporter(directory, self.say)
        return Trials(tuning.space, starter, pools, reporter, relay, self.show)

    def run(self, trials: Trials) -> None:
        """Tries what the search asks for."""
        self.say(self.headline())
        self.write(None)
        while (batch := self.search.next_batch(self.seen(), self.left_s())) is not None:
            for position in self.in_order(batch.combinations):
                variant = self.tuning.space.variants[position]
                record = trials.run(variant.id, batch.number)
                self.keep(described(record, variant))
                if self.left_s() <= 0:
                    return
            self.conclude(is_over=False)
            write_json(self.tuning.run.comparison, compare_run(self.tuning.run))  # for the tab

    def in_order(self, combinations: Sequence[int]) -> list[int]:
        """The combinations in an order in which those that the same ranks can try follow each other."""
        launches = [launch.id for launch in self.tuning.space.plan.launches]
        variants = self.tuning.space.variants
        return sorted(
            combinations,
            key=lambda combination: launches.index(self.tuning.space.launch_of(variants[combination].id).id),
        )

    def keep(self, record: TrialRecord) -> None:
        """Writes a trial down, and shows it."""
        self.records.append(record)
        append_lines(self.tuning.run.trials, [record])
        found = record.reason if record.step_ms is None else f"{format_ms(record.step_ms)} ms"
        self.say(f"trial {len(self.records)}: {record.label}: {found}")

    def seen(self) -> list[Trial]:
        return [self.tuning.trial_of(record) for record in self.records]

    def left_s(self) -> float:
        """Seconds for further trials."""
        return SHARE_OF_TRIALS * self.tuning.budget_s - self.spent_s

    def headline(self) -> str:
        """The first line: the space that is searched."""
        space, budget = self.tuning.space, format_duration(self.tuning.budget_s)
        again = f", {len(self.records)} trials kept" if self.records else ""
        trials = format_duration(SHARE_OF_TRIALS * self.tuning.budget_s)
        return (
            f"{self.tuning.spec.name}: {plural(space.num_combinations, 'combination')}, "
            f"with the job's own setting {len(space.variants)} different ones{again} → "
            f"{source_of(self.tuning.run.path)}\n"
            f"Budget: {budget}. No trial begins after {trials} of them; then each of the best {FINALISTS} "
            "and the job's own setting is launched once, even where that takes longer."
        )

    def show(self, variant: str, stage: str) -> None:
        """Draws the progress line."""
        if not self.progress.is_live:
            return  # each trial has a line of its own
        label, number = variant_label(self.tuning.space.plan.variant(variant)), len(self.records) + 1
        left_s = max(0.0, self.left_s())
        self.progress.update(Status(label, stage, 1, 1, number, None, self.spent_s, left_s, unit="trial"))

    def conclude(self, is_over: bool) -> SearchRecord:
        """Writes down what the trials come to; the finalists once they are `is_over`.

        Raises:
            SpecError: no combination could be measured.
        """
        found = self.search.found(self.seen())
        if found is None and is_over:
            reasons = list(dict.fromkeys(record.reason or "" for record in self.records))
            raise SpecError(f"no combination could be measured: {'; '.join(reasons[:3])}")
        return self.write(found, is_over)

    def write(self, found: SearchOutcome | None, is_over: bool = False) -> SearchRecord:
        """`search.json`, as far as it is known."""
        space = self.tuning.space
        own = space.variants[space.own].id
        best = [space.variants[combination].id for combination in found.finalists] if found else []
        record = SearchRecord(
            space=space.num_combinations,
            distinct=len(space.variants),
            own=own,
            budget_s=self.tuning.budget_s,
            finalists=tuple(dict.fromkeys((*best, own))) if is_over else (),
            best=best[0] if best else None,
            left_out=(*space.impossible, *(self.not_tried(found) if found else ())),
            failed=tuple(self.failed()),
            at_most_missed_percent=percent_less(found.missed) if found else None,
            effects_at=self.effects(found, (*found.finalists, space.own)[: None if is_over else 1])
            if found
            else {},
            memory_gib=self.tuning.memory_gib,
        )
        write_json(self.tuning.run.search, record)
        return record

    def failed(self) -> Iterator[Unmeasured]:
        """Combinations of which a trial failed, or which take too much memory."""
        for record in self.records:
            variant = self.tuning.space.plan.variant(record.variant)
            if record.reason is not None:
                yield Unmeasured(settings_text(variant), record.reason)
            elif record.is_too_large(self.tuning.memory_gib):
                peak = format_number(record.peak_gib or 0.0, 2)
                yield Unmeasured(settings_text(variant), f"its peak memory of {peak} GiB is above `memory`")

    def effects(self, found: SearchOutcome, best: Sequence[int]) -> dict[str, tuple[Effect, ...]]:
        """The effect of each value on the time of a step, by the trials, for each that may be the best."""
        space, known, compared = self.tuning.space, measured(self.seen()), self.tuning.spec.compare.lists()
        return {
            space.variants[combination].id: effects(space, compared, found.belief, known, combination)
            for combination in best
        }

    def not_tried(self, found: SearchOutcome) -> Iterator[Unmeasured]:
        """Combinations that were not tried, and by how much they are slower by the model."""
        tried = {record.variant for record in self.records}
        times = found.belief.mean
        best = times[found.finalists[0]]
        for number, (variant, log_time) in enumerate(zip(self.tuning.space.variants, times, strict=True)):
            if variant.id not in tried:
                percent = 100 * (math.exp(log_time - best) - 1)
                reason = UNLIKE_ANY if number in found.unknown else predicted_text(percent)
                yield Unmeasured(settings_text(variant), reason)


def described(record: TrialRecord, variant: Variant) -> TrialRecord:
    """The record with what reports say of the variant."""
    return replace(
        record,
        settings=settings_text(variant),
        label=variant_label(variant),
        global_batch=variant.global_batch,
    )


UNLIKE_ANY = "not tried: no combination with one of its values was measured"


def percent_less(log_time: float | None) -> float | None:
    """How much less time it is, in percent."""
    return None if log_time is None else 100 * (1 - math.exp(-log_time))


def predicted_text(percent: float) -> str:
    """Why a combination wasn't tried."""
    how = f"{format_number(abs(percent), 1)} % {'slower' if percent >= 0 else 'faster'}"
    return f"not tried: by the model {how} than the best that was"
