"""Chooses a search's next trials, and when it drops what: pure, on the results of trials so far.

First a few combinations that have every value several times. By the model of their times, those that may be
faster than the best one so far are tried in turn, until none is likely to be faster by more than a percent.
What was tried is then tried again, for twice as long each time, as long as it isn't clearly slower:
successive halving. The best that remain are compared as in any run.

The model predicts the time of a combination from those measured: additive in log time, with pairs.
log time = mean + an effect of each value + an effect of each pair of values + a deviation of its own. All
effects are normal; how large those of a key or of a pair of keys are is learned, so that pairs which don't
matter vanish. What was measured has noise: that of its steps, and that of one trial from the next.

Sources: Russo and others, A Tutorial on Thompson Sampling, Foundations and Trends in Machine Learning 11
(2018); Karnin, Koren and Somekh, Almost Optimal Exploration in Multi-Armed Bandits, ICML (2013). Variance
components: Zhou, Hu, Zhou and Lange, MM Algorithms for Variance Components Models, Journal of Computational
and Graphical Statistics 28 (2019).
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.grouping import grouped

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
    variances = _learned(levels.shape[1], kernels, times - centre, fixed)
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
) -> Iterator[ValueEffect]:
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
    for key in range(levels.shape[1]):
        seen = [int(levels[combination, key]) for combination in known if has[combination, key]]
        values = sorted(set(seen))
        is_there = has[at, key] and int(levels[at, key]) in values
        against = int(levels[at, key]) if is_there else max(values, key=seen.count, default=0)
        for level in values:
            if level != against and len(pairs := _pairs(key, level, against, levels, has)):
                weights = np.bincount(pairs[:, 0], minlength=len(levels)) / len(pairs)
                weights -= np.bincount(pairs[:, 1], minlength=len(levels)) / len(pairs)
                mean, variance = float(weights @ belief.mean), float(weights @ belief.covariance @ weights)
                yield ValueEffect(key, level, against, mean, math.sqrt(max(0.0, variance)))


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


def _learned(num_keys: int, kernels: Floats, times: Floats, fixed: Floats) -> Floats:
    """The variance of each kind of effect; the last two are of combinations by themselves, and of trials."""
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


FINALISTS = 5
TOLERANCE = 0.01
"""A difference of log time: a combination that is faster by less isn't looked for."""
DESIGN_PER_EFFECT = 1.5
"""Combinations of the first batch, for each effect of a value that the model has."""
LEAST_DESIGN = 8
BATCH = 8
"""Combinations that are tried before the model learns from them."""
MOST_TRIALS = 4
"""The limit for a combination; each takes twice as many steps as the one before."""
CHANCE = 0.01
"""The chance below which a combination is clearly slower than the fastest of those tried."""
LEVEL = 0.95
DRAWS = 2000
SEED = 0
"""A search that is resumed chooses as before."""


@dataclass(frozen=True)
class Trial:
    """The result of one trial."""

    combination: int
    log_time: float | None
    """The log time of a step, or of a sample; `None`: it failed."""
    variance: float = 0.0
    """The variance of that, by the scatter of its steps."""
    seconds: float = 0.0
    """The length of the trial."""


