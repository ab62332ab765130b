"""How often verdicts are wrong, and find what is there, over simulated runs (see `simulate.py`)."""

from typing import Any

import pytest

from tests.unit.stats import simulate
from tests.whole import first


@pytest.mark.parametrize("comparisons", first(1, [3, 1]))
def test_false_alarms_inside_a_launch(comparisons: int) -> None:
    assert simulate.false_alarms_in_a_launch(2000, comparisons, seed=comparisons) <= 0.06


@pytest.mark.parametrize(
    "noise",
    first(
        1,
        [
            simulate.StepNoise(autocorrelation=0.95, sigma=0.05),
            simulate.StepNoise(spike_share=0.1, spike=0.5),
            simulate.StepNoise(drift=0.5, spike_share=0),
        ],
    ),
    ids=["autocorrelated", "spiky", "drifting"],
)
def test_false_alarms_with_worse_noise(noise: Any) -> None:
    assert simulate.false_alarms_in_a_launch(1000, 1, seed=4, noise=noise) <= 0.06


def test_power_inside_a_launch() -> None:
    assert simulate.power_in_a_launch(2000, seed=6) >= 0.95


def share(runs: Any, is_one: Any) -> float:
    found = [bool(is_one(run)) for run in runs]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("effects_percent", "icc", "times"),
    first(1, [((0.0, 0.0), 0.5, 1.0), ((0.0, 0.0, 20.0, 20.0), 0.3, 1.0), ((0.0,) * 4, 0.25, 3.0)]),
    ids=["two", "two ahead of two", "one scatters more"],
)
def test_runs_until_decided_are_rarely_wrong(
    effects_percent: tuple[float, ...], icc: float, times: float
) -> None:
    """5 %, and three standard errors; `benchmarks/RESULTS.md` has the rates of many more runs."""
    model = simulate.Model(effects_percent, 0.10, icc, times=times)
    runs = simulate.runs_until_decided(model, 40, 40, seed=21)
    assert share(runs, lambda run: run.is_false) <= 0.05 + 3 * (0.05 * 0.95 / 40) ** 0.5


def test_a_lead_of_ten_percent_is_found_before_the_budget_is_spent() -> None:
    model = simulate.Model((0.0, *(10.0,) * 7), 0.10, 0.3)
    runs = list(simulate.runs_until_decided(model, 120, 10, seed=22))
    assert share(runs, lambda run: run.fastest == 0) >= 0.9
    assert sum(run.seconds for run in runs) / 10 < 100


def test_wrong_conclusions_of_simulated_runs_are_counted() -> None:
    assert simulate.is_false((0.0, 0.0), 0, ("inconclusive",))
    assert simulate.is_false((0.0, 0.0), None, ("slower",))
    assert simulate.is_false((0.0, 5.0), 1, ("inconclusive",))
    assert not simulate.is_false((0.0, 5.0), 0, ("slower",))
    assert not simulate.is_false((5.0, 0.0, 0.0), None, ("faster", "faster"))


@pytest.mark.parametrize(
    ("effect_percent", "wrong"), first(1, [(3.0, "slower"), (3.0, "not slower"), (0.0, "slower")])
)
def test_a_gate_is_rarely_wrong(effect_percent: float, wrong: str) -> None:
    outcomes = simulate.gate_outcomes(400, effect_percent, seed=23)
    assert outcomes[wrong] <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.parametrize(
    ("effect_percent", "outcome", "least", "most"),
    first(
        2,
        [
            (4.0, "slower", 0.0, 0.01),
            (5.0, "slower", 0.02, 0.08),
            (5.0, "not slower", 0.02, 0.08),
            (6.2, "slower", 0.78, 0.90),  # the smallest difference that such runs see, by the sentence
        ],
    ),
)
def test_a_diff_is_sharp_at_its_threshold(
    effect_percent: float, outcome: str, least: float, most: float
) -> None:
    assert least <= simulate.diff_outcomes(400, effect_percent, seed=26)[outcome] <= most


def test_a_gate_is_mostly_decided_where_nothing_or_much_changed() -> None:
    assert simulate.gate_outcomes(200, 0.0, seed=24)["undecided"] <= 0.2
    assert simulate.gate_outcomes(200, 10.0, seed=25)["slower"] >= 0.8
