"""Runs the jobs of a self-test one after the other, on the same servers, and judges what they show.

It keeps a record, to which later ones on the same machine compare their figures.
"""

import gc
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpurun.launcher.compare.figures.ranks import TRACED
from gpurun.launcher.errors import (
    GpurunError,
    Interrupted,
    MachineError,
    NodesError,
    Problem,
    SpecError,
    unwritable,
)
from gpurun.launcher.failures.reporter import Reporter, log_tail
from gpurun.launcher.failures.root_cause import Failure
from gpurun.launcher.findings.finding import Finding, finding, ranked
from gpurun.launcher.inspect.hang_diagnosis import Hang
from gpurun.launcher.jobfile import DEVICES_HELP
from gpurun.launcher.jobfile.load import split_devices
from gpurun.launcher.jobfile.section import InvalidValue
from gpurun.launcher.jobfile.values import AUTO, parse_devices
from gpurun.launcher.machine.accelerators import CPU, Accelerator, accelerator_of, gpu_kinds, installed_torch
from gpurun.launcher.machine.host import Machine, inspect_machine, machine_id
from gpurun.launcher.machine.resource_limits import exhausted, remedy
from gpurun.launcher.plan.devices import Devices, gpus_of, named_devices
from gpurun.launcher.processes.incoming_signals import forwarded
from gpurun.launcher.processes.pool import OPTIMIZING, Pools, WorkerPools
from gpurun.launcher.run.job import Finished, Job, Output, Prepared, finish, prepare
from gpurun.launcher.run.open import Invocation, check_free, load_invocation, name_newest, new_directory
from gpurun.launcher.run.session import Session
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.paths import SELFTEST
from gpurun.launcher.rundir.records import MEASURED, DeviceFacts
from gpurun.launcher.selftest.check_table import blocking, findings
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    MACHINE,
    MEASURING,
    PARTS,
    TRAINING,
    CheckResult,
    DeviceRate,
    EarlierRate,
    Evidence,
    RanJob,
    is_possible,
    ok,
)
from gpurun.launcher.selftest.machine_checks import comparable, rates_of
from gpurun.launcher.selftest.run_checks import job_of
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT
from gpurun.launcher.trace.causes import to_do
from gpurun.launcher.units import GIB

RUNS = Path("runs/selftest")
DAY = "%Y-%m-%d"
MOST_EARLIER = 20
"""Results of a device that are looked at, the newest ones."""


@dataclass(frozen=True)
class Result:
    """`selftest.json`."""

    checks: tuple[CheckResult, ...]
    schema: int = 1
    hostname: str = ""
    day: str = ""
    rates: tuple[DeviceRate, ...] = ()
    findings: tuple[Finding, ...] = ()
    """The answer, the checks that failed, and the advice about the first of them."""

    @property
    def failures(self) -> str:
        """`2 of 63 checks failed, on node 1 (hostb)`; empty where none did."""
        failed = [check for check in self.checks if check.status == "failed"]
        places = dict.fromkeys(f"node {each.node} ({each.host})" for each in failed if each.node is not None)
        where = f", on {', '.join(places)}" if places else ""
        return f"{len(failed)} of {len(self.checks)} checks failed{where}" if failed else ""


def findings_of(checks: Sequence[CheckResult]) -> tuple[Finding, ...]:
    """The answer of these checks, what each that failed has found wrong, and the advice about each."""
    num = Counter(check.status for check in checks)
    lost = [check for check in checks if check.status == "failed"]
    num_failed, num_skipped = num["failed"] or None, num["skipped"] or None
    answer = finding("checked", num_failed=num_failed, num_ok=num["ok"], num_skipped=num_skipped)
    failed = (
        finding(
            "check-failed",
            host=each.host,
            weight=float(figures is each.figures[0]),  # of every check the first, then the others
            where=each.host,
            check=each.name,
            **figures,
        )
        for each in lost
        for figures in each.figures
    )
    return ranked(
        (answer, *failed, *(to_do("check-failed", "check", todo=each.remedy) for each in lost if each.remedy))
    )


def earlier_rates(
    directories: tuple[Path, ...],
) -> tuple[tuple[EarlierRate, ...], frozenset[str], tuple[CheckResult, ...]]:
    """The fastest that each device was in earlier self-tests, also of other machines.

    A rate of a CPU where a rank waited for a core doesn't count; the identities of such are returned too,
    and notes about damaged files.
    """
    files = {path.resolve() for directory in directories for path in directory.glob(f"*/{SELFTEST}")}
    found: dict[tuple[str, int], list[EarlierRate]] = {}
    busy, notes = set(), dict[str, CheckResult]()
    for path in sorted(files, key=_written_ns, reverse=True):
        try:
            result = read_json(path, Result)
        except MachineError:
            continue  # of another version
        for rate in result.rates:
            if wrong := damage(str(path), rate, result.day):
                notes[wrong.found] = wrong
            elif is_of_host(rate.device) and 100 * rate.queue_share > QUEUE_PERCENT:
                busy.add(rate.identity)
            else:
                found.setdefault(comparable(rate), []).append(EarlierRate(rate, result.day))
    best = (max(newest[:MOST_EARLIER], key=lambda was: was.rate.gflop_per_s) for newest in found.values())
    return tuple(best), frozenset(busy), tuple(notes.values())