@dataclass(frozen=True)
class Batch:
    """The next trials."""

    combinations: tuple[int, ...]
    number: int
    """The number of this trial of each combination, from 1."""


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search."""

    finalists: tuple[int, ...]
    """The fastest by their trials, in this order."""
    belief: Posterior
    """The log time of every combination, measured or predicted."""
    missed: float | None
    """With 95 % confidence, no other is faster than the best finalist by more, in log time. `None`: some have
    a value that none of those measured has, so that nothing is known of it."""
    unknown: frozenset[int]
    """The combinations with such a value."""


@dataclass(frozen=True, eq=False)
class Search:
    """A search of the fastest of these combinations."""

    levels: Levels
    first: tuple[int, ...] = ()
    """The combination that is tried before all others: the job's own setting."""
    _design: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_design", design(self.levels, SEED, self.first))

    def next_batch(self, trials: Sequence[Trial], left_s: float) -> Batch | None:
        """The next trials; `None`: what is known suffices, or the time is up.

        Args:
            trials: so far.
            left_s: seconds that are left for trials.
        """
        batch = self._wanted(trials)
        if batch is None:
            return None
        cost_s = fmean(trial.seconds for trial in trials) * 2 ** (batch.number - 1) if trials else 0.0
        affordable = len(batch.combinations) if cost_s <= 0 else int(left_s / cost_s)
        chosen = batch.combinations[: max(0, affordable)]
        return Batch(chosen, batch.number) if chosen else None

    def _wanted(self, trials: Sequence[Trial]) -> Batch | None:
        tried = {trial.combination for trial in trials}
        if begin := [combination for combination in self._design if combination not in tried]:
            return Batch(tuple(begin), 1)
        known = measured(trials)
        if not known:
            rest = [combination for combination in range(len(self.levels)) if combination not in tried]
            return Batch(tuple(rest[:BATCH]), 1) if rest else None
        belief = posterior(self.levels, known)
        draws = belief.draws(DRAWS, np.random.default_rng((SEED, len(trials))))
        return self._explore(draws, tried, known) or self._again(draws, known)

    def _explore(self, draws: Floats, tried: set[int], known: Sequence[MeasuredCombination]) -> Batch | None:
        """The combinations not tried yet that are most often the fastest, in times that all may have."""
        untried = np.array(
            [combination for combination in range(len(self.levels)) if combination not in tried], dtype=int
        )
        if not len(untried):
            return None
        best = draws[:, [result.combination for result in known]].min(axis=1)
        gains = best - draws[:, untried].min(axis=1)
        if np.quantile(gains, LEVEL) <= TOLERANCE:
            return None
        fastest = draws[:, untried].argmin(axis=1)[gains > TOLERANCE]
        counts = np.bincount(fastest, minlength=len(untried))
        order = np.argsort(-counts, kind="stable")[:BATCH]
        return Batch(tuple(int(untried[position]) for position in order if counts[position]), 1)

    def _again(self, draws: Floats, known: Sequence[MeasuredCombination]) -> Batch | None:
        """The combinations that may still be the fastest of those tried; the fewest trials first."""
        own = np.array([result.combination for result in known])
        times = draws[:, own]
        chances = (times <= times.min(axis=1, keepdims=True) + TOLERANCE / 2).mean(axis=0)
        left = [result for result, chance in zip(known, chances, strict=True) if chance >= CHANCE]
        trials = min(result.trials for result in left)
        if trials >= MOST_TRIALS or (len(left) <= FINALISTS and trials > 1):
            return None
        most = max(2 * FINALISTS, math.ceil(len(known) / 2**trials))
        by_time = sorted(left, key=lambda result: float(draws[:, result.combination].mean()))[:most]
        again = tuple(result.combination for result in by_time if result.trials == trials)
        return Batch(again, trials + 1) if again else None

    def found(self, trials: Sequence[Trial]) -> SearchOutcome | None:
        """The result of the trials so far; `None` if none has ended well."""
        known = measured(trials)
        if not known:
            return None
        belief = posterior(self.levels, known)
        by_time = sorted(known, key=lambda result: result.log_time)
        finalists = tuple(result.combination for result in by_time[:FINALISTS])
        failed = {trial.combination for trial in trials if trial.log_time is None}
        others = [
            combination for combination in range(len(self.levels)) if combination not in {*finalists, *failed}
        ]
        unknown = self.unlike([result.combination for result in known]) & {*others}
        most = None if unknown else missed(belief, finalists, others)
        return SearchOutcome(finalists, belief, most, unknown)

    def unlike(self, known: Sequence[int]) -> frozenset[int]:
        """Combinations with a value of some key that none of these has."""
        seen = [{*self.levels[list(known), key]} for key in range(self.levels.shape[1])]
        return frozenset(
            combination
            for combination, levels in enumerate(self.levels)
            if any(level not in of_key for level, of_key in zip(levels, seen, strict=True))
        )


def missed(belief: Posterior, finalists: Sequence[int], others: Sequence[int]) -> float:
    """How much faster, in log time, the best of `others` may be than the best finalist: 95 % confidence."""
    if not others:
        return 0.0
    draws = belief.draws(DRAWS, np.random.default_rng(SEED))
    gains = draws[:, list(finalists)].min(axis=1) - draws[:, list(others)].min(axis=1)
    return max(0.0, float(np.quantile(gains, LEVEL)))


def measured(trials: Sequence[Trial]) -> list[MeasuredCombination]:
    """The combined results of each combination's trials; nothing for one of which a trial failed."""
    by_combination = grouped(trials, lambda trial: trial.combination)
    return [
        _together(combination, own)
        for combination, own in by_combination.items()
        if all(trial.log_time is not None for trial in own)
    ]


def _together(combination: int, trials: Sequence[Trial]) -> MeasuredCombination:
    """The mean over trials."""
    times = [trial.log_time for trial in trials if trial.log_time is not None]
    variance = math.fsum(trial.variance for trial in trials) / len(trials) ** 2
    return MeasuredCombination(combination, fmean(times), variance, len(trials))


def design(levels: Levels, seed: int, first: Sequence[int] = ()) -> tuple[int, ...]:
    """The first batch: at random, but each value of every key as often as possible.

    Args:
        levels: of all combinations.
        seed: of the choice.
        first: what it begins with.
    """
    num_values = [len(np.unique(levels[:, key])) for key in range(levels.shape[1])]
    effects = 1 + sum(number - 1 for number in num_values)
    size = min(len(levels), max(LEAST_DESIGN, math.ceil(DESIGN_PER_EFFECT * effects)))
    order = [
        *first,
        *(int(combination) for combination in np.random.default_rng(seed).permutation(len(levels))),
    ]
    left = list(dict.fromkeys(order))
    counts = [np.zeros(int(levels[:, key].max()) + 1) for key in range(levels.shape[1])]
    chosen: list[int] = []
    while len(chosen) < size:
        rarest = min(
            left, key=lambda combination: (combination not in first, _seen(levels[combination], counts))
        )
        left.remove(rarest)
        chosen.append(rarest)
        for key, value in enumerate(levels[rarest]):
            counts[key][value] += 1
    return tuple(chosen)


def _seen(values: Levels, counts: Sequence[Floats]) -> float:
    """How often its values have been chosen, each as a share of its key's."""
    return math.fsum(count[value] / max(count.sum(), 1) for count, value in zip(counts, values, strict=True))
