"""Findings of a self-test about a machine, and how each check ended; plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.findings.check_cases import FAILED, OK, SKIPPED, Case
from gpurun.launcher.findings.finding import worded
from gpurun.launcher.machine.accelerators import Accelerator
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.machine.gpus.nvml import GpuHealth
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.rundir.records import DeviceFacts, StepRecord

MACHINE, MEASURING, TRAINING, GRADIENTS = "machine", "measuring", "training", "gradients"
FAULTS, PROGRAMS, LINKS = "faults", "programs", "links"
PARTS = {
    MACHINE: "the machine",
    MEASURING: "devices and links",
    TRAINING: "strategies and traces",
    GRADIENTS: "gradients",
    FAULTS: "ranks that fail",
    PROGRAMS: "unchanged programs",
}
"""The parts of a self-test of one machine, in this order, in words; each but the first is a job."""
TITLES = {**PARTS, LINKS: "links between nodes"}
"""The parts of a self-test of several nodes; that between nodes is the last."""


@dataclass(frozen=True)
class RanJob:
    """How one of its jobs went."""

    variants: tuple[VariantResult, ...] = ()
    problem: str | None = None
    """Why it could not run, or ended early."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """The advice on why it, or one of its variants, ended early, where the cause is known."""
    log: str | None = None
    """The log of the rank that ended it."""
    hangs: tuple[str, ...] = ()
    """The finding where a rank slept."""
    steps: Mapping[str, Mapping[int, Sequence[StepRecord]]] = field(default_factory=dict)
    """The steps that ranks of programs recorded, by variant and rank."""
    short_traces: frozenset[str] = frozenset()
    """Variants whose traced steps are far shorter than the timed ones."""
    logs: str = ""
    """The ends of its ranks' logs, where traces have no work in them."""


@dataclass(frozen=True)
class DeviceRate:
    """How fast a device was in a self-test."""

    device: str
    identity: str
    """UUID of a GPU; of a CPU device the machine, its model, the cores that it may use and its place."""
    gflop_per_s: float
    matrix_rows: int
    queue_share: float
    """The share of the time that the rank waited for a core, as in `DeviceFacts`."""


@dataclass(frozen=True)
class EarlierRate:
    """How fast a device was on an earlier day."""

    rate: DeviceRate
    day: str


Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check, as `selftest.json` keeps it."""

    name: str
    status: Status
    found: str
    remedy: str | None = None
    """The advice about it; of a check that failed."""
    figures: tuple[Mapping[str, Any], ...] = ()
    """The `case` of each thing that it found (`findings.check_cases`), and the figures in its sentence."""
    node: int | None = None
    """The node, of several; `None`: the only one, or all of them together."""
    host: str | None = None
    """The host of that node."""

    def named(self, name: str, remedy: str) -> "CheckResult":
        """The finding of this check, with its remedy where it failed and has none of its own."""
        return replace(self, name=name, remedy=(self.remedy or remedy) if self.status == "failed" else None)


def ok(case: str, **figures: Any) -> CheckResult:
    return _result("ok", Case(OK[case]), {"case": case, **figures})


def failed(case: str, **figures: Any) -> CheckResult:
    return _result("failed", FAILED[case], {"case": case, **figures})


def skipped(case: str, **figures: Any) -> CheckResult:
    return _result("skipped", Case(SKIPPED[case]), {"case": case, **figures})


def _result(status: Status, case: Case, figures: Mapping[str, Any]) -> CheckResult:
    """A result with the sentence of the case; `None` among the figures: it isn't known."""
    known = {name: value for name, value in figures.items() if value is not None}
    remedy = worded(case.remedy, known) or None
    return CheckResult("", status, worded(case.sentence, known), remedy, (known,))


def judged(wrong: Sequence[CheckResult], *right: CheckResult) -> CheckResult:
    """All that is wrong, as one result; what is right where nothing is wrong."""
    all_found = wrong or right
    figures = tuple(figure for each in all_found for figure in each.figures)
    return replace(all_found[0], found="; ".join(each.found for each in all_found), figures=figures)


@dataclass(frozen=True)
class Evidence:
    """All that is judged. What has not been run yet is empty."""

    kind: Accelerator
    devices: tuple[str, ...]
    """The devices as a job names them; empty where there is none of the kind."""
    machine: Machine
    torch: str | None
    """The version of the installed torch."""
    visible: str | None
    """The variable that limits which GPUs are visible."""
    health: tuple[GpuHealth, ...]
    """The health by device; empty for CPUs."""
    free_gib: float
    """Free space on the disk of the run directory, in GiB."""
    machine_id: str = ""
    """The identifier by which machines of one name differ."""
    earlier: tuple[EarlierRate, ...] = ()
    """The fastest that devices were in earlier self-tests, by identity and size of their matrices."""
    earlier_busy: frozenset[str] = frozenset()
    """Identities with earlier rates that don't count, because ranks waited for a core."""
    earlier_notes: tuple[CheckResult, ...] = ()
    """Which earlier results are not used, and why."""
    facts: tuple[DeviceFacts, ...] = ()
    """The facts by rank."""
    nodes: tuple[int, ...] = ()
    """The node of each rank, where all nodes are judged together; empty on one machine."""
    hosts: tuple[str, ...] = ()
    """The hosts by node."""
    network_gb_per_s: tuple[float | None, ...] = ()
    """The rate of each node's interface in one direction, if it says so."""
    jobs: Mapping[str, RanJob] = field(default_factory=dict)
    """The jobs by part."""
    used_gib: Mapping[str, float] = field(default_factory=dict)
    """Memory in use on each GPU after a rank ran out of it, beyond what was in use before."""

    def job(self, part: str) -> RanJob:
        """How the job of a part went."""
        return self.jobs.get(part, RanJob())

    def has(self, part: str) -> bool:
        """Whether a part has found anything to judge."""
        return bool(self.facts if part in (MEASURING, LINKS) else self.job(part).variants)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of the devices, in their order; empty for CPUs."""
        by_name = {
            self.kind.device(gpu.index): gpu for gpu in self.machine.gpus if gpu.kind == self.kind.name
        }
        return tuple(by_name[name] for name in self.devices if name in by_name)


MOST_POSSIBLE = 1e12
"""GFLOP/s, GB/s, MHz, W or mJ in half a second: far more than any device does."""


def is_possible(figure: float | None) -> bool:
    """Whether what was measured, and is more than nothing, can have this figure."""
    return figure is not None and 0 < figure < MOST_POSSIBLE  # also neither infinite nor NaN
