"""When to look, what is decided then, and that the comparison will agree later."""

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.rundir.records import RoundTime
from gpurun.launcher.stats.family import holm
from gpurun.launcher.stats.looks import (
    EARLY_LOOK_ALPHA,
    ONE_LOOK_ALPHA,
    decide,
    decided_variants,
    look_at,
    looks,
)
from gpurun.launcher.stats.paired import round_differences, round_step_ns, wilcoxon_interval
from gpurun.launcher.stats.schedule import block_steps, is_steady, round_blocks
from gpurun.launcher.stats.verdict import Verdict, percent_from_log, percent_interval, verdict_of

SHARE = EARLY_LOOK_ALPHA / ONE_LOOK_ALPHA


@pytest.mark.parametrize(
    ("percent", "ci", "verdict"),
    [
        (2.0, (0.5, 3.0), "slower"),
        (-2.0, (-3.0, -0.5), "faster"),
        (0.9, (0.5, 1.5), "inconclusive"),
        (1.0, (0.1, 1.9), "slower"),
        (0.3, (-0.4, 0.9), "same"),
        (0.5, (0.2, 0.9), "same"),
        (0.0, (-1.0, 1.0), "same"),
        (3.0, (-0.1, 6.0), "inconclusive"),
        (3.0, (0.0, 6.0), "inconclusive"),
        (-40.0, None, "inconclusive"),
        (None, None, "inconclusive"),
    ],
)
def test_verdict(percent: float, ci: tuple[float, float] | None, verdict: Verdict) -> None:
    assert verdict_of(percent, ci) == verdict


@given(st.floats(-5, 5))
def test_percent_is_the_ratio_less_one(log_ratio: float) -> None:
    assert percent_from_log(log_ratio) == pytest.approx(100 * (np.exp(log_ratio) - 1), rel=1e-9, abs=1e-12)


def test_percent_of_known_ratios() -> None:
    assert percent_from_log(np.log(1.138)) == pytest.approx(13.8)
    assert percent_interval((np.log(0.5), np.log(2))) == pytest.approx((-50, 100))
    assert percent_interval(None) is None


def test_looks_of_the_default() -> None:
    assert looks(28, 1, True) == ((8, 0.016), (12, 0.016), (16, 0.016), (20, 0.016), (28, 0.016))
    assert looks(28, 4, True)[0] == (8, 0.004)
    assert looks(28, 4, False) == ((28, 0.0125),)


def test_looks_of_few_rounds_are_not_repeated() -> None:
    assert [rounds for rounds, _ in looks(3, 1, True)] == [1, 2, 3]
    assert [rounds for rounds, _ in looks(1, 1, True)] == [1]


@given(st.integers(1, 500), st.integers(0, 50), st.booleans())
def test_looks_rise_and_end_with_the_last_round(rounds: int, comparisons: int, early_stop: bool) -> None:
    stops = [stop for stop, _ in looks(rounds, comparisons, early_stop)]
    assert stops == sorted(set(stops))
    assert stops[-1] == rounds
    assert stops[0] >= 1


def test_identical_rounds_are_the_same() -> None:
    assert look_at([0.0] * 28, EARLY_LOOK_ALPHA / 3).verdict == "same"


@given(st.integers(0, 2**32 - 1), st.floats(-0.03, 0.03), st.integers(1, 3))
def test_what_the_worker_decided_the_comparison_finds_again(
    seed: int, effect: float, comparisons: int
) -> None:
    """It judges all rounds at the level that a look has of all, shared among no more comparisons."""
    rng = random.Random(seed)
    plan = looks(28, comparisons, True)
    differences: list[float] = []
    for rounds_done in range(1, 29):
        differences.append(rng.gauss(effect, 0.01))
        if decide({"b": differences}, rounds_done, plan):
            break
    if len(differences) < 28:
        found = holm({"b": lambda alpha: wilcoxon_interval(differences, alpha * SHARE)})["b"]
        assert look_at(differences, plan[0][1]).verdict != "inconclusive"
        assert verdict_of(look_at(differences, 0.05).percent, percent_interval(found)) != "inconclusive"


def test_nothing_is_decided_between_looks_or_without_a_baseline() -> None:
    differences = {"b": [0.05 + 0.001 * i for i in range(7)]}
    plan = looks(28, 1, True)
    assert decide(differences, 7, plan) == frozenset()
    assert decide({"b": [*differences["b"], 0.06]}, 8, plan) == {"b"}
    assert decided_variants({"b": []}, None, plan) == frozenset()
    assert decided_variants({"b": []}, "a", plan) == frozenset()


