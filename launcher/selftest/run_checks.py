"""The jobs of a self-test as YAML, of known outcome, and what is wrong with what they come to. Pure.

The jobs are small, and each serves several checks: strategies, gradients, traces, failures, programs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations
from math import isfinite
from pathlib import Path

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.jobfile.load import job_text
from gpurun.launcher.jobfile.settings import PRECISIONS
from gpurun.launcher.machine.accelerators import accelerator_of, precision_problem
from gpurun.launcher.machine.resource_limits import OOM_KILLER
from gpurun.launcher.plan.devices import Devices
from gpurun.launcher.rundir.records import MEASURED, StepRecord
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    GRADIENTS,
    MEASURING,
    PROGRAMS,
    TRAINING,
    CheckResult,
    Evidence,
    RanJob,
    failed,
    judged,
    ok,
    skipped,
)
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import format_gib

DEVICE_PROGRAM = "gpurun.launcher.worker.selftest.device_program"
MISBEHAVING_MODEL = "gpurun.launcher.worker.selftest.misbehaving_model"
PLAIN_PROGRAMS = "gpurun.launcher.worker.selftest.plain_programs"
SOUND = 10
"""Samples per device with which nothing goes wrong."""
FAULTY = {"late": 9, "oom": 8, "killed": 7, "asleep": 6}
"""Samples per device with which the last device misbehaves."""
GRAPH = "graph"
"""The program that only devices with streams can run."""
SLACK_S = 40.0
"""The slack of jobs that should not hang: a false alarm costs more than the wait."""
_SHORT = {"rounds": 1, "launches": 1, "warmup": 0}
_MODEL = {"workload": "mlp", "params": {"width": 64, "layers": 2}}
_UNTRACED = {"steps": 0}


def job_of(part: str, seen: Evidence, facts: Path) -> str:
    """The job of a part; in `facts` ranks leave what they measure."""
    jobs: Mapping[str, Callable[[], str]] = {
        MEASURING: lambda: measuring_job(seen.devices, facts.resolve()),
        TRAINING: lambda: training_job(seen.devices),
        GRADIENTS: lambda: gradients_job(seen.devices, [gpu.capability for gpu in seen.gpus]),
        FAULTS: lambda: faults_job(seen.devices),
        PROGRAMS: lambda: programs_job(seen.devices),
    }
    return jobs[part]()


def measuring_job(devices: Sequence[str], directory: Path, **keys: object) -> str:
    """Every rank measures its device and its links; what it finds goes to `directory`."""
    kind = accelerator_of(devices[0])
    program = {"module": DEVICE_PROGRAM, "args": [kind.name, str(directory)], **keys}
    return _job("measuring", devices, **program, steps={"launches": 1}, profile=_UNTRACED)


def links_job(devices: Sequence[Sequence[str]], directory: Path) -> str:
    """The job that measures links by the devices of all nodes; a pair has the same place on both nodes."""
    names = [f"{name}@{node}" for node, own in enumerate(devices) for name in own]
    first = [0, *accumulate(len(own) for own in devices)]
    pairs = [
        f"{first[low] + place}-{first[high] + place}"
        for low, high in combinations(range(len(devices)), 2)
        for place in range(min(len(devices[low]), len(devices[high])))
    ]
    args = [accelerator_of(names[0]).name, str(directory), ",".join(pairs)]
    return measuring_job(names, directory, args=args, nodes=len(devices))


def joining_job(devices: Devices, num_nodes: int) -> str:
    """The job that nodes that test themselves agree on before they know each other's devices."""
    wish = devices if isinstance(devices, str) else list(devices)
    return job_text({"name": "selftest-links", "devices": wish, "nodes": num_nodes, "module": DEVICE_PROGRAM})


def training_job(devices: Sequence[str]) -> str:
    """The job that trains under both strategies, even and uneven, with traces."""
    compare = {"strategy": ["ddp", "dp"], "split": _splits(len(devices))}
    batch = 6 * (len(devices) + 1)
    return _job(
        "training", devices, **_MODEL, global_batch=batch, compare=compare, steps=_SHORT, profile={"steps": 2}
    )


