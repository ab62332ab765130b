"""The record that a self-test keeps, and those of earlier ones on the same machine."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.findings.finding import Finding, finding, ranked
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.rundir.files import read_json, write_bytes, write_json
from gpurun.launcher.rundir.paths import SELFTEST
from gpurun.launcher.selftest.evidence import CheckResult, DeviceRate, EarlierRate, is_possible, ok
from gpurun.launcher.selftest.machine_checks import comparable
from gpurun.launcher.stats.busy import QUEUE_PERCENT
from gpurun.launcher.trace.causes import to_do

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
    return ranked((answer, *failed, *(to_do("check-failed", each.remedy) for each in lost if each.remedy)))


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
            write_bytes(RUNS / "latest", f"{directory.name}\n".encode())
    except MachineError as error:
        with suppress(OSError):
            directory.rmdir()  # it is empty where no rank was started
        return f"{error}\n    {directory} has what its jobs wrote" if directory.exists() else str(error)
    return None
