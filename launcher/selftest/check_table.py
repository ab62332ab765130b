"""Every check of a self-test: what it needs, what judges it, and what to do where it fails."""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gpurun.launcher.failures.reporter import CANT_WRITE
from gpurun.launcher.findings.check_cases import REMEDIES
from gpurun.launcher.machine.accelerators import CPU, CUDA, ROCM
from gpurun.launcher.machine.resource_limits import of_hang
from gpurun.launcher.selftest import machine_checks, run_checks
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    GRADIENTS,
    LINKS,
    MACHINE,
    MEASURING,
    PARTS,
    PROGRAMS,
    TITLES,
    TRAINING,
    CheckResult,
    Evidence,
    failed,
    skipped,
)


@dataclass(frozen=True)
class Check:
    """One line of a self-test."""

    name: str
    part: str
    """The part of a self-test that finds the evidence; a key of `PARTS`."""
    judge: Callable[[Evidence], CheckResult]
    remedy: str
    """The advice where it fails, unless the judge knows better."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """The tool for it, by the noun of a kind of device."""
    only_gpus: bool = False
    least_devices: int = 1


_FORKED = re.compile(r"re-initialize \w+ in forked subprocess")
"""Words of torch/cuda/__init__.py, `_lazy_init`."""
_NO_SPACE = os.strerror(errno.ENOSPC)
_HANG = "no step completed for"
_OF_HANGS = {CPU.backend: REMEDIES["hang-of-gloo"], CUDA.backend: REMEDIES["hang-of-nccl"]}
"""The advice about hangs, by backend."""
_OF_CPU, _OF_NVIDIA, _OF_AMD = CPU.noun, CUDA.noun, ROCM.noun

CHECKS = (
    Check(
        "torch and driver",
        MACHINE,
        machine_checks.driver,
        REMEDIES["mend-driver"],
        tools={_OF_NVIDIA: "nvidia-smi", _OF_AMD: "amd-smi"},
    ),
    Check("visible devices", MACHINE, machine_checks.visible_devices, REMEDIES["see-devices"]),
    Check(
        "whole GPUs",
        MACHINE,
        machine_checks.whole_gpus,
        REMEDIES["whole-gpus"],
        tools={_OF_NVIDIA: "nvidia-smi -mig 0", _OF_AMD: "amd-smi set -C SPX"},
        only_gpus=True,
    ),
    Check("persistence mode", MACHINE, machine_checks.persistence, "", only_gpus=True),
    Check("free GPUs", MACHINE, machine_checks.free_gpus, REMEDIES["free-gpus"], only_gpus=True),
    Check("run directory", MACHINE, machine_checks.disk, REMEDIES["free-disk"]),
    Check(
        "memory errors",
        MACHINE,
        machine_checks.memory_errors,
        REMEDIES["replace-gpu"],
        tools={_OF_NVIDIA: "nvidia-smi -r", _OF_AMD: "amd-smi reset -G"},
        only_gpus=True,
    ),
    Check("NUMA nodes", MACHINE, machine_checks.numa, "", only_gpus=True),
    Check("measuring", MEASURING, run_checks.measuring, REMEDIES["report-log"]),
    Check("device names", MEASURING, machine_checks.identities, REMEDIES["report-names"], only_gpus=True),
    Check("device clocks", MEASURING, machine_checks.clocks_agree, REMEDIES["other-device"], only_gpus=True),
    Check(
        "device speed",
        MEASURING,
        machine_checks.device_speed,
        REMEDIES["cool-device"],
        tools={_OF_NVIDIA: "nvidia-smi -q -d PERFORMANCE", _OF_AMD: "amd-smi metric"},
        least_devices=2,
    ),
    Check("speed as before", MEASURING, machine_checks.earlier_speed, REMEDIES["what-changed"]),
    Check(
        "clock rates",
        MEASURING,
        machine_checks.clock_rates,
        REMEDIES["raise-clock"],
        tools={
            _OF_NVIDIA: "nvidia-smi -rgc; see nvidia-smi -q -d PERFORMANCE",
            _OF_AMD: "amd-smi reset -d; see amd-smi metric",
        },
        only_gpus=True,
    ),
    Check("energy", MEASURING, machine_checks.energy, "", only_gpus=True),
    Check(
        "all-reduce sums",
        MEASURING,
        machine_checks.sums,
        REMEDIES["test-links"],
        tools={_OF_CPU: "memtest86+", _OF_NVIDIA: "nccl-tests", _OF_AMD: "rccl-tests"},
        least_devices=2,
    ),
    Check(
        "all-reduce rate",
        MEASURING,
        machine_checks.reduce_bandwidth,
        REMEDIES["see-ways"],
        tools=dict.fromkeys((_OF_NVIDIA, _OF_AMD), "NCCL_DEBUG=INFO"),
        least_devices=2,
    ),
    Check(
        "pairs of devices",
        MEASURING,
        machine_checks.peer_pairs,
        REMEDIES["mend-links"],
        tools={
            _OF_NVIDIA: "nvidia-smi topo -m, nvidia-smi nvlink -e",
            _OF_AMD: "amd-smi topology, amd-smi xgmi",
        },
        least_devices=2,
    ),
    Check("PCIe links", MEASURING, machine_checks.pcie_links, REMEDIES["reseat-card"], only_gpus=True),
    Check("strategies", TRAINING, run_checks.strategies, REMEDIES["read-logs"]),
    Check("traces", TRAINING, run_checks.traces, REMEDIES["report-log"]),
    Check("gradients", GRADIENTS, run_checks.gradients, REMEDIES["other-precision"]),
    Check("a late rank", FAULTS, run_checks.late_rank, REMEDIES["report-bug"], least_devices=2),
    Check("out of memory", FAULTS, run_checks.out_of_memory, REMEDIES["see-memory"]),
    Check("a killed rank", FAULTS, run_checks.killed_rank, REMEDIES["report-bug"]),
    Check("a sleeping rank", FAULTS, run_checks.sleeping_rank, REMEDIES["read-stacks"]),
    Check("no set_device", PROGRAMS, partial(run_checks.program, "no-set-device"), REMEDIES["report-bug"]),
    Check("loader workers", PROGRAMS, partial(run_checks.program, "loader-workers"), REMEDIES["report-bug"]),
    Check("a skipped step", PROGRAMS, partial(run_checks.program, "skipped-step"), REMEDIES["report-bug"]),
    Check(
        "a captured graph",
        PROGRAMS,
        partial(run_checks.program, "graph"),
        REMEDIES["report-bug"],
        only_gpus=True,
    ),
)
"""In the order in which they are shown."""
BLOCKING = tuple(
    each
    for each in CHECKS
    if each.name in ("torch and driver", "visible devices", "whole GPUs", "run directory")
)
"""The checks that keep every rank from being started if they fail."""
NODE_CHECKS = (
    Check("nodes together", LINKS, run_checks.measuring, REMEDIES["open-firewall"]),
    Check("speed of nodes", LINKS, machine_checks.device_speed, REMEDIES["cool-node"]),
    Check("sums over nodes", LINKS, machine_checks.sums, REMEDIES["test-network"]),
    Check(
        "rate over nodes",
        LINKS,
        machine_checks.reduce_bandwidth,
        REMEDIES["other-way"],
        tools=dict.fromkeys((_OF_NVIDIA, _OF_AMD), "NCCL_DEBUG=INFO"),
    ),
    Check(
        "pairs of nodes",
        LINKS,
        machine_checks.peer_pairs,
        REMEDIES["mend-network"],
        tools={_OF_CPU: "ethtool", _OF_NVIDIA: "ethtool, ibstat", _OF_AMD: "ethtool, ibstat"},
    ),
)
"""The checks of several nodes, after those of each."""


def findings(seen: Evidence, parts: Iterable[str]) -> Iterator[CheckResult]:
    """The results of the checks of these parts, which have been run."""
    for part in parts:
        yield from (finding(check, seen) for check in (*CHECKS, *NODE_CHECKS) if check.part == part)


def finding(check: Check, seen: Evidence) -> CheckResult:
    """The result of one check."""
    found = judge(check, seen)
    tool = check.tools.get(seen.kind.noun)
    usual = f"{check.remedy}: {tool}" if tool else check.remedy
    return replace(found, remedy=_of_cause(check, found, seen) or found.remedy).named(check.name, usual)


def _of_cause(check: Check, found: CheckResult, seen: Evidence) -> str | None:
    """The advice about a cause that any job may end by; it is that of the cause, whatever the check.

    It is given also where the words of the check don't name the cause.
    """
    causes = run_checks.causes(check.part, seen)
    space = REMEDIES["free-disk"]
    remedies = {CANT_WRITE: space, **causes, _NO_SPACE: space}
    if check.part not in (FAULTS, LINKS) and seen.kind.backend in _OF_HANGS:
        remedies[_HANG] = of_hang() or _OF_HANGS[seen.kind.backend]
    of_words = next((remedy for words, remedy in remedies.items() if words in found.found), None)
    return of_words or next(iter(causes.values()), None)


def judge(check: Check, seen: Evidence) -> CheckResult:
    """The judge's verdict, where it has what it needs."""
    if check.only_gpus and seen.kind.is_host:
        return skipped("needs-gpu")
    if check.part == MACHINE:
        is_without = check.only_gpus and not seen.devices
        return _not_run(["visible devices"]) if is_without else check.judge(seen)
    if check.part == LINKS:
        return check.judge(seen) if seen.facts else _without(check, seen)
    if blocked := _failures(seen, BLOCKING):
        return _not_run(blocked)
    if ended := _ended(seen, before=check.part):
        return _not_run(ended)
    if len(seen.devices) < check.least_devices:
        return skipped("needs-devices", num_devices=check.least_devices)
    return check.judge(seen) if seen.has(check.part) else _without(check, seen)