def test_a_variant_is_decided_by_its_own_rounds_and_stays_so() -> None:
    plan = looks(28, 2, True)
    times = {
        "a": rounds_of(range(1, 21), lambda i: 100.0 + i % 3),
        "b": rounds_of(range(1, 13), lambda i: 110.0 + i % 2),
        "c": rounds_of(range(1, 21), lambda i: 90.0 + 20 * (i % 2)),
    }
    assert decided_variants(times, "a", plan) == {"b"}


def test_different_batches_are_decided_by_time_per_sample() -> None:
    times = {"a": rounds_of(range(1, 13), lambda i: 100.0), "b": rounds_of(range(1, 13), lambda i: 200.0)}
    differences = round_differences(times["b"], times["a"], samples_ratio=2.0)
    assert differences == pytest.approx([0.0] * 12)
    assert decided_variants(times, "a", looks(28, 1, True), {"a": 32, "b": 64}) == {"b"}
    assert look_at(differences, 0.05).verdict == "same"


def test_rounds_are_paired_by_launch_and_number() -> None:
    times = [RoundTime("1", 1, 110.0), RoundTime("1", 3, 120.0), RoundTime("2", 1, 100.0)]
    baseline = [RoundTime("1", 1, 100.0), RoundTime("2", 1, 100.0), RoundTime("3", 3, 1.0)]
    assert round_differences(times, baseline) == pytest.approx((np.log(1.1), 0.0))


def test_a_block_takes_as_long_as_its_slowest_rank() -> None:
    assert round_step_ns([[10, 20], [30, 10], [5, 5]]) == 20


def rounds_of(numbers: Iterable[int], step_ns: Callable[[int], float]) -> list[RoundTime]:
    return [RoundTime("1", number, step_ns(number)) for number in numbers]


def test_every_round_holds_each_variant_once_and_the_baseline_twice() -> None:
    blocks = round_blocks(["a", "b", "c"], "b", "run/launch/1")
    assert sorted((block.variant, block.kind) for block in blocks) == [
        ("a", "timed"),
        ("b", "aa"),
        ("b", "timed"),
        ("c", "timed"),
    ]
    assert [block.order for block in blocks] == [0, 1, 2, 3]
    assert blocks == round_blocks(["a", "b", "c"], "b", "run/launch/1")
    assert all(block.kind == "timed" for block in round_blocks(["a", "c"], "b", "x"))


def test_rounds_have_orders_of_their_own_and_every_variant_comes_first_as_often() -> None:
    orders = [round_blocks(["a", "b", "c"], "a", f"run/launch/{i}") for i in range(2000)]
    firsts = [(blocks[0].variant, blocks[0].kind) for blocks in orders]
    for block in (("a", "timed"), ("a", "aa"), ("b", "timed"), ("c", "timed")):
        # Four standard errors of a share of 1/4.
        assert firsts.count(block) / 2000 == pytest.approx(0.25, abs=0.039)


@pytest.mark.parametrize(
    ("steps", "minimum", "steady"),
    [
        ([100] * 10, 10, True),
        ([100] * 9, 5, False),
        ([100] * 10, 11, False),
        ([100] * 5 + [102] * 5, 10, True),
        ([100] * 5 + [103] * 5, 10, False),
        ([100] * 5 + [97] * 5, 10, False),
        ([900, 500, 300, 200, 150] + [100] * 10, 10, True),
        ([150, 140, 130, 120, 110, 105, 104, 103, 102, 101], 10, False),
        ([80, 120, 100, 90, 110, 85, 125, 105, 95, 115], 10, True),
        ([100, 100, 100, 100, 5000, 110, 110, 110, 110, 110], 10, False),
    ],
)
def test_steady(steps: list[int], minimum: int, steady: bool) -> None:
    assert is_steady(steps, minimum) is steady


def test_noise_alone_is_steady_most_of_the_time() -> None:
    rng = np.random.default_rng(5)
    warmups = rng.normal(1e6, 1e5, (1000, 10)).astype(int)
    assert np.mean([is_steady(steps.tolist(), 10) for steps in warmups]) > 0.85


def test_a_block_lasts_at_least_as_long_as_wanted() -> None:
    assert block_steps([900_000_000, *[30_000_000] * 5], 200) == 7
    assert block_steps([50_000_000], 200) == 4
    assert block_steps([500_000_000], 200) == 1
    assert block_steps([0] * 5, 1e-6) == 1
