"""Carries out a plan: launch by launch, so that no failure costs what was measured before or comes after."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from launcher.compare.build import compare_run
from launcher.compare.difference import planned_looks
from launcher.compare.model import Comparison
from launcher.errors import GpurunError, MachineError, VariantError
from launcher.host import Machine
from launcher.plan.model import Launch, Plan
from launcher.plan.order import order_for
from launcher.records import Event, RoundTime, VariantStatus
from launcher.report.tensorboard import write_tensorboard
from launcher.run.attempts import (
    attempt_id,
    attempts,
    finished_variants,
    merged_facts,
    missing_variants,
    rounds_done,
    status_of,
    variant_rounds,
)
from launcher.run.blame import Exit, Failure, explain, root_cause, with_crash
from launcher.run.hang import Hang, observe
from launcher.run.pool import OPTIMIZING, StartRequest
from launcher.run.ranks import Ranks
from launcher.run.tail import EventTail
from launcher.rundir import RunDir, write_json
from launcher.spec.model import JobSpec

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL: our own workers have nothing to save, users' exit handlers may."""
LAST_WORDS_S = 0.5
"""How long the other ranks may still write down why they fail, once one has."""
LEFT_BEHIND_S = 8.0
"""How long a rank may outlive another one that ended well; they all end within milliseconds."""
POLL_S = 0.1
LOG_TAIL_BYTES = 1 << 16
"""What is read of a rank's log: more than the longest traceback, of a recursion without end."""

OnEvent = Callable[[Launch, int, Event | None], None]
"""Called with a launch, its position in the plan and what it does now."""


@dataclass
class Ended:
    """How one attempt of a launch ended."""

    failure: Failure | None = None
    timeout_s: float | None = None
    hang: Hang | None = None
    """What the ranks were doing when the time was up."""
    variant: str | None = None
    """The variant that was running when it failed; `None`: none had begun."""


