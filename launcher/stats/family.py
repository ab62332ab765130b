"""How the variants of a family differ over launches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.launches import t_interval
from gpurun.launcher.stats.sequential import ALPHA, MIN_LAUNCHES, level_at
from gpurun.launcher.stats.verdict import Interval

IntervalAt = Callable[[float], Interval | None]
"""The interval of a comparison that misses it with α, over all looks."""


@dataclass(frozen=True)
class Family:
    """Launch values of all variants: ln(time) by repetition, which pairs the launches of different groups."""

    values: Mapping[str, Mapping[int, float]]
    looks: tuple[Look, ...] = ()
    """Taken so far; launches after the last one count at the next. Without any, all launches count."""

    def differences(self, variant: str, other: str) -> list[float]:
        """d = ln(t / t of the other) for every repetition that both have."""
        others = self.values.get(other, {})
        return [
            value - others[repetition]
            for repetition, value in self.values.get(variant, {}).items()
            if repetition in others and (not self.looks or repetition < self.looks[-1].launches)
        ]

    def interval(self, variant: str, other: str, alpha: float = ALPHA) -> Interval | None:
        """Of the mean of d, by its own scatter over launches; `None` below 6 launches."""
        found = self.differences(variant, other)
        if len(found) < MIN_LAUNCHES:
            return None
        return t_interval(found, level_at(self.looks, self.launches(variant, other), alpha))

    def launches(self, variant: str, other: str) -> int:
        """The number of launches after which the last one common to both had run."""
        common = self.values.get(variant, {}).keys() & self.values.get(other, {}).keys()
        return max(common, default=-1) + 1

    def at(self, variant: str, other: str) -> IntervalAt:
        """The interval as a function of its level."""
        return partial(self.interval, variant, other)


def holm(intervals: Mapping[str, IntervalAt], alpha: float = ALPHA) -> dict[str, Interval | None]:
    """The interval on which the verdict of each comparison rests: together they err with at most `alpha`.

    It excludes 0 exactly where the comparison is established. What is established makes room: with k
    comparisons left, α / k is the level of each.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics
    6 (1979); with several looks Ye, Li, Liu, Yao, Statistics in Medicine 32 (2013).
    """
    settled: dict[str, Interval | None] = {}
    left = dict(intervals)
    while left:
        found = {name: interval_at(alpha / len(left)) for name, interval_at in left.items()}
        established = {name: ci for name, ci in found.items() if ci is not None and not ci[0] <= 0 <= ci[1]}
        settled |= established or found
        left = {name: one for name, one in left.items() if established and name not in established}
    return {name: settled[name] for name in intervals}
