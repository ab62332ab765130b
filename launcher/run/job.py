"""`gpurun JOB.yaml` from the job file to the comparison."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import GpurunError, Interrupted, NodesError, ParamsError, SpecError, VariantError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.logs.lines import has_colour
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.machine.host import Machine, software_of
from gpurun.launcher.machine.network import check_loopback
from gpurun.launcher.machine.resource_limits import check_limits
from gpurun.launcher.masking import hidden
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.estimate import estimate_s
from gpurun.launcher.plan.model import GatePlan, Launch, Node, Plan, ranks_there
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool import Pools, WorkerPool, WorkerPools, say_on_stderr
from gpurun.launcher.report.terminal.plan import headlines
from gpurun.launcher.run.attempts import has_ended, let_run_again, resumption_text, spent_s
from gpurun.launcher.run.find import find_run
from gpurun.launcher.run.max_batch import combined, find_rooms, wants_max
from gpurun.launcher.run.open import (
    Invocation,
    as_planned_for,
    find_earlier,
    open_run,
    own_run,
    run_to_resume,
)
from gpurun.launcher.run.progress_line import Progress, Status
from gpurun.launcher.run.running_attempt import Starter, Streams
from gpurun.launcher.run.session import Session
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.paths import LATEST, Url
from gpurun.launcher.rundir.records import MEASURED, Event, MaxBatch, Resumption
from gpurun.launcher.rundir.store import (
    INTERRUPTED_S,
    copied,
    keep_at,
    kept_at,
    refuse_taken,
    refuse_unwritable,
)
from gpurun.launcher.units import format_duration, plural

SPENT = (
    "Nothing is left to measure: the budget of {} is spent.\n"
    "    to measure for longer, start a new run with a larger `budget`"
)

SPEED_FROM_LAUNCHES = 0.3
"""Share of a launch after which its start-up no longer distorts the estimate of the remaining time."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended, well or not: what was measured, and the error to exit with."""

    run: RunDir
    comparison: Comparison
    error: GpurunError | None
    reported: tuple[str, ...] = ()
    """Failures and hangs of the run that were shown on stderr."""


@dataclass(frozen=True)
class Prepared(Starter):
    """Everything that is known before the first process of a run starts."""

    machine: Machine
    resumed: Resumption | None = None
    """The parts that a resumed run keeps; `None` of a new one."""

    @property
    def environments(self) -> list[tuple[Mapping[str, str], str]]:
        """Variables and the interpreter of each variant's server."""
        return [self.plan.environment(variant.id) for variant in self.plan.variants]


@dataclass(frozen=True)
class Output:
    """How much of the ranks' output is shown."""

    quiet: bool = False
    only_rank: int | None = None
    streams: Streams = field(default_factory=Streams)
    is_part: bool = False
    """Whether a command makes several runs: each shows no plan, gives no advice on a new run, and leaves what
    interrupted ranks write to their logs."""

    def check(self, plan: Plan) -> None:
        """Refuses `--only-rank` for a rank that does not exist.

        Raises:
            SpecError: no variant has that many ranks.
        """
        num_ranks = max(variant.world_size for variant in plan.variants)
        if self.only_rank is not None and self.only_rank >= num_ranks:
            there = ranks_there(num_ranks)
            raise SpecError(f"--only-rank {self.only_rank}: no variant has this rank; {there}")

    def relay(
        self, say: Callable[[str], None], keep_bytes: int, ask: Callable[[str], None] | None = None
    ) -> Relay:
        only = () if self.quiet else None if self.only_rank is None else (self.only_rank,)
        colour = has_colour(sys.stderr, os.environ)
        return Relay(
            say,
            only,
            colour,
            keep_bytes,
            as_torchrun=self.streams.as_torchrun,
            ask=(ask or say) if self.streams.reads_terminal else None,
            passes_to=self.streams.passes_to,
            only_local=self.streams.only_local_ranks,
        )


@dataclass(frozen=True)
class Job:
    """The command line's request, checked as far as possible without a machine."""

    given: Invocation
    spec: JobSpec
    out: Path | None
    resume: Path | None
    output: Output
    keep_at: Url | None = None
    """The URL at which the run is kept too; `None`: where it was before, if it is resumed."""

    @property
    def job_dir(self) -> Path:
        return self.given.directory

    @property
    def resumed(self) -> Path | None:
        """The run to resume."""
        newest = self.resume == Path(LATEST) and not self.resume.exists()
        return (self.out or Path("runs") / self.spec.name) if newest else self.resume