@dataclass
class Session:
    """One run of a plan in a run directory; may begin in the middle (`--resume`)."""

    plan: Plan
    spec: JobSpec
    run: RunDir
    job_dir: Path
    machine: Machine
    pool: Ranks
    on_event: OnEvent
    on_failure: Callable[[str], None]
    """Called with the explanation of a failure as soon as it is known."""
    failures: list[str] = field(default_factory=list)

    def execute(self) -> Comparison:
        """Runs what is missing; the comparison is written after every launch, whatever comes later.

        Raises:
            MachineError: the run directory can't be written any more.
            Interrupted: by Ctrl-C or SIGTERM, after the processes are gone.
        """
        for position, launch in enumerate(self.plan.launches):
            self.run_launch(position, launch)
            self.compare()
        return self.compare()

    def compare(self) -> Comparison:
        """The comparison of what has been measured so far, written to the run directory."""
        comparison = compare_run(self.run)
        write_json(self.run.comparison, comparison)
        return comparison

    def render(self, comparison: Comparison) -> None:
        """TensorBoard's files, beside the figures that they show."""
        write_tensorboard(comparison, self.run)

    def run_launch(self, position: int, launch: Launch) -> None:
        """Attempts a launch until every variant of it is measured or has failed."""
        while missing := missing_variants(self.run, launch):
            variants = self.with_baseline(launch, missing)
            rounds = launch.rounds - rounds_done(self.run, self.plan, launch, missing)
            ended = self.attempt(position, launch, variants, max(1, rounds))
            self.settle(launch, missing, ended)

    def with_baseline(self, launch: Launch, missing: Sequence[str]) -> list[str]:
        """The missing variants, and the baseline beside them where it takes part: rounds are pairs."""
        status = self.run.read_status(self.plan.baseline)
        usable = status is None or status.status in ("ok", "unsteady")
        return [v for v in launch.variants if v in missing or (v == self.plan.baseline and usable)]

    def attempt(self, position: int, launch: Launch, variants: Sequence[str], rounds: int) -> Ended:
        """Starts the launch's processes and waits until they have all ended."""
        name = attempt_id(launch, len(attempts(self.run, launch)) + 1)
        self.write_order(launch, name, variants, rounds)
        tail = EventTail(self.run.events(name))
        self.on_event(launch, position, None)
        self.pool.start(self.requests(launch, name))
        if position == 0 and len(self.plan.launches) > 1:
            self.pool.preload(OPTIMIZING)
        try:
            exits, timeout_s = self.watch(position, launch, tail)
            hang = observe(self.pool, self.logs(launch, name)) if timeout_s is not None else None
        finally:
            stopped_ns = time.time_ns()
            self.pool.stop(GRACE_S)
        exits += self.pool.poll(0)
        variant = tail.last.variant if tail.last else None
        if hang is not None:
            ended = Ended(timeout_s=timeout_s, hang=hang, variant=variant)
            self.report_hang(ended, launch, name)
            return ended
        if finished_variants(self.run, launch) >= set(variants):
            return Ended()
        self.check_disk(exits, name)
        failure = self.report(root_cause(exits, self.run.read_failures(name), stopped_ns), name)
        # A rank that could still say what it was busy with is right: rank 0, whose events these are, may have
        # gone on to a variant while another rank was still building.
        return Ended(failure=failure, variant=failure.variant if failure.stage else variant)

    def write_order(self, launch: Launch, name: str, variants: Sequence[str], rounds: int) -> None:
        """The one file that the workers of an attempt read."""
        one_group = len({other.group for other in self.plan.launches}) == 1
        order = order_for(
            self.plan,
            self.spec,
            launch,
            run_dir=self.run.path.resolve(),
            job_dir=self.job_dir,
            machine=self.machine,
            looks=planned_looks(self.plan, self.spec.steps.early_stop),
            prior=self.prior(variants) if one_group else {},
        )
        chosen = tuple(variant for variant in order.variants if variant.id in variants)
        baseline = order.baseline if order.baseline in variants else None
        attempt = replace(order, launch=name, variants=chosen, rounds=rounds, baseline=baseline)
        write_json(self.run.order(name), attempt)

    def prior(self, variants: Sequence[str]) -> Mapping[str, tuple[RoundTime, ...]]:
        """Rounds that were measured before, for the looks to count."""
        return {v: variant_rounds(self.run, self.plan, v) for v in variants}

    def requests(self, launch: Launch, name: str) -> list[StartRequest]:
        """What to start, with the attempt's own file names."""
        order = str(self.run.order(name).resolve())
        return [
            StartRequest(
                rank=process.rank,
                args=(order, str(process.rank)),
                env=dict(process.env),
                log=str(self.run.log(name, process.rank).resolve()),
                cwd=str(self.job_dir),
            )
            for process in launch.processes
        ]

    def watch(self, position: int, launch: Launch, tail: EventTail) -> tuple[list[Exit], float | None]:
        """Exits until all ranks have ended, one has failed, or a variant takes longer than its timeout."""
        exits: list[Exit] = []
        started = time.monotonic()
        deadline: float | None = None
        while len(exits) < len(launch.processes):
            exits += self.pool.poll(POLL_S)
            for event in tail.read():
                self.on_event(launch, position, event)
            spent_s = tail.spent_s(time.time_ns()) if tail.last else time.monotonic() - started
            if spent_s > self.spec.timeout_s:
                return exits, self.spec.timeout_s
            if deadline is None and exits:
                failed = any(exit_.returncode != 0 for exit_ in exits)
                deadline = time.monotonic() + (LAST_WORDS_S if failed else LEFT_BEHIND_S)
            if deadline is not None and time.monotonic() > deadline:
                break
        tail.read()
        return exits, None

    def check_disk(self, exits: Sequence[Exit], name: str) -> None:
        """A worker that can't write its results ends the whole run, not only its variant."""
        if any(exit_.returncode == os.EX_IOERR for exit_ in exits):
            raise MachineError(
                f"the workers can't write to {self.run.path}: the disk is full or the folder is closed\n"
                f"    free some space, then go on: gpurun --resume {self.run.path}\n"
                f"    log: {self.run.log(name, 0)}"
            )

    def report(self, failure: Failure, name: str) -> Failure:
        """Tells of a failure, and returns it with what the rank's log adds to it."""
        path = self.run.log(name, failure.rank)
        log = log_tail(path)
        failure = with_crash(failure, log)
        self.tell(explain(failure, log, str(path)))
        return failure

    def report_hang(self, ended: Ended, launch: Launch, name: str) -> None:
        """Tells which rank the others waited for, as far as their stacks show it."""
        assert ended.hang is not None
        lines = [f"{ended.variant or launch.id} took longer than {ended.timeout_s:g} s", *ended.hang.details]
        log = self.run.log(name, ended.hang.rank or 0)
        self.tell("\n    ".join(lines) + f"\nlog (with the stacks): {log}")

    def tell(self, text: str) -> None:
        self.failures.append(text)
        self.on_failure(text)

    def logs(self, launch: Launch, name: str) -> dict[int, Path]:
        """Where each rank of an attempt writes."""
        return {process.rank: self.run.log(name, process.rank) for process in launch.processes}

    def settle(self, launch: Launch, missing: Sequence[str], ended: Ended) -> None:
        """Writes down how the variants of an attempt ended; a failure costs the variant that caused it."""
        for variant in finished_variants(self.run, launch):
            facts = merged_facts(self.run, self.plan, variant)
            write_json(self.run.facts(variant), facts)
            write_json(self.run.status(variant), status_of(facts))
        if ended.failure is None and ended.timeout_s is None:
            return
        lost = [ended.variant] if ended.variant else missing
        for variant in lost:
            write_json(self.run.status(variant), self.lost_status(launch, ended))

    def lost_status(self, launch: Launch, ended: Ended) -> VariantStatus:
        """The status of a variant that a failed or late attempt was busy with."""
        name = attempts(self.run, launch)[-1]
        if ended.failure is None:
            return self.timeout_status(name, ended)
        failure = ended.failure
        log = self.run.log(name, failure.rank).relative_to(self.run.path)
        status: Literal["oom", "failed"] = "oom" if failure.kind == "oom" else "failed"
        return VariantStatus(status, failure.reason, name, failure.rank, str(log))

    def timeout_status(self, name: str, ended: Ended) -> VariantStatus:
        """The status of a variant whose time was up, with the rank that the others waited for."""
        rank = ended.hang.rank if ended.hang else None
        where = f": {ended.hang.headline}" if ended.hang and ended.hang.headline else ""
        log = self.run.log(name, rank or 0).relative_to(self.run.path)
        reason = f"took longer than {ended.timeout_s:g} s{where}"
        return VariantStatus("timeout", reason, name, rank, str(log))


def log_tail(path: Path, num_bytes: int = LOG_TAIL_BYTES) -> str:
    """The last part of a log, whatever bytes a program wrote into it."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - num_bytes))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def outcome_error(comparison: Comparison) -> GpurunError | None:
    """What the command ends with, though the results stand: a variant failed or timed out."""
    lost = [v.id for v in comparison.variants if v.status in ("failed", "timeout")]
    return (
        VariantError(f"{len(lost)} of {len(comparison.variants)} variants failed: {', '.join(lost)}")
        if lost
        else None
    )