def _written_ns(path: Path) -> int:
    """When a file was written; 0 if it is gone."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def damage(path: str, rate: DeviceRate, day: str) -> CheckResult | None:
    """Why a rate can't have been written by a self-test; a damaged file may hold anything."""
    if is_of_host(rate.device) is None:
        return ok("unknown-device", path=path, device=repr(rate.device[:20]))
    if not is_day(day):
        return ok("no-day", path=path, day=repr(day[:20]))
    if not is_possible(rate.gflop_per_s):
        return ok("no-rate", path=path, rate=f"{rate.gflop_per_s:g}")
    return None


def is_day(text: str) -> bool:
    """Whether it is written as the day of a self-test."""
    try:
        return time.strftime(DAY, time.strptime(text, DAY)) == text
    except ValueError:
        return False


def is_of_host(device: str) -> bool | None:
    """Whether the device is a share of the host; `None` where there is no such kind."""
    try:
        return accelerator_of(device).is_host
    except SpecError:
        return None


def keep(result: Result, directory: Path, is_latest: bool) -> str | None:
    """Writes `selftest.json`; why it can't be written, and what is left in the directory then."""
    try:
        write_json(directory / SELFTEST, result)
        if is_latest:
            name_newest(directory)
    except MachineError as error:
        with suppress(OSError):
            directory.rmdir()  # it is empty where no rank was started
        return f"{error}\n    {directory} has what its jobs wrote" if directory.exists() else str(error)
    return None


@dataclass
class SelfTest:
    """One self-test in its directory."""

    pools: WorkerPools
    directory: Path
    show: Callable[[CheckResult], None]
    """Called with each result as soon as it is known."""
    begin: Callable[[str, int, int], None]
    """Called with what is done next, its number, and how many parts there are."""
    node: int | None = None
    """Which of several nodes this is."""
    found: list[CheckResult] = field(default_factory=list)
    seen: Evidence = field(init=False)

    def execute(self, seen: Evidence) -> Result:
        """Runs all parts; after a check on which ranks depend has failed, only judges.

        Raises:
            Interrupted: by Ctrl-C or SIGTERM; the ranks are gone, and what was found is kept.
        """
        self.seen = seen
        count = len(PARTS) - 1 + (self.node is not None)
        host = None if self.node is None else seen.machine.hostname
        for number, (part, title) in enumerate(PARTS.items(), 1):
            if part != MACHINE and not blocking(self.seen):
                self.begin(title, number - 1, count)
                self.seen = self.run_part(part, self.seen)
            for each in findings(self.seen, (part,)):
                self.add(replace(each, node=self.node, host=host))
        return self.result()

    def add(self, found: CheckResult) -> None:
        """One more result."""
        self.found.append(found)
        self.show(found)

    def result(self) -> Result:
        """The result so far."""
        day = time.strftime(DAY)
        checks = tuple(self.found)
        host = self.seen.machine.hostname
        return Result(checks, 1, host, day, rates_of(self.seen), findings_of(checks))

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
            Interrupted: as `execute`.
        """

        def run() -> Finished:
            job = small_job(text, self.directory, part)
            return carry_out_quietly(prepare(job, machine, self.pools.get({})), self.pools)

        return outcome_of(run)


def outcome_of(run: Callable[[], Finished]) -> RanJob:
    """Runs a job and returns its outcome; only what ends the whole self-test is an error.

    Raises:
        Interrupted: by Ctrl-C or SIGTERM.
        NodesError: a node is lost.
    """
    try:
        finished = run()
    except (Interrupted, NodesError):
        raise
    except GpurunError as error:
        return not_run(error)
    except (OSError, RuntimeError, MemoryError) as error:
        if (limit := exhausted(error)) is None:
            raise
        return not_run(limit)
    if isinstance(finished.error, Interrupted):
        raise Interrupted(finished.error.cause)
    if isinstance(finished.error, NodesError):
        raise finished.error
    return ran_job(finished)


def not_run(error: GpurunError) -> RanJob:
    """A job that could not run, or not to its end; errors say in further lines what to do, or quote."""
    problem, *further = str(error).splitlines()
    what_to_do = remedy(str(error)) or " ".join(map(str.strip, further))
    return RanJob(problem=problem, remedies={problem: what_to_do} if what_to_do else {})


def small_job(text: str, directory: Path, part: str) -> Job:
    """A job of a self-test, in a directory of its own."""
    given = Invocation(Path("gpurun selftest"), (), directory.absolute(), text)
    return Job(given, load_invocation(given), directory / part, None, Output(quiet=True))


def carry_out_quietly(ready: Prepared, pools: Pools) -> Finished:
    """Executes the plan and shows nothing: failures are what some of these jobs are for."""
    session = Session(
        starter=ready,
        pools=pools,
        on_event=lambda launch, event: None,
        reporter=Reporter(ready.run, lambda text: None),
        relay=Output(quiet=True).relay(lambda text: None, ready.spec.logs.keep_bytes),
    )
    with claimed(ready.run), forwarded(lambda number: session.ranks.forward(number)):
        return finish(session)


def ran_job(finished: Finished) -> RanJob:
    """The results in a job's directory."""
    run = finished.run
    lost = [each for each in finished.comparison.variants if each.status not in MEASURED]
    return RanJob(
        variants=finished.comparison.variants,
        problem=(lost[0].reason or lost[0].status) if lost else None,
        remedies={each.reason: hint for each in lost if each.reason and (hint := hint_of(run, each.log))},
        log=str(run.path / lost[0].log) if lost and lost[0].log else None,
        hangs=tuple(read_json(path, Hang).headline for path in sorted(run.path.glob("launches/*/hang.json"))),
        steps={each.id: run.read_steps(each.id) for each in finished.comparison.variants},
        short_traces=frozenset(
            each.variant
            for each in finished.comparison.findings
            if each.figures.get("case") in TRACED and each.variant is not None
        ),
        logs="".join(log_tail(path) for path in sorted(run.path.glob("launches/*/log/rank*.log"))),
    )