def gradients_job(devices: Sequence[str], capabilities: Sequence[tuple[int, int] | None]) -> str:
    """The gradient in every precision that these devices have but that of `training_job`."""
    kind = accelerator_of(devices[0])
    able = [each for each in PRECISIONS if precision_problem(each, kind, capabilities) is None]
    compare = {"precision": [each for each in able if each != "fp32"], "split": _splits(len(devices))[-1:]}
    batch = 6 * (len(devices) + 1)
    return _job(
        "gradients", devices, **_MODEL, global_batch=batch, compare=compare, steps=_SHORT, profile=_UNTRACED
    )


def faults_job(devices: Sequence[str]) -> str:
    """The last rank is late, runs out of memory, is killed, sleeps; each ends a launch but the first."""
    count = len(devices)
    batches = [size * count for size in (SOUND, *FAULTY.values())]
    return _job(
        "faults",
        devices,
        workload=f"{MISBEHAVING_MODEL}:build",
        params={"faulty_device": count - 1, "faults": FAULTY},
        global_batch=batches[0],
        compare={"global_batch": batches},
        gradient_check=False,
        hang_timeout=hang_timeout_s(devices),
        steps=_SHORT,
        profile={"steps": 3},
    )


def hang_timeout_s(devices: Sequence[str], slack_s: float = 8.0) -> float:
    """Longer than a step or the start of a rank takes, also on a busy machine."""
    kind = accelerator_of(devices[0])
    return slack_s + 1.5 * kind.start_s + (0.0 if kind.is_host else INITIALISATION_S * len(devices))


INITIALISATION_S = 2.0
"""Seconds to initialise a GPU without persistence mode, one after the other; NVIDIA names 1 to 3 s.

Source: https://docs.nvidia.com/deploy/driver-persistence/persistence-mode.html
"""


def programs_job(devices: Sequence[str]) -> str:
    """Unchanged programs."""
    kind = accelerator_of(devices[0])
    names = [name for name in NUM_STEPS if not (kind.is_host and name == GRAPH)]
    return _job(
        "programs",
        devices,
        module=PLAIN_PROGRAMS,
        args=[kind.name],
        compare={"args": [[name] for name in names]},
        steps={"launches": 1},
        profile=_UNTRACED,
    )


def _job(name: str, devices: Sequence[str], **keys: object) -> str:
    """Each ends where it hangs, long before torch gives a collective up, so that the rank can be named."""
    limits = {"hang_timeout": hang_timeout_s(devices, SLACK_S)}
    return job_text({"name": f"selftest-{name}", "devices": list(devices), **limits, **keys})


def _splits(count: int) -> list[str]:
    """Even, and twice as much on the first device as on any other."""
    return ["even", ":".join(["2", *["1"] * (count - 1)])] if count > 1 else ["even"]


LATE_MS = 100.0
"""How late the last rank is on purpose (`worker.selftest.misbehaving_model`)."""
LEAST_SEEN = 0.6
"""Share of that as the wait of the other ranks, which may be late themselves where other programs run."""
LEFT_GIB = 0.5
"""Memory that a GPU may have more in use than before: a driver keeps some for itself."""
NUM_STEPS = {"no-set-device": 29, "loader-workers": 23, "skipped-step": 29, GRAPH: 32}
"""Steps that each rank records of `worker.selftest.plain_programs`: an optimizer's first has no beginning.

The program with a graph makes 3 of those before the capture, and marks 30."""
PROFILER_IN_USE = ("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED", "CUPTI_ERROR_HARDWARE_BUSY")
"""The text that Kineto writes into a rank's log. Source: `CUptiResult` of the CUPTI API reference."""


def measuring(seen: Evidence) -> CheckResult:
    """Whether all ranks could measure."""
    return ok("measured", num_ranks=len(seen.facts))


def strategies(seen: Evidence) -> CheckResult:
    """Whether every strategy and split could be measured."""
    job = seen.job(TRAINING)
    return judged(_unmeasured(job), ok("strategies", labels=", ".join(map(variant_label, job.variants))))


def _unmeasured(job: RanJob) -> list[CheckResult]:
    return [
        failed("unmeasured", label=variant_label(each), reason=_reason(each))
        for each in job.variants
        if each.status not in (*MEASURED, "skipped")
    ]


