"""The time between a rank's operators: how much of it Python certainly worked, and how much it was blocked.

A thread that steps has CPU time for Python and for the operators that it runs itself. The operators' part is
at most their time in the trace, and at least that less the waiting for a core: so both bounds are known.
Other threads don't count, since those of OpenMP spin while nothing runs.
"""

from collections.abc import Sequence

from gpurun.launcher.compare.figures.ranks import RankFigures
from gpurun.launcher.machine.accelerators import CPU

OWN_OPERATORS = 0.5
"""Share of the operators' time that the CPU time of the thread must reach: else others run most of them."""


def on_cpu(ranks: Sequence[RankFigures]) -> bool:
    """Whether the CPU itself is what computes."""
    return all(rank.device.startswith(CPU.name) for rank in ranks)


def is_python_known(rank: RankFigures) -> bool:
    """Whether CPU time separates Python from waiting, where the CPU computes.

    It doesn't where other threads than the one that steps run the operators.
    """
    if rank.thread_cpu_ms is None:
        return False
    return _thread_ms(rank) + _queue_ms(rank) >= OWN_OPERATORS * (rank.compute_ms or 0.0)


def python_ms(rank: RankFigures) -> float:
    """The least of `host_ms` in which Python worked; what isn't blocked, where that isn't known."""
    host_ms = rank.host_ms or 0.0
    if on_cpu((rank,)) and is_python_known(rank):
        return min(host_ms, max(0.0, _thread_ms(rank) - (rank.compute_ms or 0.0)))
    return host_ms - blocked_ms(rank)


def blocked_ms(rank: RankFigures) -> float:
    """The least of `host_ms` in which the rank slept or waited; nothing where CPU time wasn't counted."""
    host_ms, most_ms = rank.host_ms or 0.0, []
    if rank.cpu_ms is not None:
        most_ms.append(_longer(rank) * rank.cpu_ms)
    if on_cpu((rank,)) and is_python_known(rank):
        own_ms = max(0.0, (rank.compute_ms or 0.0) - _queue_ms(rank))
        most_ms.append(max(0.0, _thread_ms(rank) - own_ms))
    return max(0.0, host_ms - min(most_ms, default=host_ms))


def _thread_ms(rank: RankFigures) -> float:
    """As timed, for a step that recording makes longer."""
    return _longer(rank) * (rank.thread_cpu_ms or 0.0)


def _queue_ms(rank: RankFigures) -> float:
    return (rank.span_ms or 0.0) * (rank.queue_percent or 0.0) / 100


def _longer(rank: RankFigures) -> float:
    return max(1.0, (rank.span_ms or 0.0) / rank.step_ms) if rank.step_ms else 1.0
