"""When splits can't be ranked: ranks that queue for a core, or GPUs whose clocks were throttled.

Then a step's time tells of the machine's other business, or of ranks that take cores from each other, and
not of the split. Threads of one rank that wait for each other are part of its step: the replicas of `dp` do.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from statistics import fmean, median

from launcher.compare.label import variant_label
from launcher.compare.model import VariantResult
from launcher.compare.standings import is_ranked
from launcher.records import StepRecord

QUEUE_PERCENT = 5.0
"""Of a step spent waiting for others from which on it is not the step that was measured."""
MOST_NAMED = 2
LESS_AT_ONCE = "Stop what else runs here, or use fewer devices, then run it again."
COOL_DOWN = "Let the GPUs cool down, or lower their power limit, then run it again."


def queue_percent(timed: Sequence[StepRecord]) -> float | None:
    """Time in which a rank waited for other processes to leave a core, in percent of its step.

    The median of what its blocks had in the run queue, but no more than what other processes ran on its
    cores: the rest it waited for itself. `None` if nobody counted.
    """
    blocks: dict[tuple[str, int], list[StepRecord]] = {}
    for step in timed:
        blocks.setdefault((step.launch, step.round), []).append(step)
    waits = [percent_of_step(block, block[0].queue_ns) for block in blocks.values()]
    others = [percent_of_step(block, block[0].others_ns) for block in blocks.values()]
    known = [wait for wait in waits if wait is not None]
    return min(median(known), others_percent(others)) if known else None


def percent_of_step(block: Sequence[StepRecord], share_ns: int | None) -> float | None:
    """`share_ns` of the block's mean step."""
    return None if share_ns is None else 100 * share_ns / fmean(step.step_ns for step in block)


def others_percent(blocks: Sequence[float | None]) -> float:
    """CPU time of other processes on a rank's cores, in percent of its step; infinite if nobody counted.

    The mean of the middle half of its blocks: the clock is too coarse for one of them, and what ran for a
    moment only has disturbed few.
    """
    known = sorted(percent for percent in blocks if percent is not None)
    if not known:
        return inf
    outer = len(known) // 4
    return max(0.0, fmean(known[outer : len(known) - outer]))


def throttled(timed: Sequence[StepRecord]) -> str | None:
    """The reason that was found after most of a rank's blocks, if there is one."""
    reasons = Counter(step.throttled for step in timed)
    return reasons.most_common(1)[0][0] if reasons else None


def disturbances(results: Sequence[VariantResult]) -> tuple[str, ...]:
    """What disturbed each variant, told of its worst rank; nothing where there is only one to be ranked."""
    ranked = [result for result in results if is_ranked(result)]
    if len(ranked) < 2:
        return ()
    return tuple(reasons[0] for result in ranked if (reasons := list(_reasons(result))))


def disturbed_variants(results: Iterable[VariantResult]) -> frozenset[str]:
    """Those whose time is not that of their split."""
    return frozenset(result.id for result in results if list(_reasons(result)))


def unranked(results: Iterable[VariantResult], reasons: Sequence[str]) -> str:
    """What stands in place of a ranking: why there is none, and what to do about it."""
    more = len(reasons) - MOST_NAMED
    others = f"; {more} more like {'that' if more == 1 else 'those'}" if more > 0 else ""
    told = f"{'; '.join(reasons[:MOST_NAMED])}{others}"
    hot = any(rank.throttled for result in results for rank in result.ranks)
    return f"These splits can't be ranked: {told}. {COOL_DOWN if hot else LESS_AT_ONCE}"


def _reasons(result: VariantResult) -> Iterable[str]:
    label = variant_label(result)
    queued = [rank for rank in result.ranks if (rank.queue_percent or 0) > QUEUE_PERCENT]
    for rank in sorted(queued, key=lambda rank: -(rank.queue_percent or 0)):
        yield f"rank {rank.rank} of {label} waited for a free core in {rank.queue_percent:.0f} % of its step"
    for rank in result.ranks:
        if rank.throttled:
            yield f"the clock of {rank.device} was throttled in {label}: {rank.throttled}"