def _reason(variant: VariantResult) -> str:
    return variant.reason or variant.status


def gradients(seen: Evidence) -> CheckResult:
    """Each variant's gradient against that of the whole batch on one device."""
    variants = [*seen.job(TRAINING).variants, *seen.job(GRADIENTS).variants]
    wrong = _unmeasured(seen.job(GRADIENTS)) + [
        failed("gradient-differs", label=variant_label(each), warning=each.gradient_warning)
        for each in variants
        if each.gradient_warning
    ]
    errors: dict[str, float] = {}
    for each in variants:
        if each.precision and each.gradient_error is not None:
            errors[each.precision] = max(errors.get(each.precision, 0.0), each.gradient_error)
    wrong += [
        failed("gradient-not-compared", label=variant_label(each))
        for each in variants
        if each.status in MEASURED and (each.gradient_error is None or not isfinite(each.gradient_error))
    ]
    found = ", ".join(f"{name} to {error:.1g}" for name, error in sorted(errors.items()))
    return judged(wrong, ok("gradients", errors=found)) if errors or wrong else failed("no-gradient")


def traces(seen: Evidence) -> CheckResult:
    """Whether traces have work in them, and collectives that were matched over all ranks."""
    measured = [each for each in seen.job(TRAINING).variants if each.status in MEASURED]
    if not measured:
        return skipped("nothing-traced")
    short = seen.job(TRAINING).short_traces
    wrong = [found for each in measured for found in _untraced(each, each.id in short)]
    if wrong and any(words in seen.job(TRAINING).logs for words in PROFILER_IN_USE):
        return failed("profiler-in-use", label=wrong[0].figures[0]["label"])
    return judged(wrong, ok("matched-traces" if len(seen.devices) > 1 else "traces"))


def _untraced(variant: VariantResult, are_short: bool) -> list[CheckResult]:
    """The parts that the traces of a variant lack; nothing where its traced steps are far too short."""
    label = variant_label(variant)
    if are_short and not any(rank.span_ms for rank in variant.ranks):
        return []  # of far shorter steps than the timed ones, under other load: no figures, but work
    lacking = [
        failed("empty-trace", label=label, rank=rank.rank)
        for rank in variant.ranks
        if rank.trace and not rank.compute_ms
    ]
    if not any(rank.trace for rank in variant.ranks):
        return [failed("no-trace", label=label)]
    several = STRATEGIES[variant.strategy].process_per_device and len(variant.ranks) > 1
    unmatched = several and any(rank.wait_ms is None for rank in variant.ranks)
    return lacking or ([failed("unmatched", label=label)] if unmatched else [])


def late_rank(seen: Evidence) -> CheckResult:
    """A rank that is late on purpose: the others' wait, and only theirs."""
    variant = _with_fault(seen, "late")
    if variant.status not in MEASURED:
        return failed("unmeasured", reason=_reason(variant))
    waits_ms = {
        rank.rank: rank.wait_ms if rank.wait_ms is not None and isfinite(rank.wait_ms) else None
        for rank in variant.ranks
    }
    last = len(seen.devices) - 1
    wrong = [
        failed("unknown-wait", rank=rank)
        if wait_ms is None
        else failed("wrong-wait", last=last, late_ms=LATE_MS, rank=rank, wait_ms=wait_ms)
        for rank, wait_ms in waits_ms.items()
        if wait_ms is None or (wait_ms >= LEAST_SEEN * LATE_MS) != (rank != last)
    ]
    least_ms = min(wait_ms or 0.0 for rank, wait_ms in waits_ms.items() if rank != last)
    return judged(wrong, ok("late", late_ms=LATE_MS, wait_ms=least_ms))


def _with_fault(seen: Evidence, fault: str) -> VariantResult:
    """The variant in which the last rank misbehaves in this way."""
    size = FAULTY.get(fault, SOUND) * len(seen.devices)
    return next(each for each in seen.job(FAULTS).variants if each.global_batch == size)


def causes(part: str, seen: Evidence) -> dict[str, str]:
    """The advice for known causes of the machine that ended a part's job, by what was found.

    That one rank runs out of memory is meant; that the kernel ends it is not.
    """
    job, size = seen.job(part), FAULTY["oom"] * len(seen.devices)
    meant = [each.reason for each in job.variants if part == FAULTS and each.global_batch == size]
    return {found: what for found, what in job.remedies.items() if found not in meant or OOM_KILLER in found}


