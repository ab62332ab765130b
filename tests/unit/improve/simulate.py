"""Simulated searches for improvements: how often something is kept that doesn't help, and intervals miss."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gpurun.launcher.rundir.improvement import Improvement
from gpurun.launcher.units import Interval
from tests.unit.improve.stand_in import StandIn, searched

SCATTERS = (0.01, 0.03, 0.10)
"""Of the logarithm of a launch's time."""
BUDGETS_S = (90.0, 300.0, 900.0)


@dataclass(frozen=True)
class Simulated:
    """What a search has kept."""

    kept: tuple[str, ...]
    covers: bool
    """Whether every interval that it states contains what is true, the gain and all kept remedies."""


def simulated(number: int, seed: int, times: Mapping[str, float], directory: Path) -> Simulated:
    """A search with drawn times.

    Args:
        number: of the search, which chooses scatter and budget.
        seed: of all searches.
        times: the factors by which remedies change a step; of others 1.
        directory: for the program.
    """
    scatter, budget_s = SCATTERS[number % 3], BUDGETS_S[number // 3 % 3]
    program = StandIn(times, scatter=scatter, rng=Random(f"{seed}/{number}"))
    found = searched(program, directory, budget_s)
    return Simulated(tuple(each.code for each in found.kept), all(covered(found, program)))


def covered(found: Improvement, program: StandIn) -> Iterator[bool]:
    """Of every interval that is stated, whether it contains the true change."""
    stated: list[tuple[Interval | None, tuple[str, ...]]]
    stated = [(each.ci, (each.code,)) for each in found.kept]
    if found.gain is not None:
        stated.append((found.gain.ci, tuple(each.code for each in found.kept)))
    for ci, codes in stated:
        true = 100 * (program.ms(codes) / program.ms(()) - 1)
        yield ci is not None and ci[0] <= true <= ci[1]


def searches(num: int, seed: int, times: Mapping[str, float]) -> list[Simulated]:
    """So many."""
    with tempfile.TemporaryDirectory() as directory:
        return [simulated(number, seed, times, Path(directory)) for number in range(num)]
