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

from gpurun.launcher.stats.launches import launch_pair_interval
from gpurun.launcher.stats.looks import looks, settle
from gpurun.launcher.stats.verdict import Verdict, percent_from_log, percent_interval, verdict_of

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
        outcomes = [settle(one, plan) for one in differences]
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


def power_in_a_launch(
    num_comparisons: int, seed: int, effect_percent: float = 2.0, scatter: float = 0.02
) -> float:
    """Share of comparisons that find a slower variant by the last look; `scatter` is the deviation of d."""
    rng = np.random.default_rng(seed)
    plan = looks(28, 1, early_stop=True)
    differences = rng.normal(log(1 + effect_percent / 100), scatter, (num_comparisons, 28))
    return sum(settle(one, plan).verdict == "slower" for one in differences) / num_comparisons


def false_alarms_of_looks(num_comparisons: int, seed: int) -> float:
    """Share of comparisons without a difference whose interval excludes 0 at some look, whatever its size."""
    rng = np.random.default_rng(seed)
    plan = looks(28, 1, early_stop=True)
    # At a scatter this large, what excludes 0 is also relevant: the rule of 1 % hides no alarm.
    differences = rng.normal(0, 0.5, (num_comparisons, 28))
    return sum(settle(one, plan).verdict in FALSE_ALARMS for one in differences) / num_comparisons


def false_alarms_across_launches(
    num_families: int, comparisons: int, seed: int, pairs: int = 6, scatter: float = 0.076, drift: float = 0.1
) -> float:
    """Share of families with a verdict where launch medians only scatter, and drift over the run.

    Launches run in ABBA order: neighbours form a pair, and every second pair is turned round.
    """
    rng = np.random.default_rng(seed)
    alpha = 0.05 / comparisons
    shape = (num_families, pairs, comparisons + 1)
    drifts = np.linspace(0, drift, pairs * (comparisons + 1)).reshape(shape[1:])
    drifts[1::2] = drifts[1::2, ::-1]
    logs = rng.normal(0, scatter, shape) + drifts
    differences = logs[:, :, 1:] - logs[:, :, :1]
    alarms = [
        any(across_verdict(family[:, one], alpha) in FALSE_ALARMS for one in range(comparisons))
        for family in differences
    ]
    return sum(alarms) / num_families


def across_verdict(differences: NDArray[np.float64], alpha: float) -> Verdict:
    """The verdict that the comparison draws from pairs of launches."""
    interval = percent_interval(launch_pair_interval(differences.tolist(), alpha))
    return verdict_of(percent_from_log(float(differences.mean())), interval)
