"""Other load on the machine: ranks that queue for a core, or GPUs whose clocks were throttled.

A step's time depends on it then, and not on the split alone. Waiting for q % of a step can change a
difference by about q %, so intervals are wider by that; how much a low clock changes isn't known. As rounds
take turns, load that affects one split of a run affects all of them. Threads of one rank that wait for each
other, like the replicas of `dp`, are part of its step.
"""

import math
from collections.abc import Sequence

from gpurun.launcher.compare.figures.recorded import queue_percent
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.compare.ranking import Standings, is_ranked
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.busy import QUEUE_PERCENT, queued_text
from gpurun.launcher.units import format_percent, plural

MOST_NAMED = 2
LESS_AT_ONCE = "Stop other programs on this machine, or use fewer devices, then run again."
BLOCKS_TO_WARN = 3
TIME_TO_WARN_S = 2.0
"""Fewer blocks of a rank, or less time, may be a short burst."""
THROTTLED = "the clock of a GPU was throttled"
COOL_DOWN = "Let the GPUs cool down, or lower their power limit, then run again."


def interference_in(results: Sequence[VariantResult]) -> tuple[str, ...]:
    """Other load during each variant that has times, for its worst rank."""
    ranked = [result for result in results if is_ranked(result)]
    return tuple(
        reasons[0] for result in ranked if (reasons := interference_of(result, variant_label(result)))
    )


def is_hot(results: Sequence[VariantResult]) -> bool:
    """Whether the clock of a GPU was low in a variant that has times."""
    return any(rank.throttled for result in results if is_ranked(result) for rank in result.ranks)


def waiting_sentences(
    results: Sequence[VariantResult], reasons: Sequence[str], standings: Standings | None = None
) -> tuple[str, ...]:
    """How long ranks waited for a core, what follows from it, and what to do; nothing without `reasons`."""
    if not reasons:
        return ()
    rivals = standings.rivals if standings else ()
    compared = (*(one.vs_baseline for one in results), *(rival.behind for rival in rivals))
    has_interval = any(one is not None and one.ci is not None for one in compared)
    effect = (
        "confidence intervals of differences are widened by the same amount"
        if has_interval
        else "these times depend on other load"
    )
    return (f"Interference: {named(reasons)}; {effect}.", COOL_DOWN if is_hot(results) else LESS_AT_ONCE)


LEAST_SHOWN = 0.1
"""Percent; what widens an interval by less isn't said."""


def widened(what: str, percent: float) -> str:
    """The effect of waiting on intervals, or bounds; empty where that is next to nothing."""
    if percent < LEAST_SHOWN:
        return ""
    return f"Ranks waited for a free core, which widens {what} by up to about {format_percent(percent)}."


def time_to_decide(minutes: int) -> str:
    """How long a run takes to decide what is undecided so far."""
    return f"Deciding this takes about {plural(minutes, 'minute')}"


def time_without_load(seconds: float, is_possible: bool) -> str:
    """Where a difference takes more than an hour to decide with this load, and not without it.

    Args:
        seconds: what it takes without other load.
        is_possible: whether enough launches decide it with this load.
    """
    minutes = plural(math.ceil(seconds / 60), "minute")
    if is_possible:
        return f"Under the current load, deciding this takes more than an hour; without it, about {minutes}."
    return f"No budget can decide this under the current load; without it, about {minutes} would."


def named(reasons: Sequence[str]) -> str:
    """The first reasons, and how many others there are."""
    more = len(reasons) - MOST_NAMED
    others = f"; {more} more like {'that' if more == 1 else 'those'}" if more > 0 else ""
    return f"{'; '.join(reasons[:MOST_NAMED])}{others}"


def interference_of(result: VariantResult, label: str = "") -> tuple[str, ...]:
    """Other load during one variant, the worst first; with its label if one is given."""
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


def load_so_far(run: RunDir, variants: Sequence[Variant]) -> str | None:
    """The message while a run goes on whose ranks wait for cores; `None` while nothing shows that."""
    for variant in variants:
        for rank, steps in run.read_steps(variant.id).items():
            timed = [step for step in steps if step.kind == "timed"]
            percent = queue_percent(timed) or 0.0
            if percent > QUEUE_PERCENT and is_long_enough(timed):
                found = f"rank {rank} of {variant_label(variant)} {queued_text(percent)} of its step"
                return f"So far {found}; other programs can still be stopped."
    return None


def is_long_enough(timed: Sequence[StepRecord]) -> bool:
    """Whether steps say more than what a short burst did to them."""
    num_blocks = len({(step.launch, step.round) for step in timed})
    return num_blocks >= BLOCKS_TO_WARN or sum(step.step_ns for step in timed) / 1e9 >= TIME_TO_WARN_S
