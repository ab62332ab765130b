"""How one variant's time differs from another's: by paired rounds, or by pairs of launches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from gpurun.launcher.compare.figures.recorded import Measured
from gpurun.launcher.compare.model import Difference, Verdict
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.stats.launches import launch_pair_interval
from gpurun.launcher.stats.looks import Looks, Outcome, look_at, looks, settle
from gpurun.launcher.stats.paired import round_differences
from gpurun.launcher.stats.verdict import percent_from_log, percent_interval, verdict_of

OPPOSITE: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}


def planned_looks(plan: Plan, early_stop: bool) -> Looks:
    """The looks of a whole run: early ones only where a single launch holds everything.

    The worker stops by them and the comparison judges by them, so that both come to the same verdict.
    """
    group = next(launch.group for launch in plan.launches if plan.baseline in launch.variants)
    rounds = sum(launch.rounds for launch in plan.launches if launch.group == group)
    return looks(rounds, len(plan.variants) - 1, early_stop and len(plan.launches) == 1)


@dataclass(frozen=True)
class Differences:
    """How any two variants of a run differ, all by the same rules and at the same level."""

    measured: Mapping[str, Measured]
    baseline: str
    looks: Looks
    has_interference: bool = False
    """Whether times of this run are not those of its splits: then nothing is decided by them."""

    def vs_baseline(self, variant: str) -> Difference | None:
        """What the table shows; `None` where one of the two has no times that count."""
        one, baseline = self.measured[variant], self.measured[self.baseline]
        if variant == self.baseline:
            return Difference(None, None, "baseline") if baseline.counts else None
        if not (one.counts and baseline.counts and one.variant.same_task(baseline.variant)):
            return None
        return self.sound(against_baseline(one, baseline, self.looks))

    def between(self, variant: str, other: str) -> Difference:
        """`variant` against `other`, both with times that count; never at odds with `vs_baseline`."""
        one, two = self.measured[variant], self.measured[other]
        if other == self.baseline:
            difference = against_baseline(one, two, self.looks)
        elif variant == self.baseline:
            difference = opposite(against_baseline(two, one, self.looks))
        else:
            difference = against_other(one, two, self.looks[-1][1])
        return self.sound(difference)

    def sound(self, difference: Difference) -> Difference:
        """The difference, without a verdict where other load affected the run."""
        return replace(difference, verdict="inconclusive") if self.has_interference else difference

    def share_launches(self, variant: str, other: str) -> bool:
        """Whether they run in the same processes, so that their rounds are pairs."""
        return self.measured[variant].group == self.measured[other].group


def against_baseline(measured: Measured, baseline: Measured, looks: Looks) -> Difference:
    """The verdict on a variant: paired rounds in the baseline's own launches, else pairs of launches."""
    if measured.group != baseline.group:
        return _by_launches(measured, baseline, looks[-1][1])
    return _from_outcome(settle(_paired(measured, baseline), looks))


def against_other(measured: Measured, other: Measured, alpha: float) -> Difference:
    """Like `against_baseline`, for two variants of which neither is the baseline: over all common rounds."""
    if measured.group != other.group:
        return _by_launches(measured, other, alpha)
    return _from_outcome(look_at(_paired(measured, other), alpha))


def opposite(difference: Difference) -> Difference:
    """The same finding from the other side: t_baseline / t in place of t / t_baseline."""
    ci = difference.ci
    return Difference(
        percent=None if difference.percent is None else _inverse(difference.percent),
        ci=None if ci is None else (_inverse(ci[1]), _inverse(ci[0])),
        verdict=OPPOSITE.get(difference.verdict, difference.verdict),
    )


def samples_ratio(measured: Measured, other: Measured) -> float:
    """Global batch over the other's: 1 where step times may be compared as they are."""
    if measured.variant.global_batch is None or other.variant.global_batch is None:
        return 1.0
    return measured.variant.global_batch / other.variant.global_batch


def _inverse(percent: float) -> float:
    return -100 * percent / (100 + percent)


def _paired(measured: Measured, other: Measured) -> tuple[float, ...]:
    return round_differences(measured.timed, other.timed, samples_ratio(measured, other))


def _from_outcome(outcome: Outcome) -> Difference:
    return Difference(outcome.percent, outcome.ci, outcome.verdict)


def _by_launches(measured: Measured, other: Measured, alpha: float) -> Difference:
    """From ln(median / other's median) of launches with the same repetition, which ran next to each other."""
    offset = math.log(samples_ratio(measured, other))
    others = other.launch_medians_ns
    pairs = [
        math.log(step_ns / others[repetition]) - offset
        for repetition, step_ns in measured.launch_medians_ns.items()
        if repetition in others
    ]
    if not pairs:
        return Difference(None, None, "inconclusive")
    percent = percent_from_log(fmean(pairs))
    ci = percent_interval(launch_pair_interval(pairs, alpha))
    return Difference(percent, ci, verdict_of(percent, ci))
