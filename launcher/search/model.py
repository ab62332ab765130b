"""Predicts the time of a combination of settings from those measured: additive in log time, with pairs.

log time = mean + an effect of each value + an effect of each pair of values + a deviation of its own. All
effects are normal; how large those of a key or of a pair of keys are is learned, so that pairs which don't
matter vanish. What was measured has noise: that of its steps, and that of one trial from the next.

Source: variance components; Zhou, Hu, Zhou and Lange, MM Algorithms for Variance Components Models, Journal
of Computational and Graphical Statistics 28 (2019).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Levels = NDArray[np.int64]
"""A row per combination, a column per key: the number of its value."""

MEAN_VARIANCE = 1.0
KEY_VARIANCE = 0.1**2
"""The variance of log time: values of a key differ by 10 %, until it is known."""
PAIR_VARIANCE = 0.02**2
OWN_VARIANCE = 0.01**2
TRIAL_VARIANCE = 0.02**2
"""The variance of one trial from the next, besides the noise of its steps."""
PRIOR_WEIGHT = 1.0
"""The weight of these guesses, in effects of each kind."""
ITERATIONS = 30
JITTER = 1e-10


@dataclass(frozen=True)
class MeasuredCombination:
    """The results of a combination's trials."""

    combination: int
    log_time: float
    """The mean over its trials."""
    variance: float
    """The variance of that mean, by the scatter of steps."""
    trials: int


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of the log time of every combination."""

    mean: Floats
    covariance: Floats
    trial_variance: float = 0.0
    """The variance of log time between trials of a combination, besides the noise of its steps."""

    def draws(self, number: int, rng: np.random.Generator) -> Floats:
        """Times that they may have, all together: an array of `number` rows."""
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.clip(values, 0.0, None))
        found: Floats = self.mean + rng.standard_normal((number, len(self.mean))) @ root.T
        return found


def posterior(levels: Levels, measured: Sequence[MeasuredCombination]) -> Posterior:
    """The posterior of every combination, given `measured`.

    Args:
        levels: of all combinations.
        measured: at least one.
    """
    own = [result.combination for result in measured]
    times = np.array([result.log_time for result in measured])
    fixed = np.diag([result.variance for result in measured])
    scatter = np.diag([1 / result.trials for result in measured])
    centre = float(np.median(times))
    seen = levels[own]
    kernels = np.array([*_kernels(seen, seen), np.eye(len(own)), scatter])
    variances = _learned(kernels, times - centre, fixed)
    covariance = _weighted(levels, levels, variances)
    covariance[np.diag_indices(len(levels))] += variances[-2]
    towards = _weighted(levels, seen, variances)
    towards[own, range(len(own))] += variances[-2]
    total = _total(kernels, variances, fixed)
    gain = np.linalg.solve(total, towards.T).T
    mean = centre + gain @ (times - centre)
    return Posterior(mean, covariance - gain @ towards.T, float(variances[-1]))


@dataclass(frozen=True)
class ValueEffect:
    """How much longer a step takes, in log time, where a key has one value instead of another."""

    key: int
    """A column of the levels."""
    level: int
    against: int
    """The other value."""
    log_time: float
    """The mean over all pairs of combinations that differ in no other key that both have."""
    deviation: float
    """The standard deviation of that mean, by what is known."""


def changes(
    belief: Posterior, levels: Levels, has: NDArray[np.bool_], known: Sequence[int], at: int
) -> list[ValueEffect]:
    """The change by each measured value of each key, compared with the value of the combination `at`.

    Where that has no such key, or its value wasn't measured, the value that was measured most often takes
    its place.

    Args:
        belief: of the log time of every combination.
        levels: of all combinations.
        has: which keys mean something for which combinations, like `levels`.
        known: the combinations that were measured.
        at: the combination whose values the others are compared with.
    """
    return [
        change
        for key in range(levels.shape[1])
        for change in _changes_of(key, belief, levels, has, list(known), at)
    ]


def fastest_with(
    change: ValueEffect,
    levels: Levels,
    has: NDArray[np.bool_],
    measured: Sequence[MeasuredCombination],
    at: int,
) -> MeasuredCombination | None:
    """The fastest combination that was measured and is like `at`, but for this change."""
    own = np.array([result.combination for result in measured])
    alike = _alike(change.key, own, np.array([at]), levels, has)[:, 0] & has[own, change.key]
    found = [result for result, is_alike in zip(measured, alike, strict=True) if is_alike]
    found = [result for result in found if levels[result.combination, change.key] == change.level]
    return min(found, key=lambda result: result.log_time, default=None)


def _changes_of(
    key: int, belief: Posterior, levels: Levels, has: NDArray[np.bool_], known: list[int], at: int
) -> Iterator[ValueEffect]:
    seen = [int(levels[combination, key]) for combination in known if has[combination, key]]
    values = sorted(set(seen))
    if len(values) < 2:
        return
    is_there = has[at, key] and int(levels[at, key]) in values
    against = int(levels[at, key]) if is_there else max(values, key=seen.count)
    for level in values:
        pairs = _pairs(key, level, against, levels, has)
        if level != against and len(pairs):
            weights = np.bincount(pairs[:, 0], minlength=len(levels)) / len(pairs)
            weights -= np.bincount(pairs[:, 1], minlength=len(levels)) / len(pairs)
            variance = float(weights @ belief.covariance @ weights)
            yield ValueEffect(
                key, level, against, float(weights @ belief.mean), math.sqrt(max(0.0, variance))
            )


def _pairs(key: int, level: int, against: int, levels: Levels, has: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Combinations with either value of the key which, in every other key that both have, are the same."""
    rows = np.flatnonzero(has[:, key] & (levels[:, key] == level))
    others = np.flatnonzero(has[:, key] & (levels[:, key] == against))
    first, second = np.nonzero(_alike(key, rows, others, levels, has))
    return np.stack([rows[first], others[second]], axis=1)


