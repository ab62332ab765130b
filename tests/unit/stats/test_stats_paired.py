"""Hodges-Lehmann and the exact Wilcoxon interval against scipy, tables and brute force."""

from itertools import pairwise, product
from statistics import median

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.stats import estimates
from gpurun.launcher.stats.estimates import (
    hodges_lehmann,
    signed_rank_probabilities,
    walsh_rank,
    wilcoxon_interval,
)
from tests.known import known
from tests.whole import first

ALPHAS = (0.05, 0.016, 0.016 / 3)
differences = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("num_values", "alpha", "critical"),
    [
        (6, 0.05, 0),
        (8, 0.05, 3),
        (10, 0.05, 8),
        (12, 0.05, 13),
        (20, 0.05, 52),
        (20, 0.01, 37),
        (28, 0.05, 116),
    ],
)
def test_ranks_are_those_of_the_printed_tables(num_values: int, alpha: float, critical: int) -> None:
    # Tables give the largest T that is still significant; the interval's end is the next Walsh average.
    assert walsh_rank(num_values, alpha) == critical + 1


@pytest.mark.parametrize(("num_values", "alpha"), [(5, 0.05), (6, 0.016), (7, 0.0156), (8, 0.016 / 3)])
def test_too_few_values_give_no_interval(num_values: int, alpha: float) -> None:
    assert wilcoxon_interval([0.1 * value for value in range(num_values)], alpha) is None


def test_seven_values_just_allow_an_interval_at_two_in_two_to_the_seventh() -> None:
    assert wilcoxon_interval([1, 2, 3, 4, 5, 6, 7], 2 / 2**7) == (1, 7)


@pytest.mark.parametrize("num_values", first(6, [7, 8, 12, 17, 23, 30, *{*range(9, 30)} - {12, 17, 23}]))
def test_interval_holds_exactly_the_centres_that_scipy_would_not_reject(num_values: int) -> None:
    rng = np.random.default_rng(num_values)
    values = rng.normal(0.02, 0.05, num_values)
    for alpha in ALPHAS:
        interval = wilcoxon_interval(values.tolist(), alpha)
        if interval is None:
            assert scipy.stats.wilcoxon(np.ones(num_values) + values, method="exact").pvalue > alpha
            continue
        for end, inward in zip(interval, (1e-7, -1e-7), strict=True):
            assert scipy.stats.wilcoxon(values - (end + inward), method="exact").pvalue > alpha
            assert scipy.stats.wilcoxon(values - (end - inward), method="exact").pvalue <= alpha


@pytest.mark.parametrize("sizes", [(1, 1, 2, 2, 0, 3, 3, 3), (1,) * 9, (0, 0, 0, 1, 2, 3, 4, 5, 6)])
def test_ties_and_zeros_never_raise_the_error_rate(sizes: tuple[int, ...]) -> None:
    alpha = 0.05
    patterns = list(product((1, -1), repeat=len(sizes)))
    intervals = (
        wilcoxon_interval([s * d for s, d in zip(signs, sizes, strict=True)], alpha) for signs in patterns
    )
    wrong = sum(interval is not None and not interval[0] <= 0 <= interval[1] for interval in intervals)
    assert wrong / len(patterns) <= alpha


def test_values_that_are_all_the_same_have_an_interval_without_width() -> None:
    assert wilcoxon_interval([0.25] * 10, 0.05) == (0.25, 0.25)


def test_probabilities_are_those_of_all_sign_patterns() -> None:
    totals = [sum(rank for rank, sign in enumerate(signs, 1) if sign) for signs in product((0, 1), repeat=9)]
    expected = np.bincount(totals) / 2**9
    assert signed_rank_probabilities(9) == pytest.approx(expected, abs=1e-15)


@given(differences)
def test_estimate_is_the_median_of_all_pairwise_averages(values: list[float]) -> None:
    averages = [(a + b) / 2 for i, a in enumerate(values) for b in values[i:]]
    assert hodges_lehmann(values) == pytest.approx(median(averages), abs=1e-12)


@given(differences, st.sampled_from(ALPHAS))
def test_interval_contains_the_estimate_and_turns_with_the_sign(values: list[float], alpha: float) -> None:
    interval = wilcoxon_interval(values, alpha)
    if interval is not None:
        assert interval[0] <= known(hodges_lehmann(values)) <= interval[1]
        mirrored = wilcoxon_interval([-value for value in values], alpha)
        assert mirrored == pytest.approx((-interval[1], -interval[0]), abs=1e-12)


@given(differences)
def test_a_stricter_level_never_narrows_the_interval(values: list[float]) -> None:
    intervals = [wilcoxon_interval(values, alpha) for alpha in ALPHAS]
    for loose, strict in pairwise(intervals):
        if strict is not None:
            assert loose is not None
            assert strict[0] <= loose[0] <= loose[1] <= strict[1]


def test_nothing_measured_has_no_estimate() -> None:
    assert hodges_lehmann([]) is None
    assert wilcoxon_interval([], 0.05) is None


@given(st.integers(0, 2**32 - 1))
def test_many_values_are_counted_instead_of_listed(seed: int) -> None:
    values = np.random.default_rng(seed).normal(0, 1, estimates.EXACT_UP_TO + 1).round(2)
    rows, columns = np.triu_indices(len(values))
    averages = np.sort((values[rows] + values[columns]) / 2)
    ranks = (1, 7, len(averages) // 2, len(averages))
    expected = [averages[rank - 1] for rank in ranks]
    assert estimates.walsh_at(values.tolist(), ranks) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_normal_ranks_join_the_exact_ones(alpha: float) -> None:
    exact = walsh_rank(estimates.EXACT_UP_TO, alpha)
    normal = walsh_rank(estimates.EXACT_UP_TO + 1, alpha)
    assert 0.998 * exact < normal < 1.02 * exact
