"""What a search tries: properties of every search, and searches whose answer is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpurun.launcher.search.policy import (
    MOST_TRIALS,
    Levels,
    MeasuredCombination,
    Posterior,
    Search,
    Trial,
    changes,
    design,
    measured,
    missed,
    posterior,
)
from tests.known import known

SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def levels_of(shape: Sequence[int]) -> Levels:
    return np.array(list(np.ndindex(*shape)), dtype=np.int64)


def searched(search: Search, times: Sequence[float], budget_s: float, noise: float = 0.0) -> list[Trial]:
    """All trials of a search among combinations that take so long; a time of infinity fails."""
    rng, trials = np.random.default_rng(3), list[Trial]()
    while (batch := search.next_batch(trials, budget_s)) is not None:
        for each in batch.combinations:
            steps = 5 * 2 ** (batch.number - 1)
            log_time = (
                math.log(times[each]) + float(rng.normal(0, noise)) if math.isfinite(times[each]) else None
            )
            trials.append(Trial(each, log_time, noise**2, steps * min(times[each], 1.0)))
            budget_s -= trials[-1].seconds
    return trials


@settings(max_examples=8, deadline=None)
@given(SHAPES, st.integers(0, 2**31), st.booleans())
@example((3, 2, 3), 4102938, False)  # the model doesn't believe the fastest trial
def test_a_search_ends_and_tries_nothing_in_vain(shape: tuple[int, ...], seed: int, fails: bool) -> None:
    levels, rng = levels_of(shape), np.random.default_rng(seed)
    times = [math.inf if fails and rng.random() < 0.3 else float(rng.uniform(0.01, 0.02)) for _ in levels]
    search = Search(levels, first=(len(levels) - 1,))
    trials = searched(search, times, 1e9, 0.01)
    counts = [sum(trial.combination == combination for trial in trials) for combination in range(len(levels))]
    assert trials[0].combination == len(levels) - 1
    assert max(counts) <= MOST_TRIALS
    assert all(count <= 1 for count, time in zip(counts, times, strict=True) if not math.isfinite(time))
    found = search.found(trials)
    tried = [time for count, time in zip(counts, times, strict=True) if count and math.isfinite(time)]
    assert (found is None) == (not tried)
    if found is not None:
        assert all(math.isfinite(times[finalist]) and counts[finalist] for finalist in found.finalists)
        assert min(times[finalist] for finalist in found.finalists) <= 1.1 * min(tried)


@settings(max_examples=8, deadline=None)
@given(SHAPES, st.floats(0.0, 1.0))
def test_a_search_keeps_to_its_time(shape: tuple[int, ...], budget_s: float) -> None:
    levels = levels_of(shape)
    trials = searched(Search(levels), [0.01] * len(levels), budget_s)
    begun = min(len(levels), len(design(levels, 0)))
    assert sum(trial.seconds for trial in trials[begun:]) <= max(budget_s, 0.0) + 1e-9


@given(SHAPES, st.integers(0, 100))
def test_the_first_batch_has_every_value(shape: tuple[int, ...], seed: int) -> None:
    levels = levels_of(shape)
    chosen = design(levels, seed, first=(0,))
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    assert all({*levels[list(chosen), key]} == {*range(size)} for key, size in enumerate(shape))


def test_the_same_search_makes_the_same_choices() -> None:
    levels = levels_of((4, 3, 3))
    times = [0.01 * (1 + combination % 7) for combination in range(len(levels))]
    assert searched(Search(levels), times, 1e9) == searched(Search(levels), times, 1e9)


@pytest.mark.parametrize("with_pair", [False, True])
def test_the_model_finds_effects_and_pairs(with_pair: bool) -> None:
    levels, rng = levels_of((4, 4, 3)), np.random.default_rng(5)
    effects = [rng.normal(0, 0.2, size)[levels[:, key]] for key, size in enumerate((4, 4, 3))]
    pair = rng.normal(0, 0.3, (4, 4))[levels[:, 0], levels[:, 1]] if with_pair else 0.0
    times = np.sum(effects, axis=0) + pair
    chosen = rng.permutation(len(levels))[:36]
    known = [
        MeasuredCombination(int(each), float(times[each] + rng.normal(0, 0.01)), 1e-4, 1) for each in chosen
    ]
    belief = posterior(levels, known)
    others = [combination for combination in range(len(levels)) if combination not in chosen]
    errors = np.abs(belief.mean[others] - times[others])
    deviations = np.sqrt(np.diag(belief.covariance)[others])
    assert float(np.median(errors)) < 0.06
    assert float(np.mean(errors < 3 * deviations)) >= 0.9  # it knows what it doesn't know


def test_a_change_is_the_mean_over_pairs_that_differ_in_nothing_else_that_both_have() -> None:
    """The second key means nothing to the last combination, whose only pairs differ in the first one."""
    levels = np.array([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    has = np.array([(True, True)] * 4 + [(True, False)])
    belief = Posterior(np.array([0.0, 0.1, 0.4, 0.9, 2.0]), np.diag([0.04, 0.0, 0.0, 0.0, 0.0]))
    found = list(changes(belief, levels, has, known=range(5), at=0))
    assert [(each.key, each.level, each.against) for each in found] == [(0, 1, 0), (0, 2, 0), (1, 1, 0)]
    means = [(0.4 + 0.8) / 2, (2.0 + 1.9) / 2, (0.1 + 0.5) / 2]
    assert [change.log_time for change in found] == pytest.approx(means)
    assert [change.deviation for change in found] == pytest.approx([0.1] * 3)  # half of the first one's
    assert [(each.level, each.against) for each in changes(belief, levels, has, known=[1, 2, 3], at=4)] == [
        (0, 1),
        (0, 1),
    ], "what most have takes the place of a value that wasn't measured"


def test_intervals_of_changes_hold_what_they_should() -> None:
    """36 of 48 combinations are measured, on costs with effects, a pair that matters and deviations."""
    levels, held = levels_of((4, 4, 3)), list[bool]()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        times = sum(rng.normal(0, 0.2, size)[levels[:, key]] for key, size in enumerate((4, 4, 3)))
        times = times + rng.normal(0, 0.1, (4, 4))[levels[:, 0], levels[:, 1]] + rng.normal(0, 0.01, 48)
        chosen = [int(combination) for combination in rng.permutation(len(levels))[:36]]
        known = [
            MeasuredCombination(each, float(times[each] + rng.normal(0, 0.01)), 1e-4, 1) for each in chosen
        ]
        true = Posterior(times, np.zeros((48, 48)))
        has = np.ones_like(levels, dtype=bool)
        both = zip(
            changes(posterior(levels, known), levels, has, chosen, 0),
            changes(true, levels, has, chosen, 0),
            strict=True,
        )
        held += [abs(change.log_time - fact.log_time) <= 1.96 * change.deviation for change, fact in both]
    assert len(held) == 10 * 8
    assert np.mean(held) >= 0.9


def test_what_may_be_missed_shrinks_with_what_is_known() -> None:
    levels = levels_of((5, 4, 3))
    times = [0.02 * 1.1 ** sum(map(int, row)) for row in levels]
    search = Search(levels)
    trials = searched(search, times, 1e9, 0.01)
    first = measured(trials[: len(design(levels, 0))])
    early = posterior(levels, first[:4])
    found = known(search.found(trials))
    assert found.finalists[0] == 0
    others = [combination for combination in range(len(levels)) if combination not in found.finalists]
    assert found.missed is not None
    assert found.missed < missed(early, found.finalists, others)


def test_nothing_is_said_of_values_that_no_trial_had() -> None:
    """By a single trial the model would know others to 20 %."""
    search = Search(levels_of((2, 3)))
    trial = Trial(0, math.log(0.06), 1e-4, 1.0)
    found = known(search.found([trial]))
    assert (found.missed, found.unknown) == (None, frozenset(range(1, 6)))
    others = [Trial(number, math.log(0.06), 1e-4, 1.0) for number in (4, 2)]
    found = known(search.found([trial, *others]))
    assert found.missed is not None
    assert not found.unknown


def test_a_combination_of_which_a_trial_failed_has_no_result() -> None:
    trials = [Trial(0, 0.1), Trial(1, 0.2), Trial(0, None), Trial(1, 0.4)]
    assert [(mean.combination, mean.log_time) for mean in measured(trials)] == [(1, pytest.approx(0.3))]
