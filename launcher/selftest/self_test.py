"""Runs the jobs of a self-test one after the other, on the same servers, and judges what they show."""

import gc
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from gpurun.launcher.errors import GpurunError, Interrupted, MachineError, Problem, SpecError
from gpurun.launcher.failures.reporter import Reporter, log_tail
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.jobfile.field_types import InvalidValue
from gpurun.launcher.jobfile.load import split_devices
from gpurun.launcher.jobfile.values import AUTO, GPU_KINDS, parse_devices
from gpurun.launcher.machine.accelerators import CPU, Accelerator, accelerator_of, gpu_kinds
from gpurun.launcher.machine.gpus.torch_build import installed_torch
from gpurun.launcher.machine.host import Machine, inspect_machine
from gpurun.launcher.plan.devices import Devices, gpus_of, named_devices
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool import OPTIMIZING
from gpurun.launcher.processes.pool_per_env import WorkerPools
from gpurun.launcher.run.job import Finished, Job, Output, Prepared, finish, prepare
from gpurun.launcher.run.open import Invocation, check_free, load_invocation, new_directory
from gpurun.launcher.run.running_attempt import Starter
from gpurun.launcher.run.session import Session
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir, read_json, unwritable, write_bytes, write_json
from gpurun.launcher.rundir.records import DeviceFacts, StepRecord
from gpurun.launcher.selftest.check_table import findings, is_blocked
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    MACHINE,
    MEASURING,
    PARTS,
    TRAINING,
    DeviceRate,
    EarlierRate,
    Evidence,
    Finding,
    RanJob,
    Status,
)
from gpurun.launcher.selftest.machine_checks import comparable, rates_of
from gpurun.launcher.selftest.run_checks import job_of
from gpurun.launcher.stats.busy import QUEUE_PERCENT
from gpurun.launcher.units import GIB

RUNS = Path("runs/selftest")
RESULT = "selftest.json"
MOST_EARLIER = 20
"""Earlier self-tests that are looked at, the newest ones."""


@dataclass(frozen=True)
class Result:
    """`selftest.json`."""

    checks: tuple[Finding, ...]
    schema: int = 1
    hostname: str = ""
    day: str = ""
    rates: tuple[DeviceRate, ...] = ()

    @property
    def num_failed(self) -> int:
        return self.by_status["failed"]

    @property
    def by_status(self) -> Counter[str]:
        return Counter(check.status for check in self.checks)

    @property
    def summary(self) -> str:
        """`17 ok, 12 skipped`."""
        counts = ((self.by_status[status], status) for status in get_args(Status))
        return ", ".join(f"{count} {status}" for count, status in counts if count)


@dataclass
class SelfTest:
    """One self-test in its directory."""

    pools: WorkerPools
    directory: Path
    show: Callable[[Finding], None]
    """Called with each result as soon as it is known."""
    begin: Callable[[str, int, int], None]
    """Called with what is done next, its number, and how many parts there are."""
    found: list[Finding] = field(default_factory=list)
    seen: Evidence = field(init=False)

    def execute(self, seen: Evidence) -> Result:
        """Runs all parts; after a check on which ranks depend has failed, only judges.

        Raises:
            Interrupted: by Ctrl-C or SIGTERM; the ranks are gone, and what was found is kept.
        """
        self.seen = seen
        for number, (part, title) in enumerate(PARTS.items(), 1):
            if part != MACHINE and not is_blocked(self.seen):
                self.begin(title, number - 1, len(PARTS) - 1)
                self.seen = self.run_part(part, self.seen)
            for each in findings(self.seen, (part,)):
                self.found.append(each)
                self.show(each)
        return self.result()

    def result(self) -> Result:
        """What has been found so far."""
        day = time.strftime("%Y-%m-%d")
        return Result(tuple(self.found), 1, self.seen.machine.hostname, day, rates_of(self.seen))

    def run_part(self, part: str, seen: Evidence) -> Evidence:
        """The evidence with what the job of this part shows."""
        facts = self.directory / "facts"
        if part == TRAINING:  # else each of its ranks would import that, all at once
            self.pools.get({}).preload(OPTIMIZING)
        job = self.run_job(part, job_of(part, seen, facts), seen.machine)
        seen = replace(seen, jobs={**seen.jobs, part: job})
        if part == MEASURING and job.problem is None:
            files = [facts / f"rank{rank}.json" for rank in range(len(seen.devices))]
            return replace(seen, facts=tuple(read_json(file, DeviceFacts) for file in files))
        return replace(seen, used_gib=used_since(seen)) if part == FAULTS else seen

    def run_job(self, part: str, text: str, machine: Machine) -> RanJob:
        """Runs a job in a directory of its own; what becomes of it is evidence, not an error.

        Raises:
            Interrupted: likewise.
        """
        path = self.directory / part
        try:
            given = Invocation(Path("gpurun selftest"), (), self.directory.absolute(), text)
            job = Job(given, load_invocation(given), path, None, Output(quiet=True))
            finished = carry_out_quietly(prepare(job, machine, self.pools.get({})), self.pools)
        except Interrupted:
            raise
        except GpurunError as error:
            return RanJob(problem=str(error))
        if isinstance(finished.error, Interrupted):
            raise Interrupted(finished.error.cause)
        return ran_job(finished)


