"""Carries out a plan: launch by launch, so that no failure costs what was measured before or comes after."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.difference import planned_looks
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import Interrupted, MachineError, ParamsError
from gpurun.launcher.failures.reporter import Reporter
from gpurun.launcher.failures.restart import fails_everywhere, is_transient, pause_s
from gpurun.launcher.failures.root_cause import Failure, root_cause
from gpurun.launcher.inspect.hang_diagnosis import Hang, diagnose
from gpurun.launcher.inspect.hang_watchdog import HangWatchdog
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.logs.relay import Relay
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.plan.launch_config import order_for
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.processes.exits import Exit
from gpurun.launcher.processes.pool import OPTIMIZING, StartRequest
from gpurun.launcher.processes.ranks import Pools, Ranks
from gpurun.launcher.report.tensorboard.event_files import write_tensorboard
from gpurun.launcher.run.attempts import (
    attempt_id,
    attempts,
    finished_variants,
    merged_facts,
    missing_variants,
    num_restarts,
    rounds_done,
    status_of,
    untried_with_same_model,
    variant_rounds,
)
from gpurun.launcher.run.event_tail import EventReader
from gpurun.launcher.run.program_ranks import begin_launch, end_launch, launch_requests
from gpurun.launcher.run.stage import allowed_s, is_balancing, located
from gpurun.launcher.rundir.claim import entered
from gpurun.launcher.rundir.control import leave
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event, Restart, RoundTime, VariantStatus
from gpurun.launcher.units import format_duration, plural

LAST_WORDS_S = 0.5
"""How long the other ranks may still write down why they fail, once one has."""
LEFT_BEHIND_S = 8.0
"""How long a rank may outlive another one that ended well; they all end within milliseconds."""
POLL_S = 0.2
"""How soon logs and progress are shown, at most; that a rank has ended is seen at once."""

OnEvent = Callable[[Launch, int, Event | None], None]
"""Called with a launch, its position in the plan and what it does now."""


@dataclass
class Ended:
    """How one attempt of a launch ended."""

    failure: Failure | None = None
    late: str | None = None
    """Why the ranks were stopped: `took longer than 5 s`, `made no step for 30 s`."""
    hang: Hang | None = None
    """What they were doing then."""
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
    """Of the launch that runs now: `pools` has one for every environment."""
    pools: Pools
    on_event: OnEvent
    account: Reporter
    relay: Relay | None = None
    """Shows what the ranks write; `None`: nobody wants to see it."""
    mistake: ParamsError | None = None
    """What is wrong with the job itself, where only building its workload could tell."""

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
            if self.should_restart(launch, ended):
                continue
            self.settle(launch, missing, ended)

    def with_baseline(self, launch: Launch, missing: Sequence[str]) -> list[str]:
        """The missing variants, and the baseline beside them where it takes part: rounds are pairs."""
        status = self.run.read_status(self.plan.baseline)
        usable = status is None or status.status in ("ok", "unsteady")
        return [v for v in launch.variants if v in missing or (v == self.plan.baseline and usable)]

    def attempt(self, position: int, launch: Launch, variants: Sequence[str], rounds: int) -> Ended:
        """Starts the launch's processes and waits until they have all ended."""
        name = attempt_id(launch, len(attempts(self.run, launch)) + 1)
        program = self.program_of(launch)
        if program is not None:
            self.pool = self.pools.get(program.env)
            begin_launch(self.spec, self.run, program, launch, name, self.job_dir)
        else:
            self.write_order(launch, name, variants, rounds)
        tail = EventReader(self.run.events(name))
        self.on_event(launch, position, None)
        entered(self.run, name)
        if self.relay is not None:
            self.relay.follow(self.own_logs(launch, name))
        if name != launch.id:  # the ranks of all further attempts begin with it
            self.pool.preload(OPTIMIZING)
        self.pool.start(self.requests(launch, name))
        if position == 0 and len(self.plan.launches) > 1:
            self.pool.preload(OPTIMIZING)
        exits, ended, stopped_ns = self.supervise(position, launch, tail, name)
        exits += self.pool.poll(0)
        if program is not None:
            end_launch(self.run, program, name, exits)
        variant = tail.last.variant if tail.last else None
        if ended is not None:
            return replace(ended, variant=variant)
        if finished_variants(self.run, launch) >= set(variants):
            if self.relay is not None:
                self.relay.finish()
            return Ended()
        self.check_disk(launch, exits, name)
        cause = located(root_cause(exits, self.run.read_failures(name), stopped_ns), tail.last)
        failure = self.account.failure(cause, name, self.host_of(launch, cause.rank))
        # A rank that could still say what it was busy with is right: rank 0, whose events these are, may have
        # gone on to a variant while another rank was still building.
        return Ended(failure=failure, variant=failure.variant if failure.stage else variant)

    def supervise(
        self, position: int, launch: Launch, tail: EventReader, name: str
    ) -> tuple[list[Exit], Ended | None, int]:
        """Watches the ranks, and ends those that are left; as `watch` returns it, and when that was.

        What ranks write when they are asked to end is shown (that a checkpoint was saved, say), but not after
        a failure: they would only tell that their peer is gone.
        """
        is_failure = True
        try:
            exits, ended = self.watch(position, launch, tail, name)
            is_failure = ended is None
        except Interrupted as interruption:
            is_failure = False
            self.account.say(stopping_text(interruption, self.spec.grace_s))
            raise
        finally:
            stopped_ns = time.time_ns()
            self.pool.stop(self.spec.grace_s)
            if self.relay is not None and not is_failure:
                self.relay.finish()
            leave(self.run.control(name))
            entered(self.run, None)
        return exits, ended, stopped_ns

    def host_of(self, launch: Launch, rank: int) -> str:
        """The machine that a rank runs on."""
        nodes = self.plan.nodes
        return nodes[launch.processes[rank].node].host if nodes else platform.node()

    def program_of(self, launch: Launch) -> Variant | None:
        """The variant of a launch that runs a program; `None` for a workload's."""
        first = self.plan.variant(launch.variants[0])
        return first if first.kind.runs_program else None

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
            found=self.found(launch),
            caps=fit.caps if (fit := self.run.read_max_batch()) else (),
        )
        chosen = tuple(variant for variant in order.variants if variant.id in variants)
        baseline = order.baseline if order.baseline in variants else None
        attempt = replace(order, launch=name, variants=chosen, rounds=rounds, baseline=baseline)
        write_json(self.run.launch_config(name), attempt)

    def prior(self, variants: Sequence[str]) -> Mapping[str, tuple[RoundTime, ...]]:
        """Rounds that were measured before, for the looks to count."""
        return {v: variant_rounds(self.run, self.plan, v) for v in variants}

    def found(self, launch: Launch) -> Mapping[str, tuple[int, ...]]:
        """Balanced splits of this launch whose samples an earlier one, or an earlier attempt, has found."""
        balances = {variant: self.run.read_balance(variant) for variant in launch.variants}
        return {variant: balance.best.split for variant, balance in balances.items() if balance}

    def requests(self, launch: Launch, name: str) -> list[StartRequest]:
        """What to start, with the attempt's own file names."""
        if (program := self.program_of(launch)) is not None:
            return launch_requests(self.run, program, launch, name, self.job_dir, self.plan.address)
        order = str(self.run.launch_config(name).resolve())
        return [
            StartRequest(
                rank=process.rank,
                args=(order, str(process.rank)),
                env=dict(process.env),
                log=str(self.run.log(name, process.rank).resolve()),
                cwd=str(self.job_dir),
                control=str(self.run.control(name).resolve()),
                cpus=process.cpus,
            )
            for process in launch.processes
        ]

    def watch(
        self, position: int, launch: Launch, tail: EventReader, name: str
    ) -> tuple[list[Exit], Ended | None]:
        """Exits until all ranks have ended, or one has failed; or how the launch ended that was too late."""
        exits: list[Exit] = []
        pace = HangWatchdog(self.run.control(name), self.spec.hang_timeout_s, self.pool.steps_elsewhere)
        started = time.monotonic()
        deadline: float | None = None
        while len(exits) < len(launch.processes):
            exits += self.pool.poll(POLL_S)
            events = tail.read()
            for event in events:
                self.on_event(launch, position, event)
            spent_s = tail.spent_s(time.time_ns()) if tail.last else time.monotonic() - started
            if ended := self.too_late(launch, name, tail, spent_s, pace.hangs(bool(events))):
                return exits, ended
            failed = any(exit_.returncode != 0 for exit_ in exits)
            if self.relay is not None and not failed:
                self.relay.look()
            # A program's last rank may save a model for long after the others have ended.
            is_over = failed or (bool(exits) and not self.spec.kind.runs_program)
            if deadline is None and is_over:
                deadline = time.monotonic() + (LAST_WORDS_S if failed else LEFT_BEHIND_S)
            if deadline is not None and time.monotonic() > deadline:
                break
        tail.read()
        return exits, None

    def too_late(
        self, launch: Launch, name: str, tail: EventReader, spent_s: float, hangs: bool
    ) -> Ended | None:
        """How a launch ends whose variant takes longer than its timeout, or that makes no step any more."""
        limit_s = allowed_s(self.spec.limit_s, tail.last)
        if spent_s > limit_s:
            late, stops = f"took longer than {limit_s:g} s", True
        elif hangs:
            late, stops = f"made no step for {self.spec.hang_timeout_s:g} s", self.spec.on_hang == "stop"
        else:
            return None
        hang = diagnose(self.pool.observe(self.run.control(name)))
        if is_balancing(tail.last):
            late += " while its split was being found"
        elif hangs and hang.is_before_first_step:
            late += " (the first was still to come)"
        variant = tail.last.variant if tail.last else None
        self.account.hang(hang, name, f"{variant or launch.id} {late}")
        return Ended(late=late, hang=hang) if stops else None

    def should_restart(self, launch: Launch, ended: Ended) -> bool:
        """Whether the launch starts again as it was, after a pause; says so, and counts it."""
        if ended.failure is None and ended.late is None:
            return False
        if ended.failure is not None and not is_transient(ended.failure):
            return False
        number = num_restarts(self.run, launch) + 1
        if number > self.spec.restarts:
            return False
        reason = ended.failure.reason if ended.failure else str(ended.late)
        append_lines(
            self.run.restarts,
            [Restart(time.time_ns(), attempts(self.run, launch)[-1], number, reason)],
        )
        wait_s = pause_s(number)
        self.account.tell(f"restart {number} of {self.spec.restarts} of {launch.id} in {wait_s:g} s")
        time.sleep(wait_s)
        return True

    def check_disk(self, launch: Launch, exits: Sequence[Exit], name: str) -> None:
        """A worker that can't write its results ends the whole run, not only its variant."""
        full = [exit_.rank for exit_ in exits if exit_.returncode == os.EX_IOERR]
        if full:
            where = f" on {self.host_of(launch, full[0])}" if self.plan.nodes else ""
            raise MachineError(
                f"the workers{where} can't write to {self.run.path}: "
                "the disk is full or the folder is closed\n"
                f"    free some space, then go on: gpurun --resume {self.run.path}\n"
                f"    log: {self.run.log(name, full[0])}"
            )

    def own_logs(self, launch: Launch, name: str) -> dict[int, Path]:
        """Where each rank of an attempt writes; those of other nodes are shown there."""
        return {p.rank: self.run.log(name, p.rank) for p in launch.processes if p.node == 0}

    def settle(self, launch: Launch, missing: Sequence[str], ended: Ended) -> None:
        """Writes down how the variants of an attempt ended; a failure costs the variant that caused it."""
        for variant in finished_variants(self.run, launch):
            facts = merged_facts(self.run, self.plan, variant)
            write_json(self.run.facts(variant), facts)
            write_json(self.run.status(variant), status_of(facts))
        if ended.failure is None and ended.late is None:
            return
        lost = [ended.variant] if ended.variant else missing
        for variant in lost:
            write_json(self.run.status(variant), self.lost_status(launch, ended))
        if ended.variant is None and ended.failure is not None:
            self.skip_same_failure(launch, lost, ended, ended.failure)

    def skip_same_failure(self, launch: Launch, lost: Sequence[str], ended: Ended, failure: Failure) -> None:
        """Spares variants of other launches from failing at the same mistake in what builds their model."""
        if failure.stage != "build" or not fails_everywhere(failure):
            return
        if failure.error == ParamsError.__name__:
            self.mistake = ParamsError(failure.message)
        alike = untried_with_same_model(self.run, self.plan, lost)
        for variant in alike:
            write_json(self.run.status(variant), self.lost_status(launch, ended))
        if alike:
            others = plural(len(alike), "other variant")
            self.account.tell(f"{others} would build the same model and fail likewise: not started")

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
        reason = f"{ended.late}{where}"
        return VariantStatus("timeout", reason, name, rank, str(log))


def stopping_text(interruption: Interrupted, grace_s: float) -> str:
    """What a person should know who waits for the ranks to end."""
    if grace_s <= 0:
        return f"{interruption.cause}: the ranks are killed"
    return (
        f"{interruption.cause}: the ranks are asked to end, and killed after {format_duration(grace_s)}; "
        "another Ctrl-C kills them at once"
    )
