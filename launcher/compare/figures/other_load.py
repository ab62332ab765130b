"""What else ran during a variant's timed steps: ranks that waited for a core, GPUs whose clocks were low."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from gpurun.launcher.compare.figures.recorded import Measured
from gpurun.launcher.rundir.records import GpuLoad, StepRecord
from gpurun.launcher.stats.busy import waited_for_others_ns
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.units import GIB


def queue_percent(timed: Sequence[StepRecord]) -> float | None:
    """Time in which a rank waited for other processes to leave a core, in percent of its step.

    The median over its blocks: neither the coarse clock of the other processes nor a short burst moves it.
    `None` where it was not counted.
    """
    blocks: dict[tuple[str, int], list[StepRecord]] = {}
    for step in timed:
        blocks.setdefault((step.launch, step.round), []).append(step)
    shares = [
        100 * waited_ns / fmean(step.step_ns for step in block)
        for block in blocks.values()
        if (waited_ns := waited_for_others_ns(block[0].queue_ns, block[0].others_ns)) is not None
    ]
    return max(0.0, median(shares)) if shares else None


def cpu_ms(timed: Sequence[StepRecord]) -> float | None:
    """CPU time of a rank in a step, the median over its steps; `None` where it was not counted."""
    known = [step.cpu_ns for step in timed if step.cpu_ns is not None]
    return median(known) / 1e6 if known else None


def throttled(timed: Sequence[StepRecord | GpuLoad]) -> str | None:
    """The reason that was found in most of a rank's steps, or of a GPU's blocks, if there is one."""
    reasons = Counter(each.throttled for each in timed)
    return reasons.most_common(1)[0][0] if reasons else None


def timed_steps(measured: Measured, rank: int) -> list[StepRecord]:
    """The rank's steps that count: those of rounds that all ranks have."""
    rounds = {(time.launch, time.round) for time in measured.timed}
    steps = measured.steps.get(rank, ())
    return [step for step in steps if step.kind == "timed" and (step.launch, step.round) in rounds]


def gpu_loads(measured: Measured, position: int) -> list[GpuLoad]:
    """What the GPU at a position of the split did in each timed block; nothing for a CPU device."""
    variant = measured.variant
    strategy, devices = STRATEGIES[variant.strategy], variant.devices
    rank = 0 if strategy.has_replicas else position
    own = dict.fromkeys(devices[index] for index in strategy.positions_of(rank, len(devices)))
    index = list(own).index(devices[position])
    return [step.gpus[index] for step in timed_steps(measured, rank) if len(step.gpus) > index]


def waited_percents(measured: Measured) -> list[float | None]:
    """`queue_percent` of each rank."""
    return [queue_percent(timed_steps(measured, rank)) for rank in measured.steps]


def is_throttled(measured: Measured) -> bool:
    """Whether the clock of one of its GPUs was low for most of its time."""
    return any(
        throttled(gpu_loads(measured, position) or timed_steps(measured, position)) is not None
        for position in range(len(measured.variant.devices))
    )


def allocated_gib(measured: Measured, rank: int) -> float | None:
    """The peak in timed steps: of a GPU's allocated memory, or of a program's resident set.

    A workload's resident set is left out: next to live tensors of other variants it would mislead.
    """
    on_host = timed_steps(measured, rank) if measured.variant.kind.runs_program else ()
    records = gpu_loads(measured, rank) or on_host
    peaks = [one.peak_bytes for one in records if one.peak_bytes is not None]
    return max(peaks) / GIB if peaks else None