def carry_out_quietly(ready: Prepared, pools: WorkerPools) -> Finished:
    """Executes the plan and shows nothing: failures are what some of these jobs are for."""
    session = Session(
        starter=Starter(ready.plan, ready.spec, ready.run, ready.job_dir, ready.machine),
        pools=pools,
        on_event=lambda launch, event: None,
        reporter=Reporter(ready.run, lambda text: None),
        relay=Output(quiet=True).relay(lambda text: None, ready.spec.logs.keep_bytes),
    )
    with claimed(ready.run), forwarded(lambda number: session.ranks.forward(number)):
        return finish(session)


def ran_job(finished: Finished) -> RanJob:
    """What a job's directory shows."""
    run = finished.run
    lost = [each for each in finished.comparison.variants if each.status not in ("ok", "unsteady")]
    return RanJob(
        variants=finished.comparison.variants,
        problem=(lost[0].reason or lost[0].status) if lost else None,
        log=str(run.path / lost[0].log) if lost and lost[0].log else None,
        hangs=tuple(read_json(path, Hang).headline for path in sorted(run.path.glob("launches/*/hang.json"))),
        steps={each.id: steps_of(run, each.id) for each in finished.comparison.variants},
        logs="".join(log_tail(path) for path in sorted(run.path.glob("launches/*/log/rank*.log"))),
    )


def steps_of(run: RunDir, variant: str) -> dict[int, tuple[StepRecord, ...]]:
    return {rank: tuple(steps) for rank, steps in run.read_steps(variant).items()}


def used_since(seen: Evidence) -> dict[str, float]:
    """Memory in use on each GPU now, beyond what was in use when the self-test began; GiB."""
    now_gib = {gpu.uuid: gpu.used_gib for gpu in inspect_machine().gpus}
    return {
        name: used_gib - (before.used_gib or 0.0)
        for name, before in zip(seen.devices, seen.gpus, strict=False)
        if (used_gib := now_gib.get(before.uuid)) is not None
    }


def begin_evidence(wish: str, directory: Path) -> Evidence:
    """What is known before a rank runs.

    Raises:
        SpecError: `wish` is no devices, or mixes kinds.
        MachineError: it names devices that are not there.
    """
    machine, build = inspect_machine(), installed_torch()
    kind, devices = wished_devices(wish, machine)
    rates, busy, notes = earlier_rates((directory.parent, RUNS), machine.hostname)
    seen = Evidence(
        kind=kind,
        devices=devices,
        machine=machine,
        torch=build.version if build else None,
        visible=os.environ.get(kind.visible_variable or ""),
        health=(),
        free_gib=shutil.disk_usage(directory).free / GIB,
        earlier=rates,
        earlier_busy=busy,
        earlier_notes=notes,
    )
    return replace(seen, health=kind.health([gpu.index for gpu in seen.gpus], os.environ))


def wished_devices(wish: str, machine: Machine) -> tuple[Accelerator, tuple[str, ...]]:
    """The kind and the names of the devices, usable or not: what is wrong with them, checks say.

    All GPUs of a kind where it is named; none where there is no GPU, whatever its name.

    Raises:
        SpecError: see `begin_evidence`.
        MachineError: likewise.
    """
    value = parsed(wish)
    if value == AUTO:
        has_gpus = bool(machine.gpus or machine.nvml_error)
        value = gpu_kinds()[0].name if has_gpus else CPU.device(min(2, machine.cpu_cores))
    kind = accelerator_of(value if isinstance(value, str) else value[0])
    if not kind.is_host and (value == kind.name or not gpus_of(kind, machine)):
        return kind, tuple(kind.device(index) for index in range(len(gpus_of(kind, machine))))
    return kind, named_devices(value, machine)


