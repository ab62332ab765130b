"""What an attempt of a launch is started with: the file that its ranks read, and one request per rank."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.compare.variant_difference import planned_looks
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.plan.devices import MachineLike
from gpurun.launcher.plan.launch_config import order_for, program_order
from gpurun.launcher.plan.model import Launch, Plan, Process, Variant
from gpurun.launcher.processes.protocol import PROGRAM_ENTRY, SERVICE_RANK, WORKER_ENTRY, Exit, StartRequest
from gpurun.launcher.run.attempts import num_restarts, variant_rounds
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event, RoundTime

STORE_ENTRY = "gpurun.launcher.worker.base.process_group:serve_store"


@dataclass(frozen=True)
class Starter:
    """Prepares the attempts of a run's launches."""

    plan: Plan
    spec: JobSpec
    run: RunDir
    job_dir: Path
    machine: MachineLike

    def prepare(
        self, launch: Launch, name: str, variants: Sequence[str], rounds: int
    ) -> tuple[StartRequest, ...]:
        """Writes what the ranks read; what to start.

        Args:
            name: of the attempt: `03-ddp-2~2`.
            variants: to be measured.
            rounds: to be run.
        """
        program = program_of(self.plan, launch)
        if program is None:
            self.write_config(launch, name, variants, rounds)
            return self.rank_requests(launch, name, None)
        self.begin_program(launch, name, program)
        return (self.store_request(name, program), *self.rank_requests(launch, name, program))

    def write_config(self, launch: Launch, name: str, variants: Sequence[str], rounds: int) -> None:
        """The one file that the workers of an attempt read."""
        one_group = len({other.group for other in self.plan.launches}) == 1
        config = order_for(
            self.plan,
            self.spec,
            launch,
            run_dir=self.run.path.resolve(),
            job_dir=self.job_dir,
            machine=self.machine,
            looks=planned_looks(self.plan, self.spec.steps.early_stop),
            prior=self.prior(variants) if one_group else {},
            found=self.found_splits(launch),
            caps=found.caps if (found := self.run.read_max_batch()) else (),
        )
        chosen = tuple(variant for variant in config.variants if variant.id in variants)
        baseline = config.baseline if config.baseline in variants else None
        attempt = replace(config, launch=name, variants=chosen, rounds=rounds, baseline=baseline)
        write_json(self.run.launch_config(name), attempt)

    def prior(self, variants: Sequence[str]) -> Mapping[str, tuple[RoundTime, ...]]:
        """Rounds that were measured before, which early stopping counts as well."""
        return {v: variant_rounds(self.run, self.plan, v) for v in variants}

    def found_splits(self, launch: Launch) -> Mapping[str, tuple[int, ...]]:
        """Balanced splits of this launch whose samples an earlier launch or attempt has found."""
        balances = {variant: self.run.read_balance(variant) for variant in launch.variants}
        return {variant: balance.best.split for variant, balance in balances.items() if balance}

    def begin_program(self, launch: Launch, name: str, program: Variant) -> None:
        """Writes what the ranks of a program's attempt read, and the event that it begins."""
        run_dir, is_first = self.run.path.resolve(), launch.repetition == 0
        config = program_order(
            self.spec, program, name, run_dir=run_dir, job_dir=self.job_dir, is_first=is_first
        )
        write_json(self.run.launch_config(name), config)
        append_lines(self.run.events(name), [Event.now("start", program.id)])

    def store_request(self, name: str, program: Variant) -> StartRequest:
        """The store through which the ranks of a program find each other."""
        log = self.run.log(name, 0).with_name("store.log")
        return StartRequest(
            rank=SERVICE_RANK,
            args=(str(self.run.rendezvous(name).resolve()), str(program.world_size), self.plan.address),
            env={},
            log=str(log.resolve()),
            cwd=str(self.job_dir),
            entry=STORE_ENTRY,
        )

    def rank_requests(self, launch: Launch, name: str, program: Variant | None) -> tuple[StartRequest, ...]:
        """The ranks of an attempt, with its own file names."""
        config = str(self.run.launch_config(name).resolve())
        return tuple(
            StartRequest(
                rank=process.rank,
                args=(config, str(process.rank)),
                env=self.rank_env(launch, process, program),
                log=str(self.run.log(name, process.rank).resolve()),
                cwd=str(self.job_dir),
                entry=PROGRAM_ENTRY if program else WORKER_ENTRY,
                control=str(self.run.control(name).resolve()),
                cpus=process.cpus,
            )
            for process in launch.processes
        )

    def rank_env(self, launch: Launch, process: Process, program: Variant | None) -> dict[str, str]:
        """What is added to the environment of a rank."""
        if program is None:
            return dict(process.env)
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(num_restarts(self.run, launch))}
        return program_env({**process.env, **restarts}, program.env)


def program_of(plan: Plan, launch: Launch) -> Variant | None:
    """The variant of a launch that runs a program; `None` for a workload's."""
    first = plan.variant(launch.variants[0])
    return first if first.kind.runs_program else None


def program_env(planned: Mapping[str, str], stated: Mapping[str, str]) -> dict[str, str]:
    """The planned environment. A number of threads that the shell has set stays, unless the job says one."""
    is_theirs = "OMP_NUM_THREADS" in os.environ and "OMP_NUM_THREADS" not in stated
    return {key: value for key, value in planned.items() if not (is_theirs and key == "OMP_NUM_THREADS")}


def end_program(run: RunDir, program: Variant, name: str, exits: Sequence[Exit]) -> None:
    """Writes that an attempt is done if every rank has ended well: no rank can know that of the others."""
    if sum(exit_.returncode == 0 for exit_ in exits) == program.world_size:
        append_lines(run.events(name), [Event.now("done", program.id)])