def _alike(
    key: int, rows: NDArray[np.int64], others: NDArray[np.int64], levels: Levels, has: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which of `rows` and `others` are the same in every key, except this one, that both have."""
    alike = np.ones((len(rows), len(others)), dtype=bool)
    for other in range(levels.shape[1]):
        if other != key:
            same = levels[rows, None, other] == levels[None, others, other]
            alike &= same | ~(has[rows, None, other] & has[None, others, other])
    return alike


def _learned(kernels: Floats, times: Floats, fixed: Floats) -> Floats:
    """The variance of each kind of effect; the last two are of combinations by themselves, and of trials."""
    num_keys = _num_keys(len(kernels))
    num_pairs = len(kernels) - num_keys - 2
    guesses = np.array(
        [KEY_VARIANCE] * num_keys + [PAIR_VARIANCE] * num_pairs + [OWN_VARIANCE, TRIAL_VARIANCE]
    )
    variances = guesses.copy()
    for _ in range(ITERATIONS):
        inverse = np.linalg.inv(_total(kernels, variances, fixed))
        solved = inverse @ times
        squares = np.einsum("i,kij,j->k", solved, kernels, solved)
        traces = np.einsum("ij,kji->k", inverse, kernels)
        above = variances**2 * squares + PRIOR_WEIGHT * guesses
        variances = np.sqrt(above / (traces + PRIOR_WEIGHT / variances))
    return variances


def _num_keys(num_kernels: int) -> int:
    """The number of keys, from that of kernels: k keys have k kernels, k·(k − 1)/2 of pairs, and two more."""
    return round((math.sqrt(8 * (num_kernels - 2) + 1) - 1) / 2)


def _total(kernels: Floats, variances: Floats, fixed: Floats) -> Floats:
    """The covariance of what was measured."""
    total: Floats = np.tensordot(variances, kernels, 1) + fixed + MEAN_VARIANCE
    total[np.diag_indices(len(total))] += JITTER
    return total


def _weighted(rows: Levels, columns: Levels, variances: Floats) -> Floats:
    """The covariance of combinations by their values: without their own deviations."""
    found = np.full((len(rows), len(columns)), MEAN_VARIANCE)
    for variance, kernel in zip(variances, _kernels(rows, columns), strict=False):
        found += variance * kernel
    return found


def _kernels(rows: Levels, columns: Levels) -> Iterator[Floats]:
    """Matrices: 1 where combinations share the value of a key, for every key, then every pair of keys."""
    keys = range(rows.shape[1])
    same = [(rows[:, key, None] == columns[None, :, key]).astype(float) for key in keys]
    yield from same
    yield from (a * b for a, b in itertools.combinations(same, 2))
