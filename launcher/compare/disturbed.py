"""When splits can't be ranked: ranks that queue for a core, or GPUs whose clocks were throttled.

Then a step's time tells of the machine's other business, or of ranks that take cores from each other, and
not of the split.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from launcher.compare.label import variant_label
from launcher.compare.model import VariantResult
from launcher.compare.standings import is_ranked
from launcher.records import StepRecord

QUEUE_PERCENT = 5.0
"""Of a step in the run queue from which on it is not the step that was measured."""
MOST_NAMED = 2
LESS_AT_ONCE = "Stop what else runs here, or use fewer devices, then run it again."
COOL_DOWN = "Let the GPUs cool down, or lower their power limit, then run it again."


def queue_percent(timed: Sequence[StepRecord]) -> float | None:
    """Time in the run queue, in percent of the step: median of a rank's blocks; `None` if not counted."""
    blocks: dict[tuple[str, int], list[StepRecord]] = {}
    for step in timed:
        blocks.setdefault((step.launch, step.round), []).append(step)
    shares = [
        100 * block[0].queue_ns / fmean(step.step_ns for step in block)
        for block in blocks.values()
        if block[0].queue_ns is not None
    ]
    return median(shares) if shares else None


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