def out_of_memory(seen: Evidence) -> CheckResult:
    """A rank that runs out of memory is named, its memory is free afterwards, and the next launch works."""
    variant = _with_fault(seen, "oom")
    last = len(seen.devices) - 1
    is_meant = variant.status == "oom" and OOM_KILLER not in (variant.reason or "")
    wrong = [] if is_meant else [failed("not-out-of-memory", status=variant.status, reason=variant.reason)]
    wrong += _not_named(variant, last)
    wrong += [
        failed("memory-kept", device=device, kept=format_gib(gib))
        for device, gib in seen.used_gib.items()
        if not gib <= LEFT_GIB  # also NaN
    ]
    wrong += _next_launch(seen)
    if seen.kind.is_host:  # of CPU devices the host's memory isn't looked at
        return judged(wrong, ok("out-of-memory", rank=last))
    is_known = len(seen.used_gib) == len(seen.devices)
    return judged(wrong, ok("memory-freed" if is_known else "memory-unknown", rank=last))


def _next_launch(seen: Evidence) -> list[CheckResult]:
    """Why no launch has worked after those in which ranks failed, of which each was followed by the next."""
    sound = _with_fault(seen, "sound")
    return [] if sound.status in MEASURED else [failed("next-launch-failed", reason=_reason(sound))]


def _not_named(variant: VariantResult, rank: int) -> list[CheckResult]:
    reason = _reason(variant)
    return [] if f"rank {rank} " in reason else [failed("rank-not-named", rank=rank, reason=reason)]


def killed_rank(seen: Evidence) -> CheckResult:
    """A rank that is killed by SIGKILL is named, and the next launch works."""
    variant, rank = _with_fault(seen, "killed"), len(seen.devices) - 1
    wrong, reason = _not_named(variant, rank), _reason(variant)
    wrong += [] if "SIGKILL" in reason else [failed("signal-not-named", reason=reason)]
    wrong += [failed("killed-for-memory", reason=reason)] if OOM_KILLER in reason else []
    return judged([*wrong[:1], *_next_launch(seen)], ok("killed", rank=rank))


def sleeping_rank(seen: Evidence) -> CheckResult:
    """A rank that sleeps while the others wait for it in a collective, as `gpurun stacks` sees it."""
    rank = len(seen.devices) - 1
    if not (hangs := seen.job(FAULTS).hangs):
        return failed("no-hang")
    if f"rank {rank} is in" not in hangs[0]:
        return failed("other-rank-blamed", hang=hangs[0])
    if len(seen.devices) > 1 and " in all_reduce" not in hangs[0]:
        return failed("collective-not-named", hang=hangs[0])
    return ok("asleep", hang=hangs[0])


def program(name: str, seen: Evidence) -> CheckResult:
    """A program of which every rank should record so many steps on its own device."""
    job = seen.job(PROGRAMS)
    variant = next((each for each in job.variants if name in each.varied.get("args", ())), None)
    if variant is None:
        return skipped("no-graphs")
    if variant.status not in MEASURED:
        return failed("unmeasured", reason=_reason(variant))
    recorded = job.steps.get(variant.id, {})
    wrong = [found for rank in range(len(seen.devices)) if (found := _recorded(name, rank, recorded))]
    return judged(
        wrong, ok("steps-and-skip" if name == "skipped-step" else "steps", num_steps=NUM_STEPS[name])
    )


def _recorded(name: str, rank: int, recorded: Mapping[int, Sequence[StepRecord]]) -> CheckResult | None:
    """The mistake in the steps of a rank."""
    steps = recorded.get(rank, ())
    if len(steps) != NUM_STEPS[name]:
        return failed("steps-missed", num_steps=len(steps), rank=rank, num_expected=NUM_STEPS[name])
    if not all(step.peak_bytes for step in steps):
        return failed("no-memory-seen", rank=rank)
    skips = sum(step.kind == "skipped" for step in steps)
    if skips != (name == "skipped-step"):
        return failed("skips-missed", num_skips=skips, rank=rank)
    return None