def prepare(
    job: Job,
    machine: Machine,
    pool: WorkerPool,
    nodes: Sequence[Node] = (),
    gate: GatePlan | None = None,
    find_max: Callable[[], MaxBatch] | None = None,
) -> Prepared:
    """Plans the job for this machine, or for these nodes, and opens the run directory.

    Args:
        find_max: finds the largest batch; `None`: on this machine alone.

    Raises:
        SpecError: the job does not fit these devices.
        MachineError: the machine lacks what the job asks for, or the run directory can't be written.
        VariantError: `global_batch: max` could not be found.
    """
    spec, resume, found = job.spec, job.resumed, None
    check_store(job.keep_at, resume)
    if not job.output.streams.as_torchrun:  # whose ranks have torchrun's number of threads
        machine = as_planned_for(spec, machine, resume)
    if wants_max(spec):
        found = find_run(resume).read_max_batch() if resume else None
        if found is None and find_max is not None:
            found = find_max()
        elif found is None:
            rooms = find_rooms(spec, machine, pool, job.job_dir, say_on_stderr)
            found = combined(spec, [rooms], say_on_stderr)
        spec = replace(spec, global_batch=found.global_batch)
    plan = build_plan(spec, machine, nodes, gate)
    plan = replace(plan, step_s=found.step_s) if found else plan
    job.output.check(plan)
    check_limits(max(variant.world_size for variant in plan.variants))
    if not nodes:
        check_loopback()
    run = run_to_resume(resume, plan) if resume else open_run(job.given, spec, plan, machine, job.out)
    resumed = let_run_again(run, plan, software_of(machine), job.job_dir) if resume else None
    if found is not None:
        write_json(run.max_batch, found)
    if job.keep_at is not None:
        keep_at(run.path, job.keep_at)
    return Prepared(plan, spec, run, job.job_dir, machine, resumed=resumed)


def check_store(keep_at: Url | None, resume: Path | None) -> None:
    """Returns if the run can be kept at the URL, or where it was kept before.

    Raises:
        SpecError: there is another run, or none to resume that is the user's own.
        MachineError: files can't be written there.
    """
    before = kept_at(own_run(resume).path) if resume else None
    if (url := keep_at or before) is not None:
        if url != before:
            refuse_taken(url)
        refuse_unwritable(url)


def carry_out(
    ready: Prepared, pools: Pools, output: Output, notify: Callable[[str], None] | None = None
) -> Finished:
    """Executes the plan; shows its progress, and copies the run to where it is kept too.

    Args:
        ready: the plan, and what it was made from.
        pools: start the ranks.
        output: what to show of what the ranks write.
        notify: gets the messages about failures as well, for users at other terminals.
    """
    return attended(ready.run, lambda progress: execute(ready, pools, output, progress, notify))


def attended(run: RunDir, work: Callable[[Progress], Finished]) -> Finished:
    """Does the work on a run: no other command does meanwhile, and it is copied to where it is kept too.

    Files that are missing there at the end are an error.
    """
    with Progress(sys.stderr) as progress, claimed(run):
        with copied(run.path, kept_at(run.path), progress.say) as copy:
            finished = work(progress)
            if finished.error and finished.error.exit_code == Interrupted.exit_code:
                copy.limit_s = INTERRUPTED_S
        if copy.error is None:
            return finished
        error = finished.error
        if copy.interruption is not None:
            error = error or Interrupted(copy.interruption.cause, kept=True)
        if error is not None:
            progress.say(str(copy.error))
        return replace(finished, error=error or copy.error)


def execute(
    ready: Prepared,
    pools: Pools,
    output: Output,
    progress: Progress,
    notify: Callable[[str], None] | None = None,
) -> Finished:
    """Executes the plan in a run directory that this command has claimed."""
    plan, known = ready.plan, (*os.environ.items(), *ready.spec.stated_secrets)
    spent = spent_s(ready.run) if plan.budget_s else 0.0
    tracker = ProgressTracker(plan, estimate_s(plan, ready.spec) - spent, ready.run)
    earlier = find_earlier(plan.name, ready.machine.hostname)
    if not output.is_part:
        progress.say("\n".join((*headlines(plan, ready.spec, earlier), *plan.notes)))
    if ready.resumed is not None:
        progress.say(hidden(resumption_text(ready.resumed), known))
    if plan.budget_s is not None and has_ended(ready.run, plan):
        progress.say(SPENT.format(format_duration(plan.budget_s)))

    def say(text: str) -> None:
        progress.say(text)
        if notify is not None:
            notify(text)

    if isinstance(pools, WorkerPools):  # of several nodes, each does this for its own
        pools.keep_only(ready.environments)
        pools.say = say

    def hide(text: str) -> str:
        return hidden(text, known)

    def on_event(launch: Launch, event: Event | None) -> None:
        progress.update(tracker.status(launch, event))
        if event is None:
            import_writer()

    session = Session(
        starter=replace(ready, software=software_of(ready.machine), streams=output.streams),
        pools=pools,
        on_event=on_event,
        reporter=Reporter(ready.run, say, hide),
        relay=output.relay(
            lambda text: progress.say(hide(text)),
            ready.spec.logs.keep_bytes,
            lambda text: progress.ask(hide(text)),
        ),
        resumed=ready.resumed,
        is_part=output.is_part,
    )
    with forwarded(lambda number: session.ranks.forward(number), ready.spec.ends_on_sigusr1):
        return finish(session)


