"""Where to measure again between the points of curves that aren't straight, and when that is enough."""

from collections.abc import Sequence

from gpurun.launcher.balance.curve import cost_ms
from gpurun.launcher.balance.solve import Cost, slowest
from gpurun.launcher.rundir.records import Curve

Split = tuple[int, ...]

WITHIN = 0.01
"""How near to what curves promise, if they aren't straight, a split must come that was measured itself."""
HOPE = 0.5
"""Between two points a curve may run below the line through them: how far towards the lower one is tried."""


def costs_of(curves: Sequence[Curve], hope: float = 0.0) -> list[Cost]:
    """What the solver needs of the curves."""

    def of(curve: Curve) -> Cost:
        return lambda samples: cost_ms(curve, samples, hope)

    return [of(curve) for curve in curves]


def fastest_measured(splits: Sequence[Split], curves: Sequence[Curve]) -> Split | None:
    """The best by the curves of those splits whose sizes are all among the curves' points."""
    sizes = [{0, *(samples for samples, _ in curve.points)} for curve in curves]
    measured = [split for split in splits if all(size in of for size, of in zip(split, sizes, strict=True))]
    return min(measured, key=lambda split: slowest(costs_of(curves), split), default=None)


def is_as_hoped(curves: Sequence[Curve], split: Split, hoped: Split) -> bool:
    """Whether a split is about as fast as another could be at best."""
    promised_ms = slowest(costs_of(curves, HOPE), hoped)
    return slowest(costs_of(curves), split) <= (1 + WITHIN) * promised_ms


def gap_around(curve: Curve, size: int) -> tuple[int, int]:
    """The middles between a number of samples and the nearest measured ones, below and above."""
    below = max((samples for samples, _ in curve.points if samples < size), default=size)
    above = min((samples for samples, _ in curve.points if samples > size), default=size)
    return (below + size) // 2, (size + above + 1) // 2
