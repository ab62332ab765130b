"""Alpha spending: levels of looks, what can be detected, and outcomes against a threshold."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import (
    ALPHA,
    SHARE_OF_ALPHA,
    SPENDING_POWER,
    best_rounds,
    detectable_percent,
    launches_needed,
    level_at,
    levels,
    next_look,
    planned_looks,
    t_quantile,
)
from tests.known import known


def test_looks_are_a_third_apart_from_six_launches_on() -> None:
    found = [0]
    while found[-1] < 48:
        found.append(next_look(found[-1]))
    assert found[1:] == [6, 8, 11, 15, 20, 27, 36, 48]
    assert next_look(9) == 11


def test_one_look_has_all_of_the_error() -> None:
    assert level_at((), 6) == ALPHA
    assert level_at((), 6, 0.01) == 0.01


def test_the_first_look_spends_what_its_share_of_the_budget_allows() -> None:
    looks = (Look(6, 0.25), Look(11, 0.5))
    assert levels(looks, 0.05)[0] == pytest.approx(0.05 * SHARE_OF_ALPHA * 0.25**SPENDING_POWER)
    assert level_at(looks, 6) == level_at(looks[:1], 6)


def test_levels_spend_exactly_the_error_of_normal_sums() -> None:
    """A million random walks cross the boundaries as often as they should."""
    looks = tuple(Look(n, n / 20) for n in (6, 8, 11, 15, 20))
    rng = np.random.default_rng(11)
    sums = rng.normal(size=(200_000, 20)).cumsum(axis=1)
    crossed = np.zeros(len(sums), dtype=bool)
    for look, level in zip(looks, levels(looks), strict=True):
        bound = -NormalDist().inv_cdf(level / 2) * math.sqrt(look.launches)
        crossed |= abs(sums[:, look.launches - 1]) > bound
        spent = ALPHA * SHARE_OF_ALPHA * look.fraction**SPENDING_POWER
        assert crossed.mean() == pytest.approx(spent, abs=4 * math.sqrt(spent / len(sums)))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=7), st.sampled_from([0.05, 0.05 / 7, 0.1]))
def test_no_look_has_more_than_is_left(fractions: list[float], alpha: float) -> None:
    looks = tuple(
        Look(launches, fraction)
        for launches, fraction in zip((6, 8, 11, 15, 20, 27, 36), sorted(fractions), strict=False)
    )
    found = levels(looks, alpha)
    assert all(0 <= level <= alpha for level in found)
    assert levels(looks[:-1], alpha) == found[:-1]  # later looks change nothing about earlier ones


def test_a_look_without_more_of_the_budget_decides_nothing_new() -> None:
    assert levels((Look(6, 0.5), Look(8, 0.5)))[1] < 1e-9


def test_what_the_last_launches_add_to_a_comparison_that_ended_early() -> None:
    looks = (Look(6, 0.3), Look(8, 0.6), Look(11, 1.0))
    assert level_at(looks, 7) == levels(looks)[1]
    assert level_at(looks, 12) == levels(looks)[2]


def test_detectable_is_what_is_found_four_times_of_five() -> None:
    percent, launches = known(detectable_percent(10.0, 20)), 20
    rng = np.random.default_rng(12)
    differences = rng.normal(math.log1p(percent / 100), 0.10, (20_000, launches))
    looks = planned_looks(launches)
    found = np.zeros(len(differences), dtype=bool)
    for look, level in zip(looks, levels(looks), strict=True):
        seen = differences[:, : look.launches]
        t = seen.mean(axis=1) / seen.std(axis=1, ddof=1) * math.sqrt(look.launches)
        found |= t > t_quantile(1 - level / 2, look.launches - 1)
    assert found.mean() == pytest.approx(0.8, abs=0.04)


def test_what_cannot_be_detected_is_none() -> None:
    assert detectable_percent(5.0, 5) is None
    assert launches_needed(0.0, 5.0) is None
    assert launches_needed(0.01, 18.0) is None
    assert launches_needed(300.0, 1.0) == 6


@given(st.floats(2, 60), st.floats(1, 20))
def test_the_launches_needed_are_the_fewest_that_detect(percent: float, scatter_percent: float) -> None:
    launches = launches_needed(percent, scatter_percent)
    if launches is not None:
        assert known(detectable_percent(scatter_percent, launches)) <= percent * (1 + 1e-9)
        fewer = detectable_percent(scatter_percent, launches - 1)
        assert fewer is None or fewer > percent


@pytest.mark.parametrize(
    ("start_s", "round_s", "launch", "rounds", "best"),
    [(4.0, 1.0, 5.0, 15.0, 6), (1.0, 1.0, 10.0, 1.0, 3), (9.0, 1.0, 0.0, 5.0, 28), (4.0, 1.0, None, None, 3)],
)
def test_rounds_follow_costs_and_scatter(
    start_s: float, round_s: float, launch: float | None, rounds: float | None, best: int
) -> None:
    assert best_rounds(start_s, round_s, launch, rounds) == best
