"""Simulated runs: how often the verdicts would be wrong, and how often they find what is there.

Steps behave like measured ones: each depends on the one before, all drift, some are far too slow. The
statistics are those of the launcher, not copies. `benchmarks/` prints the same figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from gpurun.launcher.stats.looks import Looks, Outcome, look_at, looks

FALSE_ALARMS = ("faster", "slower")


@dataclass(frozen=True)
class StepNoise:
    """How the steps of one launch scatter, relative to the step."""

    sigma: float = 0.03
    """Standard deviation of a single step."""
    autocorrelation: float = 0.7
    """Of a step with the one before it."""
    drift: float = 0.10
    """From the first step of a run to the last."""
    spike_share: float = 0.02
    """Of all steps."""
    spike: float = 1.0
    """How much longer a spike lasts, on average."""


@dataclass(frozen=True)
class Rates:
    """Shares of simulated families of comparisons."""

    false_alarms: float
    """At least one `faster` or `slower` where nothing differs."""
    same: float
    """Of single comparisons."""
    mean_rounds: float
    """Until a comparison was decided."""


def rates_in_a_launch(
    num_families: int, comparisons: int, seed: int, early_stop: bool = True, noise: StepNoise | None = None
) -> Rates:
    """Identical variants compared with the baseline in `num_families` simulated launches of 28 rounds."""
    rng = np.random.default_rng(seed)
    plan = looks(28, comparisons, early_stop)
    alarms, same, rounds = 0, 0, 0
    for times in round_times(rng, num_families, comparisons + 1, noise or StepNoise()):
        differences = np.log(times[1:] / times[0])
        outcomes = [settled(one, plan) for one in differences]
        alarms += any(outcome.verdict in FALSE_ALARMS for outcome in outcomes)
        same += sum(outcome.verdict == "same" for outcome in outcomes)
        rounds += sum(outcome.rounds for outcome in outcomes)
    total = num_families * comparisons
    return Rates(alarms / num_families, same / total, rounds / total)


def round_times(
    rng: np.random.Generator, num_launches: int, num_variants: int, noise: StepNoise, steps: int = 8
) -> Iterator[NDArray[np.float64]]:
    """Round times of identical variants, shape (variants, rounds), one array per simulated launch.

    Every round runs a block of `steps` steps of each variant in a fresh order, along one series of noise.
    """
    rounds = 28
    series = (rounds, num_variants, steps)
    for _ in range(num_launches):
        innovations = rng.normal(size=rounds * num_variants * steps)
        scale = noise.sigma * np.sqrt(1 - noise.autocorrelation**2)
        wander = lfilter([scale], [1, -noise.autocorrelation], innovations)
        drift = np.linspace(0, noise.drift, innovations.size)
        spikes = (rng.random(innovations.size) < noise.spike_share) * rng.exponential(
            noise.spike, innovations.size
        )
        blocks = (np.exp(wander + drift) + spikes).reshape(series).mean(axis=2)
        orders = rng.permuted(np.tile(np.arange(num_variants), (rounds, 1)), axis=1)
        yield np.take_along_axis(blocks, orders, axis=1).T


def settled(differences: NDArray[np.float64], plan: Looks) -> Outcome:
    """What the rounds of a launch end with: measuring stops at the first look that decides."""
    outcomes = [look_at(differences[:rounds].tolist(), alpha) for rounds, alpha in plan]
    return next((outcome for outcome in outcomes if outcome.verdict != "inconclusive"), outcomes[-1])


def power_in_a_launch(
    num_comparisons: int, seed: int, effect_percent: float = 2.0, scatter: float = 0.02
) -> float:
    """Share of comparisons that find a slower variant by the last look; `scatter` is the deviation of d."""
    rng = np.random.default_rng(seed)
    plan = looks(28, 1, early_stop=True)
    differences = rng.normal(log(1 + effect_percent / 100), scatter, (num_comparisons, 28))
    return sum(settled(one, plan).verdict == "slower" for one in differences) / num_comparisons


def false_alarms_of_looks(num_comparisons: int, seed: int) -> float:
    """Share of comparisons without a difference whose interval excludes 0 at some look, whatever its size."""
    rng = np.random.default_rng(seed)
    plan = looks(28, 1, early_stop=True)
    # At a scatter this large, what excludes 0 is also relevant: the rule of 1 % hides no alarm.
    differences = rng.normal(0, 0.5, (num_comparisons, 28))
    return sum(settled(one, plan).verdict in FALSE_ALARMS for one in differences) / num_comparisons