def finish(session: Session) -> Finished:
    """Executes the session. However it ends, what was measured is compared, rendered and returned."""
    error: GpurunError | None
    try:
        comparison = session.execute()
        error = outcome_error(comparison, session.mistake)
    except Interrupted as ended:
        comparison = session.compare()
        error = Interrupted(ended.cause, kept=any(each.status != "skipped" for each in comparison.variants))
    except NodesError as ended:
        comparison, error = session.compare(), ended
    try:
        import_writer()(comparison, session.run)
    except Interrupted as ended:
        error = error or Interrupted(ended.cause, kept=True)
    return Finished(session.run, comparison, error, tuple(session.reporter.messages))


def import_writer() -> Callable[[Comparison, RunDir], None]:
    """The writer of event files. It is slow to import: on node 0 alone, first while ranks start."""
    from gpurun.launcher.report.tensorboard import write_tensorboard

    return write_tensorboard


@dataclass
class ProgressTracker:
    """Turns events into what the progress line shows."""

    plan: Plan
    estimate_s: float
    """The expected length; of a run with a budget, what is left of it."""
    run: RunDir
    started_s: float = field(default_factory=time.monotonic)
    first: int | None = None
    started: int = 0
    """Launches."""

    def status(self, launch: Launch, event: Event | None) -> Status:
        """How far the run is; `event` is `None` when a launch has just been started."""
        position = self.plan.launches.index(launch)
        self.first = position if self.first is None else self.first
        within = event.round / event.rounds if event and event.rounds else 0.0
        self.started += event is None
        elapsed_s = time.monotonic() - self.started_s
        label = None
        if event is not None and event.variant is not None:
            label = variant_label(self.plan.variant(event.variant))
        return Status(
            variant=label,
            stage=event.stage if event else "start",
            round=event.round if event else 0,
            rounds=event.rounds if event else launch.rounds,
            launch=self.started if self.plan.budget_s else position + 1,
            launches=None if self.plan.budget_s else len(self.plan.launches),
            elapsed_s=elapsed_s,
            remaining_s=self.remaining_s(position - self.first + within, elapsed_s),
        )

    def remaining_s(self, launches_done: float, elapsed_s: float) -> float | None:
        """Seconds that are left: by the speed so far, once enough is done; before that, by the estimate."""
        left = len(self.plan.launches) - (self.first or 0) - launches_done
        if launches_done >= SPEED_FROM_LAUNCHES and self.plan.budget_s is None:
            return left * elapsed_s / launches_done
        return self.estimate_s - elapsed_s if elapsed_s < self.estimate_s else None


SMALLER = "set a smaller `global_batch`, or divide it into micro-batches: `accumulate`"
SMALLER_PROGRAM = (
    "give each process of the program a smaller batch, or start fewer of them with `devices`; the program's "
    "own options follow `--`, in a job they are `args`"
)


def outcome_error(comparison: Comparison, mistake: ParamsError | None = None) -> GpurunError | None:
    """Why the command does not exit with 0, although results exist; `None`: it does.

    A variant that runs out of memory is a result if another variant was measured: it does not fit. If none
    was measured, a script or a batch system has nothing to continue with.

    Args:
        comparison: what was measured.
        mistake: one in the job that was found during the run; it is the outcome if no variant was measured.
    """
    variants = comparison.variants
    if mistake and not any(v.step_ms or v.probe for v in variants):
        return mistake
    lost = [v.id for v in variants if v.status in ("failed", "timeout", "hung")]
    if lost:
        return VariantError(f"{len(lost)} of {plural(len(variants), 'variant')} failed: {', '.join(lost)}")
    too_large = [v.id for v in variants if v.status == "oom"]
    if too_large and not any(v.status in MEASURED for v in variants):
        hint = SMALLER_PROGRAM if variants[0].kind.runs_program else SMALLER
        return VariantError(
            f"no variant could be measured; out of memory: {', '.join(too_large)}\n    {hint}"
        )
    return None
