"""Estimates and tests, by definitions, by scipy and by simulation: of pairs, of launches, over looks."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise, product
from statistics import NormalDist, fmean, median

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats import estimates
from gpurun.launcher.stats.estimates import (
    ALPHA,
    SHARE_OF_ALPHA,
    SPENDING_POWER,
    Estimate,
    Family,
    best_rounds,
    bounded,
    components,
    detectable_percent,
    hodges_lehmann,
    holm,
    last_level,
    launch_values,
    launches_needed,
    launches_to_decide,
    level_at,
    median_interval,
    next_look,
    order_rank,
    paired,
    planned_looks,
    round_effects,
    signed_rank_probabilities,
    t_interval,
    t_quantile,
    trend,
    unpaired,
    walsh_rank,
    wilcoxon_interval,
)
from gpurun.launcher.units import Interval
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


@pytest.mark.parametrize(
    ("values", "alpha", "interval"),
    [
        ([], 0.05, None),
        (range(5), 0.05, None),
        (range(6), 0.016, None),
        (range(7), 0.0156, None),
        (range(8), 0.016 / 3, None),
        ([1, 2, 3, 4, 5, 6, 7], 2 / 2**7, (1, 7)),
        ([0.25] * 10, 0.05, (0.25, 0.25)),
    ],
)
def test_few_values_give_an_interval_only_at_a_level_that_they_reach(
    values: Sequence[float], alpha: float, interval: Interval | None
) -> None:
    assert wilcoxon_interval(values, alpha) == interval
    assert (hodges_lehmann(values) is None) == (not values)


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


# Student's t, intervals over launches and of medians, against scipy


PROBABILITIES = (0.5, 0.6, 0.9, 0.95, 0.975, 0.992, 0.995, 0.9975, 1 - 0.025 / 6, 0.9999, 0.999999)
times_ms = st.lists(st.floats(1, 1000), min_size=2, max_size=20)


@pytest.mark.parametrize("degrees", [1, 2, 2.5, 3, 5, 7.77, 11, 30, 100, 1000])
def test_t_quantiles_are_those_of_scipy(degrees: float) -> None:
    for probability in PROBABILITIES:
        expected = scipy.stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert t_quantile(1 - probability, degrees) == pytest.approx(-expected, rel=1e-8, abs=1e-9)


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


# Values of launches, their components, and the verdicts of a family


LOGS = st.lists(st.floats(-1, 1), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=9))
def test_two_variants_differ_by_the_centre_of_their_paired_rounds(rounds: list[tuple[float, float]]) -> None:
    values = launch_values(
        {name: dict(enumerate(logs)) for name, logs in zip("ab", zip(*rounds, strict=True), strict=True)}
    )
    expected = known(hodges_lehmann([a - b for a, b in rounds]))
    assert values["a"] - values["b"] == pytest.approx(expected, abs=1e-12)


@given(LOGS)
def test_a_variant_alone_has_the_centre_of_its_rounds(logs: list[float]) -> None:
    assert launch_values({"a": dict(enumerate(logs))})["a"] == hodges_lehmann(logs)


def test_what_slows_a_whole_round_down_cancels() -> None:
    quiet = {"a": [0.0] * 5, "b": [0.1] * 5, "c": [0.3] * 5}
    slow_round = [0.0, 0.0, 0.7, 0.0, 0.0]
    logs = {
        name: {i: x + s for i, (x, s) in enumerate(zip(xs, slow_round, strict=True))}
        for name, xs in quiet.items()
    }
    assert round_effects(logs) == pytest.approx(dict(enumerate(slow_round)))
    assert launch_values(logs) == pytest.approx({"a": 0.0, "b": 0.1, "c": 0.3})


def test_one_slow_block_moves_no_other_variant() -> None:
    logs = {name: dict.fromkeys(range(5), 0.0) for name in "abcd"}
    logs["d"][2] = 2.0
    values = launch_values(logs)
    assert (values["a"], values["b"], values["c"]) == (0.0, 0.0, 0.0)
    assert values["d"] < 0.5


def test_a_variant_without_rounds_has_no_value() -> None:
    assert launch_values({"a": {1: 0.5}, "b": {}}) == {"a": 0.5}


def test_components_are_those_of_the_model() -> None:
    rng = np.random.default_rng(7)
    launches = rng.normal(0, 0.05, (4000, 1)) + rng.normal(0, 0.10, (4000, 5))
    of_launches, of_rounds = components(launches.tolist())
    assert of_launches == pytest.approx(0.05, rel=0.06)
    assert of_rounds == pytest.approx(0.10, rel=0.02)


def test_rounds_that_scatter_alone_make_launches_scatter_by_nothing() -> None:
    """Means of 3 rounds at 15 % scatter by 9 %, and yet no launch differs from another."""
    rng = np.random.default_rng(8)
    of_launches, _ = components(rng.normal(0, 0.15, (3000, 3)).tolist())
    assert known(of_launches) < 0.03


def test_components_of_too_little() -> None:
    assert components([]) == (None, None)
    assert components([[0.1, 0.2]])[0] is None
    of_launches, of_rounds = components([[0.1], [0.3]])
    assert (known(of_launches), of_rounds) == (pytest.approx(math.sqrt(0.02)), None)


def family(*rows: list[float], looks: tuple[Look, ...] = ()) -> Family:
    return Family({name: dict(enumerate(row)) for name, row in zip("abcdefgh", rows, strict=False)}, looks)


SIX = [0.1, 0.2, 0.15, 0.12, 0.18, 0.14]


@pytest.mark.parametrize(
    ("logs", "looks"),
    [
        (SIX, ()),
        ([*SIX, 9.0, 9.0], (Look(6, 0.5),)),
        (SIX, (Look(6, 0.3), Look(8, 1.0))),
    ],
    ids=["all launches", "those after the last look count at the next", "it ended and keeps its level"],
)
def test_an_interval_is_of_launches(logs: list[float], looks: tuple[Look, ...]) -> None:
    found = family([0.0] * 8, logs, looks=looks)
    assert len(found.differences("b", "a")) == 6
    assert found.interval("b", "a") == t_interval(SIX, levels(looks)[0] if looks else 0.05)
    assert family([0.0] * 5, logs[:5]).interval("b", "a") is None


def test_holm_makes_room_for_the_next() -> None:
    """p-values 0.001, 0.02, 0.04, 0.3: the first at α/4, the second not at α/3, so the others neither."""

    def comparison(p: float):  # type: ignore[no-untyped-def]
        def at(alpha: float) -> Interval:
            return (0.1, alpha) if p <= alpha else (-0.1, alpha)

        return at

    found = holm({str(p): comparison(p) for p in (0.3, 0.001, 0.04, 0.02)})
    assert list(found) == ["0.3", "0.001", "0.04", "0.02"]
    assert known(found["0.001"]) == (0.1, 0.05 / 4)
    assert known(found["0.02"])[1] == pytest.approx(0.05 / 3)
    all_found = holm({str(p): comparison(p) for p in (0.001, 0.012, 0.02, 0.05)})
    assert all(known(ci)[0] > 0 for ci in all_found.values())
    assert holm({"a": lambda alpha: None}) == {"a": None}


@given(st.lists(st.floats(0.0001, 1), min_size=1, max_size=8))
def test_holm_establishes_what_its_definition_does(p_values: list[float]) -> None:
    def comparison(p: float):  # type: ignore[no-untyped-def]
        return lambda alpha: (0.1, 0.2) if p <= alpha else (-0.1, 0.2)

    found = holm({str(i): comparison(p) for i, p in enumerate(p_values)})
    ordered = sorted(p_values)
    rejected = 0
    while rejected < len(ordered) and ordered[rejected] <= 0.05 / (len(ordered) - rejected):
        rejected += 1
    assert sum(known(ci)[0] > 0 for ci in found.values()) == rejected


@given(st.lists(st.lists(st.floats(-1, 1), min_size=6, max_size=6), min_size=3, max_size=3))
def test_differences_add_up(rows: list[list[float]]) -> None:
    found = family(*rows)
    a_c = fmean(found.differences("a", "c"))
    assert a_c == pytest.approx(
        fmean(found.differences("a", "b")) + fmean(found.differences("b", "c")), abs=1e-12
    )


# Alpha spending: levels of looks, what can be detected, and outcomes against a threshold


def test_looks_are_a_third_apart_from_six_launches_on() -> None:
    found = [0]
    while found[-1] < 48:
        found.append(next_look(found[-1]))
    assert found[1:] == [6, 8, 11, 15, 20, 27, 36, 48]
    assert next_look(9) == 11


def levels(looks: tuple[Look, ...], alpha: float = ALPHA) -> list[float]:
    return [last_level(looks[: number + 1], alpha) for number in range(len(looks))]


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


# Outcomes against a threshold: of pairs of launches, and of two runs


def noise(deviation: float, num: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    values = [rng.gauss(0, deviation) for _ in range(num)]
    return [value - fmean(values) for value in values]


@pytest.mark.parametrize(
    ("shift", "outcome"), [(0.1, "slower"), (0.0, "not slower"), (-0.1, "not slower"), (0.03, "undecided")]
)
def test_three_outcomes(shift: float, outcome: str) -> None:
    differences = [shift + deviation for deviation in noise(0.01, 12, 3)]
    found = bounded(paired(differences), 3.0)
    assert found.outcome == outcome
    assert known(found.seen_percent) > 3.0


def test_bounds_are_those_of_one_sided_tests() -> None:
    differences = noise(0.02, 10, 4)
    low, high = known(bounded(paired(differences), 3.0).ci)
    expected = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    assert (low, high) == pytest.approx(
        [100 * (2.718281828459045**end - 1) for end in (expected.low, expected.high)]
    )
    after, before = noise(0.03, 8, 5), noise(0.01, 12, 6)
    low, high = known(bounded(unpaired(after, before), 3.0).ci)
    welch = scipy.stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.9)
    assert (low, high) == pytest.approx(
        [100 * (2.718281828459045**end - 1) for end in (welch.low, welch.high)]
    )


def test_fewer_than_six_launches_decide_nothing() -> None:
    few = noise(0.001, 5, 7)
    assert bounded(paired(few), 3.0).outcome == "undecided"
    assert bounded(unpaired(few, noise(0.001, 9, 8)), 3.0).ci is None
    assert bounded(paired([]), 3.0).percent is None
    assert unpaired([], [1.0]) is None


def test_a_gate_over_many_variants_trips_later_and_passes_alike() -> None:
    found = paired([0.03 + deviation for deviation in noise(0.02, 10, 4)])
    alone, eight = bounded(found, 3.0), bounded(found, 3.0, num_variants=8)
    assert known(eight.ci)[0] < known(alone.ci)[0]
    assert known(eight.ci)[1] == known(alone.ci)[1]


def test_looks_and_interference_widen_both_ends() -> None:
    found = paired(noise(0.01, 8, 9))
    plain = known(bounded(found, 3.0).ci)
    for wider in (
        bounded(found, 3.0, (Look(6, 0.2), Look(8, 0.3))),
        bounded(found, 3.0, bias=0.06),
    ):
        low, high = known(wider.ci)
        assert low < plain[0]
        assert high > plain[1]
    assert bounded(found, 3.0).outcome == "not slower"
    assert bounded(found, 3.0, bias=0.06).outcome == "undecided"
    assert bounded(found, 20.0, bias=0.06).outcome == "not slower"


def test_launches_to_decide_grow_towards_the_threshold() -> None:
    numbers = [launches_to_decide(Estimate(centre, 10, 0.01, 9), 3.0) for centre in (0.2, 0.1, 0.04)]
    assert numbers == sorted(map(known, numbers))
    assert launches_to_decide(Estimate(0.02956, 10, 0.01, 9), 3.0) is not None
    assert launches_to_decide(Estimate(0.04, 5), 3.0) is None
    close = Estimate(0.05, 10, 0.01, 9)
    looks = [Look(6, 0.5), Look(10, 1.0)]
    alone, sequential, several = (
        launches_to_decide(close, 3.0, *each) or 0 for each in ((), (looks,), (looks, 4))
    )
    assert alone < sequential < several
