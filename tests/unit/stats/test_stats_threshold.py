"""Outcomes against a threshold: of pairs of launches, and of two runs."""

import random
from statistics import fmean

import pytest
import scipy.stats

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import Estimate, bounded, launches_to_decide, paired, unpaired
from tests.known import known


def noise(deviation: float, num: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    values = [rng.gauss(0, deviation) for _ in range(num)]
    return [value - fmean(values) for value in values]


@pytest.mark.parametrize(
    ("shift", "outcome"), [(0.1, "slower"), (0.0, "not slower"), (-0.1, "not slower"), (0.03, "undecided")]
)
def test_three_outcomes(shift: float, outcome: str) -> None:
    differences = [shift + one for one in noise(0.01, 12, 3)]
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
    found = paired([0.03 + one for one in noise(0.02, 10, 4)])
    one, eight = bounded(found, 3.0), bounded(found, 3.0, num_variants=8)
    assert known(eight.ci)[0] < known(one.ci)[0]
    assert known(eight.ci)[1] == known(one.ci)[1]


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
