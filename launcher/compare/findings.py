"""What two independent measurements of the same thing say about each other."""

from gpurun.launcher.compare.figures.measured import Measured
from gpurun.launcher.compare.figures.slowest import slowest_rank
from gpurun.launcher.compare.figures.variant import ablation_interval_ms
from gpurun.launcher.compare.model import ExposedComm, Interval, RankFigures
from gpurun.launcher.units import format_ms

APART_OF_ABLATION = 0.3
APART_OF_STEP = 0.02


def findings(measured: Measured, ranks: tuple[RankFigures, ...], step_ms: float | None) -> tuple[str, ...]:
    """What is worth telling about a variant, beside what its launches and traces warn of."""
    slowest = slowest_rank(ranks)
    if slowest is None or step_ms is None:
        return ()
    interval = ablation_interval_ms(measured.steps.get(slowest.rank, ()))
    found = disagreement(slowest.exposed_comm_ms, interval, step_ms)
    return () if found is None else (found,)


def disagreement(exposed: ExposedComm, interval: Interval | None, step_ms: float) -> str | None:
    """A finding where trace and ablation differ by more than 30 % of the ablation and 2 % of the step.

    The ablation also holds what communication costs while compute goes on: contention and bucket copies.

    Args:
        exposed: communication that nothing overlaps, in ms.
        interval: of the ablation; what lies within it is chance.
        step_ms: the variant's step.
    """
    if exposed.trace is None or exposed.ablation is None:
        return None
    apart_ms = abs(exposed.trace - exposed.ablation)
    if apart_ms <= APART_OF_ABLATION * abs(exposed.ablation) or apart_ms <= APART_OF_STEP * step_ms:
        return None
    if interval is not None and interval[0] <= exposed.trace <= interval[1]:
        return None
    figures = f"{format_ms(exposed.trace)} ms in the trace, {format_ms(exposed.ablation)} by leaving it out"
    likely = "it may slow compute down as well (contention, bucket copies)"
    if exposed.ablation < exposed.trace:
        likely = "ranks that don't communicate may compete for the hardware instead"
    return f"exposed communication: {figures}; {likely}"
