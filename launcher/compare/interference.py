"""When splits can't be ranked: ranks that queue for a core, or GPUs whose clocks were throttled.

Then a step's time depends on other load, or on ranks that take cores from each other, and not on the split
alone. As rounds take turns, load that affects one split of a run affects all of them. Threads of one rank
that wait for each other, like the replicas of `dp`, are part of its step.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.rundir.records import GpuLoad, StepRecord
from gpurun.launcher.stats.busy import QUEUE_PERCENT, queued_text, waited_for_others_ns

MOST_NAMED = 2
LESS_AT_ONCE = "Stop other programs on this machine, or use fewer devices, then run again."
COOL_DOWN = "Let the GPUs cool down, or lower their power limit, then run again."


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


def throttled(timed: Sequence[StepRecord | GpuLoad]) -> str | None:
    """The reason that was found in most of a rank's steps, or of a GPU's blocks, if there is one."""
    reasons = Counter(each.throttled for each in timed)
    return reasons.most_common(1)[0][0] if reasons else None


def interference_in(results: Sequence[VariantResult]) -> tuple[str, ...]:
    """What else ran during each variant, of its worst rank; empty with fewer than two to be ranked."""
    ranked = [result for result in results if is_ranked(result)]
    if len(ranked) < 2:
        return ()
    return tuple(
        reasons[0] for result in ranked if (reasons := interference_of(result, variant_label(result)))
    )


def interference_of(result: VariantResult, label: str = "") -> tuple[str, ...]:
    """What else ran during one variant, the worst first; with its label if one is given."""
    of, where = (f" of {label}", f" in {label}") if label else ("", "")
    queued = [rank for rank in result.ranks if (rank.queue_percent or 0) > QUEUE_PERCENT]
    worst_first = sorted(queued, key=lambda rank: -(rank.queue_percent or 0))
    return (
        *(f"rank {r.rank}{of} {queued_text(r.queue_percent or 0.0)} of its step" for r in worst_first),
        *(
            f"the clock of {rank.device} was throttled{where}: {rank.throttled}"
            for rank in result.ranks
            if rank.throttled
        ),
    )
