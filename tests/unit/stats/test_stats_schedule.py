"""Verdicts, pairs of rounds, and the schedule of a launch."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.figures.recorded import MeasuredVariant, round_times
from gpurun.launcher.compare.ranking import Differences
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.core_waiting import RoundKey
from gpurun.launcher.stats.estimates import (
    Family,
    Verdict,
    percent_from_log,
    percent_interval,
    verdict_of,
)
from gpurun.launcher.stats.schedule import (
    NEXT_WINDOW_STEPS,
    WINDOW_STEPS,
    block_steps,
    shuffled,
)
from gpurun.launcher.stats.warmup import is_steady


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


def differences_of_rounds(
    rounds: Mapping[RoundKey, float], others: Mapping[RoundKey, float], batches: tuple[int, int] = (1, 1)
) -> dict[RoundKey, float]:
    records = {
        name: cast(
            "MeasuredVariant",
            SimpleNamespace(
                variant=SimpleNamespace(global_batch=batch),
                logs={0: {key: np.log(ns) for key, ns in found.items()}},
            ),
        )
        for name, found, batch in zip("ab", (rounds, others), batches, strict=True)
    }
    return Differences(records, "b", Family({}), {}, "round").paired_rounds("a", "b")


def test_different_batches_are_compared_by_time_per_sample() -> None:
    keys = [("1", number) for number in range(1, 13)]
    found = differences_of_rounds(dict.fromkeys(keys, 200.0), dict.fromkeys(keys, 100.0), (32, 16))
    assert found == pytest.approx(dict.fromkeys(keys, 0.0))


def test_a_block_takes_as_long_as_its_slowest_rank() -> None:
    blocks = enumerate([[10, 20], [30, 10], [5, 5]])
    steps = {
        rank: [StepRecord("1", 1, 0, number, "timed", ns, {}, None) for number, ns in enumerate(block)]
        for rank, block in blocks
    }
    assert [time.step_ns for time in round_times(steps, 3, "timed")] == [20]


def test_rounds_are_paired_by_launch_and_number() -> None:
    times = {("1", 1): 110.0, ("1", 3): 120.0, ("2", 1): 100.0}
    baseline = {("1", 1): 100.0, ("2", 1): 100.0, ("3", 3): 1.0}
    found = differences_of_rounds(times, baseline)
    assert found == pytest.approx({("1", 1): np.log(1.1), ("2", 1): 0.0})


def test_rounds_have_orders_of_their_own_and_every_variant_comes_first_as_often() -> None:
    orders = [shuffled("abcd", f"run/launch/{i}") for i in range(2000)]
    assert {tuple(sorted(order)) for order in orders} == {tuple("abcd")}
    assert orders[1] == shuffled("abcd", "run/launch/1")
    firsts = [order[0] for order in orders]
    for variant in "abcd":
        # Four standard errors of a share of 1/4.
        assert firsts.count(variant) / 2000 == pytest.approx(0.25, abs=0.039)


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
        ([55, 200] * 5, 10, True),  # the steps of two DataLoader workers take turns
        ([80, 80, 80, 200] * 3, 10, True),
    ],
)
def test_steady(steps: list[int], minimum: int, steady: bool) -> None:
    assert is_steady(steps, minimum) is steady


def test_noise_alone_is_steady_most_of_the_time() -> None:
    rng = np.random.default_rng(5)
    for window in (WINDOW_STEPS, NEXT_WINDOW_STEPS):
        warmups = rng.normal(1e6, 1e5, (1000, 2 * window)).astype(int)
        assert np.mean([is_steady(steps.tolist(), 0, window) for steps in warmups]) > 0.85
        assert is_steady([55, 200] * window, 0, window)


def test_a_block_lasts_at_least_as_long_as_wanted() -> None:
    assert block_steps([900_000_000, *[30_000_000] * 5], 200) == 7
    assert block_steps([50_000_000], 200) == 4
    assert block_steps([500_000_000], 200) == 1
    assert block_steps([0] * 5, 1e-6) == 1
