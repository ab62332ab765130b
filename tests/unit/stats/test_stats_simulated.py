"""How often verdicts are wrong, and find what is there, over simulated runs (see `simulate.py`)."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.known import known


def load_simulation() -> Any:
    """`simulate.py`, which is next to this file and in no package; benchmarks load it the same way."""
    path = Path(__file__).with_name("simulate.py")
    spec = known(importlib.util.spec_from_file_location("gpurun_simulate", path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    known(spec.loader).exec_module(module)
    return module


simulate = load_simulation()


@pytest.mark.parametrize("comparisons", [1, 3])
def test_false_alarms_inside_a_launch_with_early_looks(comparisons: int) -> None:
    assert simulate.rates_in_a_launch(2000, comparisons, seed=comparisons).false_alarms <= 0.06


def test_false_alarms_of_all_looks_together() -> None:
    assert simulate.false_alarms_of_looks(2000, seed=2) <= 0.06


def test_false_alarms_inside_a_launch_with_one_look() -> None:
    assert simulate.rates_in_a_launch(2000, 1, seed=3, early_stop=False).false_alarms <= 0.06


@pytest.mark.parametrize(
    "noise",
    [
        simulate.StepNoise(autocorrelation=0.95, sigma=0.05),
        simulate.StepNoise(spike_share=0.1, spike=0.5),
        simulate.StepNoise(drift=0.5, spike_share=0),
    ],
    ids=["autocorrelated", "spiky", "drifting"],
)
def test_false_alarms_with_worse_noise(noise: Any) -> None:
    assert simulate.rates_in_a_launch(1000, 1, seed=4, noise=noise).false_alarms <= 0.06


def test_quiet_steps_are_found_to_be_the_same_early() -> None:
    rates = simulate.rates_in_a_launch(200, 1, seed=5, noise=simulate.StepNoise(sigma=0.004, spike_share=0))
    assert rates.same > 0.95
    assert rates.mean_rounds < 14


def test_power_by_the_last_look() -> None:
    assert simulate.power_in_a_launch(2000, seed=6) >= 0.95
