"""Do strategies scatter less against each other in one set of processes than in launches of their own?

`python -m benchmarks.verdicts.sharing [LAUNCHES [PAIRS]]` runs pairs of jobs that differ in `steps.together`,
in ABBA order.
"""

import math
import sys
from statistics import fmean
from typing import Any

from benchmarks.timing import concluded, machine_facts, record, table

LAUNCHES = 12
"""That count, of each job."""
ROUNDS = 5
"""Of a launch."""
PAIRS = 2
JOB = """
workload: gpt
params: {layers: 2, width: 64, context: 64}
devices: cpu:2
global_batch: 8
compare: {strategy: [ddp, dp]}
until: fixed
profile: {steps: 0}
"""
TOGETHER, ALONE = "always", "never"
NAMES = {TOGETHER: "in one set of processes", ALONE: "in launches of their own"}


def main(launches: int = LAUNCHES, pairs: int = PAIRS) -> None:
    """Writes the section "One set of processes for several strategies"."""
    facts = machine_facts()
    found: dict[str, list[dict[str, Any]]] = {TOGETHER: [], ALONE: []}
    for number in range(pairs):
        for how in (TOGETHER, ALONE) if number % 2 == 0 else (ALONE, TOGETHER):
            found[how].append(comparison(how, launches))
    rows = [row(NAMES[how], runs, launches) for how, runs in found.items()]
    header = ["dp against ddp", "difference", "SD over launches", "95 % interval", "s per launch"]
    text = (
        f"{pairs} jobs of each kind in ABBA order, each with {launches} launches of {ROUNDS} rounds that "
        "count; their time is that of the whole job.\n\n"
    )
    record("One set of processes for several strategies", text + table(header, rows), facts)


def comparison(how: str, launches: int) -> dict[str, Any]:
    """What a job concludes."""
    sizes = f"steps: {{launches: {launches}, rounds: {launches * ROUNDS}, together: {how}}}\n"
    found, seconds = concluded(JOB + sizes)
    return {**found, "seconds": seconds}


def row(name: str, runs: list[dict[str, Any]], launches: int) -> list[str]:
    """The scatter over all jobs, within each."""
    from scipy.stats import chi2

    by_run = [{one["strategy"]: one for one in run["variants"]} for run in runs]
    shifts = [
        math.log(one["dp"]["step_ms"]["estimate"] / one["ddp"]["step_ms"]["estimate"]) for one in by_run
    ]
    scatters = [run["scatter"]["shared_percent"] or run["scatter"]["apart_percent"] for run in runs]
    degrees, percent = len(runs) * (launches - 1), math.sqrt(fmean(one**2 for one in scatters))
    low, high = (percent * math.sqrt(degrees / chi2.ppf(p, degrees)) for p in (0.975, 0.025))
    seconds = fmean(run["seconds"] for run in runs) / launches
    return [
        name,
        f"{100 * math.expm1(fmean(shifts)):+.1f} %",
        f"{percent:.1f} %",
        f"{low:.1f} to {high:.1f} %",
        f"{seconds:.1f}",
    ]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
