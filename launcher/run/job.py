"""`gpurun JOB.yaml` from the job file to the comparison."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.facts import NodeFlags
from launcher.compare.label import variant_label
from launcher.compare.model import Comparison
from launcher.errors import GpurunError, Interrupted, NodesError, SpecError
from launcher.host import Machine, inspect_machine
from launcher.plan.build import build_plan, estimate_s
from launcher.plan.model import Launch, Plan
from launcher.plan.nodes import Node
from launcher.records import Event
from launcher.report.plan import headlines
from launcher.run.guard import Guard
from launcher.run.open import Invocation, open_run, read_invocation, resume_run
from launcher.run.pool import TRAINING, WorkerPool
from launcher.run.progress import Progress, Status
from launcher.run.ranks import Ranks
from launcher.run.session import Session, outcome_error
from launcher.run.signals import interruptible
from launcher.rundir import RunDir
from launcher.spec.load import load_job
from launcher.spec.model import JobSpec

LATEST = Path("latest")

PACE_FROM_LAUNCHES = 0.3
"""Share of a launch from which on its start-up no longer distorts the pace."""

WORKER = "launcher.worker.main"
"""Imported once in the server as well: every rank begins with it."""


@dataclass(frozen=True)
class Finished:
    """A run that came to an end, of whatever kind: what was measured, and what to exit with."""

    run: RunDir
    comparison: Comparison
    error: GpurunError | None


@dataclass(frozen=True)
class Job:
    """What the command was asked for, checked as far as no machine is needed for that."""

    given: Invocation
    spec: JobSpec
    out: Path | None
    resume: Path | None

    @property
    def job_dir(self) -> Path:
        return self.given.job_file.absolute().parent


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before the first process of a run is started."""

    spec: JobSpec
    machine: Machine
    plan: Plan
    run: RunDir
    job_dir: Path


def run_job(
    guard: Guard,
    invocation: Invocation | None,
    out: Path | None,
    resume: Path | None,
    flags: NodeFlags | None = None,
) -> Finished | None:
    """Runs the job, or what is missing of it. After Ctrl-C it still returns what was measured.

    `None` on nodes other than the first, which has the results.

    Args:
        guard: the two processes that watch each other.
        invocation: the job file and its overrides; `None` takes those of the run that is resumed.
        out: the run directory, where it isn't to be under `runs/`.
        resume: a run to go on with; `LATEST` is the newest of this job.
        flags: this node's place among several.

    Raises:
        SpecError: the job file or the command line is wrong.
        MachineError: the machine lacks what the job asks for, or the run directory can't be written.
        NodesError: a node of the job is gone.
    """
    gc.enable()
    with interruptible(guard.kill_workers), WorkerPool(guard, preload=(*TRAINING, WORKER)) as pool:
        given = invocation or read_invocation(resume or Path())
        job = Job(given, load_job(given.job_file, given.overrides), out, resume)
        flags = flags or NodeFlags()
        if job.spec.nodes > 1:
            from launcher.cluster.run import run_on_nodes

            return run_on_nodes(guard, pool, job, flags)
        if flags.given:
            raise SpecError("the flags about nodes need a job with several: `nodes: 2`, or --set nodes=2")
        return carry_out(prepare(job, inspect_machine()), pool)


def prepare(job: Job, machine: Machine, nodes: Sequence[Node] = ()) -> Prepared:
    """Plans the job for this machine, or for these nodes, and opens the run directory.

    Raises:
        SpecError: the job makes no sense on these devices.
        MachineError: the machine lacks what the job asks for, or the run directory can't be written.
    """
    plan = build_plan(job.spec, machine, nodes)
    if job.resume is None:
        run = open_run(job.given, job.spec, plan, machine, job.out)
    else:
        newest = job.resume == LATEST and not job.resume.exists()
        run = resume_run((job.out or Path("runs") / plan.name) if newest else job.resume, plan)
    return Prepared(job.spec, machine, plan, run, job.job_dir)


def carry_out(ready: Prepared, pool: Ranks, tell: Callable[[str], None] | None = None) -> Finished:
    """Executes the plan, and shows how it goes on.

    Args:
        tell: is told of failures as well, where others than this terminal's user should know.
    """
    plan = ready.plan
    tracker = Tracker(plan, estimate_s(plan, ready.spec), ready.run)
    with Progress(sys.stderr) as progress:
        progress.say("\n".join((*headlines(plan, ready.spec), *plan.notes)))

        def on_failure(text: str) -> None:
            progress.say(text)
            if tell is not None:
                tell(text)

        session = Session(
            plan=plan,
            spec=ready.spec,
            run=ready.run,
            job_dir=ready.job_dir,
            machine=ready.machine,
            pool=pool,
            on_event=lambda *what: progress.update(tracker.status(*what)),
            on_failure=on_failure,
        )
        return finish(session)


def finish(session: Session) -> Finished:
    """Executes the session; whatever ends it, what was measured is compared, rendered and returned."""
    error: GpurunError | None
    try:
        comparison = session.execute()
        error = outcome_error(comparison)
    except (Interrupted, NodesError) as ended:
        comparison, error = session.compare(), ended
    session.render(comparison)
    return Finished(session.run, comparison, error)


@dataclass
class Tracker:
    """Turns events into what the progress line shows."""

    plan: Plan
    estimate_s: float
    run: RunDir
    started_s: float = 0.0
    first: int | None = None

    def __post_init__(self) -> None:
        self.started_s = time.monotonic()

    def status(self, launch: Launch, position: int, event: Event | None) -> Status:
        """Where the run stands; `event` is `None` when a launch has just been started."""
        self.first = position if self.first is None else self.first
        within = event.round / event.rounds if event and event.rounds else 0.0
        elapsed_s = time.monotonic() - self.started_s
        label = None
        if event is not None and event.variant is not None:
            label = variant_label(self.plan.variant(event.variant))
        return Status(
            variant=label,
            stage=event.stage if event else "start",
            round=event.round if event else 0,
            rounds=event.rounds if event else launch.rounds,
            launch=position + 1,
            launches=len(self.plan.launches),
            elapsed_s=elapsed_s,
            remaining_s=self.remaining_s(position - self.first + within, elapsed_s),
        )

    def remaining_s(self, launches_done: float, elapsed_s: float) -> float | None:
        """By the pace so far, once that says something; before, by the estimate while it holds."""
        left = len(self.plan.launches) - (self.first or 0) - launches_done
        if launches_done >= PACE_FROM_LAUNCHES:
            return left * elapsed_s / launches_done
        return self.estimate_s - elapsed_s if elapsed_s < self.estimate_s else None


def invocation_of(job: Path | None, overrides: Sequence[str]) -> Invocation | None:
    """The command line's job; `None` where it names none."""
    return None if job is None else Invocation(job, tuple(overrides))
