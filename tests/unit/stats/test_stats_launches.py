"""Student's t, intervals over launches and of medians, against scipy."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from gpurun.launcher.stats.estimates import (
    median_interval,
    order_rank,
    t_interval,
    t_quantile,
    trend,
    unpaired,
)
from tests.known import known

PROBABILITIES = (0.5, 0.6, 0.9, 0.95, 0.975, 0.992, 0.995, 0.9975, 1 - 0.025 / 6, 0.9999, 0.999999)
times_ms = st.lists(st.floats(1, 1000), min_size=2, max_size=20)


@pytest.mark.parametrize("degrees", [1, 2, 2.5, 3, 5, 7.77, 11, 30, 100, 1000])
def test_t_quantiles_are_those_of_scipy(degrees: float) -> None:
    for probability in PROBABILITIES:
        expected = scipy.stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert t_quantile(1 - probability, degrees) == pytest.approx(-expected, rel=1e-8, abs=1e-9)


@given(st.floats(1e-6, 1 - 1e-6), st.floats(1, 300))
def test_t_quantile_is_the_inverse_of_scipys_distribution(probability: float, degrees: float) -> None:
    assert scipy.stats.t.cdf(t_quantile(probability, degrees), degrees) == pytest.approx(
        probability, rel=1e-9
    )


@pytest.mark.parametrize(("probability", "degrees"), [(0, 5), (1, 5), (0.5, 0), (-0.1, 3)])
def test_t_quantile_rejects_what_has_none(probability: float, degrees: float) -> None:
    with pytest.raises(ValueError, match="no t quantile"):
        t_quantile(probability, degrees)


@given(times_ms, st.sampled_from((0.05, 0.01)))
def test_t_interval_is_that_of_scipy(values: list[float], alpha: float) -> None:
    error = np.std(values, ddof=1) / len(values) ** 0.5
    assume(error > 1e-6)
    expected = scipy.stats.t.interval(1 - alpha, len(values) - 1, np.mean(values), error)
    assert t_interval(values, alpha) == pytest.approx(expected, rel=1e-6)


def test_one_value_has_no_interval() -> None:
    assert t_interval([3.0], 0.05) is None


def test_five_launches_of_either_run_have_no_interval() -> None:
    five, six = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [known(unpaired(*runs)).interval(0.05) for runs in ((five, six), (six, five))] == [None, None]
    assert unpaired(six, []) is None


@pytest.mark.parametrize("seed", range(10))
def test_welch_is_that_of_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, baseline = rng.normal(1, 3, rng.integers(6, 13)), rng.normal(0, 1, rng.integers(6, 13))
    low, high = scipy.stats.ttest_ind(values, baseline, equal_var=False).confidence_interval(0.97)
    found = known(unpaired(values.tolist(), baseline.tolist()))
    assert found.interval(0.03) == pytest.approx((low, high), rel=1e-9)
    assert found.interval(0.03, bias=0.1) == pytest.approx((low - 0.1, high + 0.1), rel=1e-9)


def test_constant_launches_have_no_width() -> None:
    assert known(unpaired([2.0] * 6, [1.0] * 7)).interval(0.05) == (1.0, 1.0)


@pytest.mark.parametrize("num_values", range(1, 60))
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_order_statistics_of_a_median_are_binomial(num_values: int, alpha: float) -> None:
    rank = order_rank(num_values, alpha)
    assert rank == 0 or 2 * scipy.stats.binom.cdf(rank - 1, num_values, 0.5) <= alpha
    assert 2 * scipy.stats.binom.cdf(rank, num_values, 0.5) > alpha


def test_interval_of_a_median_by_the_printed_table() -> None:
    assert median_interval([5, 1, 4, 2, 3]) is None
    assert median_interval([6, 5, 1, 4, 2, 3]) == (1, 6)
    assert median_interval(range(1, 29)) == (9, 20)


@pytest.mark.slow
def test_noise_rarely_has_a_trend() -> None:
    """Kendall's test at 5 %, as scipy has it."""
    rng = np.random.default_rng(20)
    runs = [rng.normal(1, 0.1, 30).tolist() for _ in range(1000)]
    found = [trend(values) is not None for values in runs]
    p_values = [scipy.stats.kendalltau(range(30), values, method="asymptotic").pvalue for values in runs]
    assert sum(found) <= sum(p < 0.05 for p in p_values) <= 70
    drifting = [[value + 0.01 * i for i, value in enumerate(values)] for values in runs]
    assert sum(trend(values) is not None for values in drifting) > 900
