"""Which rank the others wait for."""

from collections.abc import Sequence

from gpurun.launcher.compare.model import RankFigures

BEFORE_COMMUNICATION = ("data", "h2d", "forward")
"""Phases at whose end no rank has waited for another yet."""


def slowest_rank(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """The rank that the others wait for: the one that works longest; `None` where nothing was measured.

    A rank's work is its step without what communication adds: by the ablation, else by the trace. Where
    neither is known, what comes before the first communication decides: from `backward` on the faster ranks
    wait, and every rank shows the same time.
    """
    timed = [rank for rank in ranks if rank.phases_ms or rank.step_ms is not None or rank.span_ms is not None]
    for work_ms in (_by_ablation, _by_trace):
        known = {rank.rank: work for rank in timed if (work := work_ms(rank)) is not None}
        if known and len(known) == len(timed):
            return max(timed, key=lambda rank: known[rank.rank])
    return max(timed, key=_before_communication, default=None)


def _by_ablation(rank: RankFigures) -> float | None:
    exposed_ms = rank.exposed_comm_ms.ablation
    return None if rank.step_ms is None or exposed_ms is None else rank.step_ms - exposed_ms


def _by_trace(rank: RankFigures) -> float | None:
    exposed_ms = rank.exposed_comm_ms.trace
    return None if rank.span_ms is None or exposed_ms is None else rank.span_ms - exposed_ms


def _before_communication(rank: RankFigures) -> float:
    return sum(rank.phases_ms.get(name, 0.0) for name in BEFORE_COMMUNICATION)