def hint_of(run: RunDir, log: str | None) -> str | None:
    """The advice on the failure of the attempt that has this log, if it is known."""
    path = run.root_cause(Path(log).parents[1].name) if log else None
    return read_json(path, Failure).hint if path and path.exists() else None


def used_since(seen: Evidence) -> dict[str, float]:
    """Memory in use on each GPU now, beyond what was in use when the self-test began; GiB."""
    now_gib = {gpu.uuid: gpu.used_gib for gpu in inspect_machine().gpus}
    return {
        name: used_gib - (before.used_gib or 0.0)
        for name, before in zip(seen.devices, seen.gpus, strict=False)
        if (used_gib := now_gib.get(before.uuid)) is not None
    }


def begin_evidence(wish: str, directory: Path) -> Evidence:
    """The evidence before a rank runs.

    Raises:
        SpecError: `wish` is no devices, or mixes kinds.
        MachineError: it names devices that are not there.
    """
    machine, build = inspect_machine(), installed_torch()
    kind, devices = wished_devices(wish, machine)
    rates, busy, notes = earlier_rates((directory.parent, RUNS))
    seen = Evidence(
        kind=kind,
        devices=devices,
        machine=machine,
        torch=build.version if build else None,
        visible=os.environ.get(kind.visible_variable or ""),
        health=(),
        free_gib=shutil.disk_usage(directory).free / GIB,
        machine_id=machine_id(),
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
        MachineError: see `begin_evidence`.
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
    """The value of `--devices`.

    Raises:
        SpecError: see `begin_evidence`.
    """
    named = split_devices(wish)
    try:
        return parse_devices(named)
    except InvalidValue as error:  # what a job file says of a wrong text shows a list of YAML
        hint = f"use {DEVICES_HELP.rstrip('.')}" if isinstance(named, str) else error.hint
        raise SpecError(Problem(f"--devices {wish}: {error}", hint)) from None


def run_selftest(
    pools: WorkerPools,
    wish: str,
    out: Path | None,
    show: Callable[[CheckResult], None],
    begin: Callable[[str, int, int], None],
    node: int | None = None,
    finish_on_nodes: Callable[[SelfTest], None] = lambda test: None,
) -> tuple[Result, Path, str | None]:
    """All checks of these devices.

    Args:
        pools: start the ranks.
        wish: the devices.
        out: the directory, if not one under `runs/selftest/`.
        show: called with each result as soon as it is known.
        begin: called with what is done next, its number, and how many parts there are.
        node: which of several nodes this is.
        finish_on_nodes: adds what is found with the other nodes.

    Returns:
        The result; the directory in which it is kept; why it couldn't be kept, if so.

    Raises:
        SpecError: `wish` is no devices, or the directory is in use.
        MachineError: `wish` names devices that are not there, or the directory can't be made.
        Interrupted: by Ctrl-C or SIGTERM; the ranks are gone, and what was found is kept.
        NodesError: another node is lost, or has ended the self-test; what was found is kept.
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
    test = SelfTest(pools, directory, show, begin, node)
    try:
        test.execute(begin_evidence(wish, directory))
        finish_on_nodes(test)
    except BaseException as error:
        is_kept = bool(test.found) and keep(test.result(), directory, False) is None
        if not is_kept:
            remove(directory, made)  # what was begun serves no one
        if isinstance(error, Interrupted) and is_kept:
            raise Interrupted(error.cause, kept=True) from error
        raise
    result = test.result()
    return result, directory, keep(result, directory, is_latest=out is None)


def remove(directory: Path, made: Sequence[Path]) -> None:
    """Removes files of the self-test, and the directories that it has made: the innermost is the first."""
    for path in [directory] if made else list(directory.iterdir()):
        shutil.rmtree(path, ignore_errors=True)
    for path in made[1:]:
        with suppress(OSError):  # something else is in it by now
            path.rmdir()