def _without(check: Check, seen: Evidence) -> CheckResult:
    """The reason why a part found nothing: its first check says it."""
    first = _first(check.part, seen)
    if check is not first:
        return _not_run([first.name])
    job, part = seen.job(check.part), TITLES[check.part]
    if not job.problem:
        return failed("nothing-found", part=part)
    if _FORKED.search(job.problem):
        return failed("forked")
    log = None if check.part == LINKS else job.log
    return failed("ended-early", part=part, reason=job.problem.partition("\n")[0], log=log)


def _not_run(failures: Sequence[str]) -> CheckResult:
    return skipped("not-run", checks=", ".join(failures))


def _applies(check: Check, seen: Evidence) -> bool:
    return not (check.only_gpus and seen.kind.is_host) and len(seen.devices) >= check.least_devices


def _first(part: str, seen: Evidence) -> Check:
    """The check that says why a part has found nothing."""
    return next(each for each in (*CHECKS, *NODE_CHECKS) if each.part == part and _applies(each, seen))


def _ended(seen: Evidence, before: str | None = None) -> list[str]:
    """The check that shows why none of the later jobs is started, if there is one before this part."""
    parts = list(PARTS)[: list(PARTS).index(before)] if before else list(PARTS)
    of_parts = ([each for each in CHECKS if each.part == part] for part in parts if _ends_all(seen, part))
    return next((found[:1] for checks in of_parts if (found := _failures(seen, checks))), [])


def _ends_all(seen: Evidence, part: str) -> bool:
    """Whether a job has ended by a known cause of the machine, or the first has hung: so would all others."""
    ends = {each.status for each in seen.job(part).variants} if part == MEASURING else set()
    return not ends.isdisjoint(("timeout", "hung")) or bool(run_checks.causes(part, seen))


def _failures(seen: Evidence, checks: Iterable[Check]) -> list[str]:
    return [each.name for each in checks if judge(each, seen).status == "failed"]


def blocking(seen: Evidence) -> list[str]:
    """The checks because of which no further rank can be started."""
    return _failures(seen, BLOCKING) or _ended(seen)


def without_links(failures: Sequence[str]) -> Iterator[CheckResult]:
    """The finding about the links between nodes, because of these failures on some of them."""
    yield from (_not_run(failures).named(check.name, "") for check in NODE_CHECKS)