def parsed(wish: str) -> Devices:
    """The value of `--devices`, where also one GPU may be named alone.

    Raises:
        SpecError: see `begin_evidence`.
    """
    named = split_devices(wish)
    is_value = isinstance(named, list) or named in (AUTO, *GPU_KINDS) or accelerator_of(named).is_host
    try:
        return parse_devices(named if is_value else [named])
    except InvalidValue as error:
        gpus = gpu_kinds()[0]
        hint = error.hint if is_value else f"for example {gpus.device(0)}, or {gpus.name} for all"
        raise SpecError(Problem(f"--devices {wish}: {error}", hint)) from None


def earlier_rates(
    directories: tuple[Path, ...], hostname: str
) -> tuple[tuple[EarlierRate, ...], frozenset[str], tuple[str, ...]]:
    """The fastest that each device of this machine was in earlier self-tests.

    A rate of a CPU whose cores other processes used doesn't count; the identities of such are returned too,
    and notes about files with devices of no known kind.
    """
    files = {path for directory in directories for path in directory.glob(f"*/{RESULT}")}
    best: dict[tuple[str, int], EarlierRate] = {}
    busy, notes = set(), dict[str, None]()
    for path in sorted(files, key=_written_ns, reverse=True)[:MOST_EARLIER]:
        try:
            result = read_json(path, Result)
        except MachineError:
            continue  # of another version
        if result.hostname != hostname:
            continue
        for rate in result.rates:
            key = comparable(rate)
            if (is_host := is_of_host(rate.device)) is None:
                notes[f"{path} is ignored: it has an unknown device, {rate.device!r}"] = None
            elif is_host and 100 * rate.queue_share > QUEUE_PERCENT:
                busy.add(rate.identity)
            elif key not in best or rate.gflop_per_s > best[key].rate.gflop_per_s:
                best[key] = EarlierRate(rate, result.day)
    return tuple(best.values()), frozenset(busy), tuple(notes)


def _written_ns(path: Path) -> int:
    """When a file was written; 0 if it is gone."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def is_of_host(device: str) -> bool | None:
    """Whether the device is a share of the host; `None` where there is no such kind."""
    try:
        return accelerator_of(device).is_host
    except SpecError:
        return None


def run_selftest(
    pools: WorkerPools,
    wish: str,
    out: Path | None,
    show: Callable[[Finding], None],
    begin: Callable[[str, int, int], None],
) -> tuple[Result, Path, str | None]:
    """All checks of these devices.

    Returns:
        The result; the directory in which it is kept; why it couldn't be kept, if so.

    Raises:
        SpecError: `wish` is no devices, or the directory is in use.
        MachineError: `wish` names devices that are not there, or the directory can't be made.
        Interrupted: by Ctrl-C or SIGTERM; the ranks are gone, and what was found is kept.
    """
    gc.enable()
    parsed(wish)
    directory = out or new_directory(RUNS)
    check_free(directory)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from error
    test = SelfTest(pools, directory, show, begin)
    try:
        result = test.execute(begin_evidence(wish, directory))
    except BaseException as error:
        if isinstance(error, Interrupted) and test.found and not keep(test.result(), directory, False):
            raise Interrupted(error.cause, kept=True) from error
        remove(directory, made)  # what was begun serves no one
        raise
    return result, directory, keep(result, directory, is_latest=out is None)


def remove(directory: Path, made: Sequence[Path]) -> None:
    """What the self-test has written, and the directories that it has made: the innermost is the first."""
    for path in [directory] if made else list(directory.iterdir()):
        shutil.rmtree(path, ignore_errors=True)
    for path in made[1:]:
        with suppress(OSError):  # something else is in it by now
            path.rmdir()


def keep(result: Result, directory: Path, is_latest: bool) -> str | None:
    """Writes `selftest.json`; why it can't be written, and what is left in the directory then."""
    try:
        write_json(directory / RESULT, result)
        if is_latest:
            write_bytes(RUNS / "latest", f"{directory.name}\n".encode())
    except MachineError as error:
        with suppress(OSError):
            directory.rmdir()  # it is empty where no rank was started
        return f"{error}\n    {directory} has what its jobs wrote" if directory.exists() else str(error)
    return None
