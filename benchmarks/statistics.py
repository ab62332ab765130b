"""False-alarm rates and power of the verdicts, by simulation."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks.timing import record, table

SIMULATE = Path(__file__).resolve().parents[1] / "tests" / "unit" / "stats" / "simulate.py"


def main(families: int = 2000) -> None:
    """Writes the section "Statistics"."""
    simulate = load_simulation()
    quiet = simulate.StepNoise(sigma=0.004, spike_share=0)
    rows = [
        *(
            [
                f"inside a launch, early looks, {m} comparison{'s' * (m > 1)}",
                percent(simulate.rates_in_a_launch(families, m, seed=m).false_alarms),
                "≤ 6 %",
            ]
            for m in (1, 3)
        ),
        *(
            [
                f"across launches scattering by 7.6 %, {m} comparison{'s' * (m > 1)}",
                percent(simulate.false_alarms_across_launches(families, m, seed=m)),
                "≤ 6 %",
            ]
            for m in (1, 3)
        ),
        [
            "power at +2 %, scatter of d 2 %, by the last look",
            percent(simulate.power_in_a_launch(families, 6)),
            "≥ 95 %",
        ],
        [
            "found to be the same, quiet steps",
            percent(simulate.rates_in_a_launch(200, 1, 5, noise=quiet).same),
            "",
        ],
    ]
    text = (
        f"{families:,} simulated families of comparisons without a difference: how often at least one gets a "
        "verdict of faster or slower. Steps are autocorrelated (0.7), drift by 10 %, 2 % are spikes.\n\n"
    )
    record("Statistics", text + table(["case", "rate", "goal"], rows))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def load_simulation() -> Any:
    """The simulation that the tests use as well, loaded from its file."""
    spec = importlib.util.spec_from_file_location("gpurun_simulate", SIMULATE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
