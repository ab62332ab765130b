"""How often verdicts are wrong, and how often they find what is there, over simulated runs.

`python -m benchmarks.verdicts.statistics [RUNS [PROCESSES]]` sets the simulated runs of a figure (2000) and
how many processes simulate them (one a core).
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher import compare, stats
from gpurun.launcher.run import budget
from gpurun.launcher.rundir.files import read_json, write_json
from tests.unit.stats import simulate
from tests.unit.stats.simulate import (
    OUTCOMES,
    Ended,
    Model,
    false_alarms_in_a_launch,
    gate_outcomes,
    pooled_false_alarms,
    runs_until_decided,
)

SEED = 20261122
"""Of the table. Nothing was chosen by runs with it."""
BUDGET_S = 180
RIVALS, SCATTERS, ICCS = (1, 3, 7), (0.02, 0.10, 0.18), (0.0, 0.25, 0.5)
EIGHT = 8


def main(runs: int = 2000, processes: int | None = None) -> None:
    """Writes the section "Statistics"."""
    facts = machine_facts()
    with ProcessPoolExecutor(processes or os.cpu_count()) as workers:
        simulated = partial(_simulated, runs, workers)
        text = "\n\n".join(
            (
                f"{runs:,} simulated runs per figure. "
                "Model: d(variant, launch, round) = δ + u(launch) + e(round) for the logarithm of a "
                "variant's step over another's, ICC = var(u) / (var(u) + var(e)), 6.5 s for a launch of all "
                f"variants with 5 rounds, of which 1.3 s don't depend on rounds, budget {BUDGET_S} s. "
                "What is measured next (variants, rounds, when to look, when to end) and all verdicts are "
                "decided by the launcher's own functions; nothing in it was chosen with these seeds.",
                false_alarms(simulated),
                false_fastest(simulated),
                power(simulated),
                gates(runs),
                rounds_of_a_launch(runs),
            )
        )
    record("Statistics", text, facts)


def false_alarms(simulated: Any) -> str:
    """Runs without any difference."""
    cells = list(product(RIVALS, SCATTERS, ICCS))
    models = [Model((0.0,) * (rivals + 1), scatter, icc) for rivals, scatter, icc in cells]
    models += [Model((0.0,) * (rivals + 1), 0.10, 0.25, times=3) for rivals in RIVALS]
    rates = [fmean(run.is_false for run in runs) for runs in simulated(models, BUDGET_S)]
    found = dict(zip(cells, rates, strict=False))
    rows = [
        [f"{rivals}", f"{100 * scatter:.0f} %", *(percent(found[rivals, scatter, icc]) for icc in ICCS)]
        for rivals, scatter in product(RIVALS, SCATTERS)
    ]
    rows += [
        [f"{rivals}", "10 %, of one variant 30 %", "", percent(rate), ""]
        for rivals, rate in zip(RIVALS, rates[len(cells) :], strict=True)
    ]
    pooled = percent(pooled_false_alarms(20_000, SEED))
    return (
        "**False alarms**: runs without a difference that name a fastest variant, or call any one slower or "
        "faster than the baseline. Goal: ≤ 6 % each, ≤ 5 % on average; "
        f"the average is {percent(fmean(rates))}.\n\n"
        + table(["rivals", "scatter of d", *(f"ICC {icc:g}" for icc in ICCS)], rows)
        + "\n\nEvery comparison has its own scatter. If that of all variants were pooled, 7 rivals of which "
        f"one scatters three times as much would have {pooled}."
    )


def false_fastest(simulated: Any) -> str:
    """Several equal ones among eight, the others 10 % slower."""
    orders = [
        (f"{tied} of 8 equal, {which}", ((0.0,) * tied, (10.0,) * (EIGHT - tied)), is_first)
        for tied, which, is_first in (
            (2, "the baseline one of them", True),
            (2, "the baseline slower", False),
            (3, "the baseline one of them", True),
            (4, "the baseline one of them", True),
        )
    ]
    models = [
        Model(fast + slow if is_first else (slow[0], *fast, *slow[1:]), 0.10, 0.3)
        for _, (fast, slow), is_first in orders
    ]
    rows = [
        [name, percent(fmean(run.fastest is not None for run in runs)), "≤ 5 %"]
        for (name, _, _), runs in zip(orders, simulated(models, BUDGET_S), strict=True)
    ]
    return '**False "Fastest"** (scatter of d 10 %, ICC 0.3)\n\n' + table(["case", "named", "goal"], rows)


def power(simulated: Any) -> str:
    """How often, and how soon, a run finds what is there."""
    tenfold = (0.0, *(10.0,) * (EIGHT - 1))
    shared, apart = (0.10, 0.3), 2**0.5
    cases = [
        ("eight splits, seven 10 % slower: fastest named", Model(tenfold, *shared), 120, "≥ 90 %", _names),
        (
            "eight splits, one 10 % slower: its verdict",
            Model((0.0, 10.0, *(0.0,) * (EIGHT - 2)), *shared),
            120,
            "≥ 90 %",
            _calls_the_second_slower,
        ),
    ]
    for count, effect, scatter, goal in (
        (2, 10.0, 0.10, "≥ 80 %"),
        (2, 5.0, 0.05, "≥ 80 %"),
        (3, 10.0, 0.10, ""),
        (3, 5.0, 0.05, ""),
    ):
        model = Model((0.0, *(effect,) * (count - 1)), scatter * apart, 1.0, apart=True)
        name = (
            f"{count} strategies, +{effect:.0f} %, launches scatter by {100 * scatter:.0f} %: fastest named"
        )
        cases.append((name, model, 300, goal, _names))
    rows = []
    for name, model, budget_s, goal, is_found in cases:
        (runs,) = simulated([model], budget_s)
        seconds = f"{fmean(run.seconds for run in runs):.0f} s of {budget_s}"
        rows.append([name, percent(fmean(map(is_found, runs))), goal, seconds])
    return "**Power** (10 % scatter of d and ICC 0.3 where splits share launches)\n\n" + table(
        ["case", "found", "goal", "time, mean"], rows
    )


def _names(run: Any) -> bool:
    return bool(run.fastest == 0)


def _calls_the_second_slower(run: Any) -> bool:
    return bool(run.verdicts[0] == "slower")


def gates(runs: int) -> str:
    """Two versions in one session, 10 % apart from what other sessions would show."""
    effects = (0, 1, 3, 5, 10)
    cases = [(effect, gate_outcomes(runs, effect, SEED + effect)) for effect in effects]
    goals = {0: "undecided ≤ 20 %", 3: "slower ≤ 5 %, not slower ≤ 5 %", 10: "undecided ≤ 20 %"}
    rows = [
        [f"+{effect} %", *(percent(outcomes[name]) for name in OUTCOMES), goals.get(effect, "")]
        for effect, outcomes in cases
    ]
    return (
        "**Gate** at 3 %: one variant, launches of 5 s that scatter by 5 %, sessions by 10 %, ABBA until "
        "decided, at most 10 minutes\n\n" + table(["true difference", *OUTCOMES, "goal"], rows)
    )


def rounds_of_a_launch(runs: int) -> str:
    """What a single launch says of itself."""
    rows = [
        [
            f"no difference, {rivals} rival{'s' * (rivals > 1)}",
            percent(false_alarms_in_a_launch(runs, rivals, SEED + rivals)),
            "≤ 6 %",
        ]
        for rivals in (1, 3)
    ]
    return (
        "**Within one launch** of 28 rounds: steps are autocorrelated (0.7), drift by 10 %, 2 % are "
        "spikes\n\n" + table(["case", "faster or slower", "goal"], rows)
    )


def _simulated(
    runs: int, workers: ProcessPoolExecutor, models: Sequence[Any], budget_s: float
) -> list[list[Any]]:
    """Runs of every model, each with seeds of its own."""
    parts = 8
    jobs = [
        (model, budget_s, runs // parts, (SEED, round(budget_s), position, part))
        for position, model in enumerate(models)
        for part in range(parts)
    ]
    found = list(workers.map(_runs, jobs))
    return [_joined(found[first : first + parts]) for first in range(0, len(found), parts)]


def _runs(job: tuple[Any, float, int, tuple[int, ...]]) -> list[Ended]:
    """Simulated once for the same code: a table takes over an hour, so it may be made in parts."""
    kept = Path(tempfile.gettempdir()) / f"gpurun-simulated-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    path = kept / f"{sha256(f'{code_digest()} {job}'.encode()).hexdigest()}.json"
    if not path.exists():
        write_json(path, list(runs_until_decided(*job)))
    return read_json(path, list[Ended])


@cache
def code_digest() -> str:
    """Of all code that decides, and of the simulation itself."""
    files = [Path(simulate.__file__), Path(budget.__file__)]
    files += [file for part in (stats, compare) for file in Path(part.__path__[0]).rglob("*.py")]
    return sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _joined(parts: Iterable[list[Any]]) -> list[Any]:
    return [simulated_run for part in parts for simulated_run in part]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
