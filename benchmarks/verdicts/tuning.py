"""Does `gpurun tune` find what an exhaustive measurement would? On costs that are known, in virtual time.

Each draw has 240 combinations of four keys, whose values change the step by some 15 %, with an interaction of
two of the keys and a deviation of each combination's own. Steps scatter by 4 %, trials by 1 %.

`python -m benchmarks.verdicts.tuning --real` searches 48 combinations of a real model, and measures them all;
`--examples` runs the two examples of comparing and of searching settings, which have their own goals of time.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.timing import concluded, machine_facts, record, table
from gpurun.launcher.search.policy import Search, Trial
from gpurun.launcher.search.tune import FIRST_STEPS, MEDIAN_VARIANCE

SHAPE = (5, 4, 4, 3)
STEP_S = 0.05
REBUILD_S = 0.3
"""Between what DDP and FSDP2 take on two CPU devices."""
WARMUP_STEPS, TIMED_STEPS = 5, 60
"""Of the exhaustive measurement, and of each of those compared in the end."""
TRIAL_WARMUP_STEPS = 3
STEP_SCATTER, TRIAL_SCATTER, OWN_DEVIATION = 0.04, 0.01, 0.01
NUM_DRAWS = 20
"""With seeds on which nothing was tuned."""
MOST_BEHIND, MOST_TIME, LEAST_FOUND = 2.0, 15.0, 19


@dataclass(frozen=True)
class Outcome:
    """What one search came to."""

    behind_percent: float
    """The best one found, compared with the best there is."""
    time_percent: float
    """Of what the exhaustive measurement takes."""
    tried: int
    at_most_missed_percent: float
    is_bound_kept: bool


def draw(seed: int) -> Outcome:
    """A search on costs drawn with this seed."""
    rng = np.random.default_rng(seed)
    levels = np.array(list(np.ndindex(*SHAPE)))
    times = math.log(STEP_S) + rng.normal(0, OWN_DEVIATION, len(levels))
    for key, size in enumerate(SHAPE):
        times += rng.normal(0, 0.15, size)[levels[:, key]]
    one, other = rng.choice(len(SHAPE), 2, replace=False)
    times += rng.normal(0, 0.1, (SHAPE[one], SHAPE[other]))[levels[:, one], levels[:, other]]
    step_s = np.exp(times)
    whole_s = REBUILD_S + (WARMUP_STEPS + TIMED_STEPS) * step_s
    own = int(rng.integers(len(levels)))
    search, trials = Search(levels, first=(own,)), list[Trial]()
    while (batch := search.next_batch(trials, float(whole_s.sum()))) is not None:
        steps = FIRST_STEPS * 2 ** (batch.number - 1)
        for chosen in batch.combinations:
            found = (
                times[chosen] + rng.normal(0, TRIAL_SCATTER) + np.median(rng.normal(0, STEP_SCATTER, steps))
            )
            seconds = REBUILD_S + (TRIAL_WARMUP_STEPS + steps) * step_s[chosen]
            trials.append(
                Trial(chosen, float(found), MEDIAN_VARIANCE * STEP_SCATTER**2 / steps, float(seconds))
            )
    result = search.found(trials)
    assert result is not None
    assert result.missed is not None
    compared = list(dict.fromkeys((*result.finalists, own)))
    best = min(
        compared, key=lambda chosen: times[chosen] + rng.normal(0, STEP_SCATTER / math.sqrt(TIMED_STEPS))
    )
    spent_s = sum(trial.seconds for trial in trials) + float(whole_s[compared].sum())
    fastest = min(times[list(result.finalists)])
    return Outcome(
        behind_percent=100 * (math.exp(times[best] - times.min()) - 1),
        time_percent=100 * spent_s / float(whole_s.sum()),
        tried=len({trial.combination for trial in trials}),
        at_most_missed_percent=100 * (1 - math.exp(-result.missed)),
        is_bound_kept=bool(fastest - times.min() <= result.missed + 1e-9),
    )


def main() -> None:
    """Writes what the draws come to."""
    outcomes = [draw(seed) for seed in range(NUM_DRAWS)]
    close = sum(one.behind_percent <= MOST_BEHIND for one in outcomes)
    kept = sum(one.is_bound_kept for one in outcomes)
    rows = [
        [f"best found within {MOST_BEHIND:g} % of the best", f"{close} of {NUM_DRAWS}", f"≥ {LEAST_FOUND}"],
        ["time, of the exhaustive measurement's", spread(outcomes, "time_percent"), f"≤ {MOST_TIME:g} %"],
        ["best found behind the best", spread(outcomes, "behind_percent"), ""],
        ["combinations tried", spread(outcomes, "tried", unit=""), ""],
        ["what could have been missed held", f"{kept} of {NUM_DRAWS}", f"≥ {LEAST_FOUND}"],
    ]
    about = " ".join((__doc__ or "").split("\n\n")[1].split())
    record("Tuning", f"{about}\n\n{table(['over 20 draws', 'median (most)', 'goal'], rows)}")


def spread(outcomes: Sequence[Outcome], name: str, unit: str = " %") -> str:
    """`4.0 % (7.3 %)`: the median, and the most."""
    values = [getattr(one, name) for one in outcomes]
    return f"{median(values):.3g}{unit} ({max(values):.3g}{unit})"


JOB = """
name: tuning
workload: gpt
params: {layers: 2, width: 64, heads: 2, context: 64}
devices: cpu:2
global_batch: 8
gradient_check: false
profile: {steps: 0}
compare:
  strategy: [ddp, zero1]
  split: [even, [5, 3], "3:1"]
  accumulate: [1, 2]
  bucket_mb: [25, 1]
  gradient_as_bucket_view: [false, true]
"""
BUDGET = "3m"
EXHAUSTIVE = ("steps.launches=2", "steps.rounds=6", "until=fixed")
AGAIN = ("steps.launches=10", "steps.rounds=6", "until=fixed")
MOST_ABOVE = 3.0


def real() -> None:
    """Writes what a search of a real model finds, next to what measuring all of its combinations finds."""
    facts = machine_facts()
    tuned, tuned_s = ended("tune", "--budget", BUDGET)
    whole, whole_s = ended(*(word for one in EXHAUSTIVE for word in ("--set", one)))
    times = {one["id"]: one["step_ms"] for one in whole["variants"] if one["step_ms"]}
    search, fastest = tuned["search"], min(times, key=lambda one: times[one]["estimate"])
    best = search["best"]
    again = {best: times[best], fastest: times[best]} if best == fastest else duel(whole, best, fastest)
    above = 100 * (again[best]["estimate"] / again[fastest]["estimate"] - 1)
    rows = [
        ["combinations tried", f"{search['tried']}", f"{len(times)}"],
        ["wall time", f"{tuned_s:.0f} s", f"{whole_s:.0f} s"],
        ["best", named(tuned, best), named(whole, fastest)],
        ["its step in the exhaustive run", step_text(times[best]), step_text(times[fastest])],
        ["its step when both are measured again", step_text(again[best]), step_text(again[fastest])],
        [f"then above the best of the exhaustive run, at most {MOST_ABOVE:g} %", f"{above:.1f} %", ""],
        ["said: at most missed", f"{search['at_most_missed_percent']:.1f} %", ""],
    ]
    about = (
        f"`gpurun tune --budget {BUDGET}` of the job below, and all of its combinations by "
        f"`gpurun --set {' --set '.join(EXHAUSTIVE)}`. Steps have their 95 % intervals. The fastest of "
        "48 figures is too small by chance; therefore both are measured once more, by "
        f"`gpurun --set {' --set '.join(AGAIN)}`."
    )
    text = f"{about}\n\n{table(['', 'search', 'exhaustive'], rows)}\n\n```yaml\n{JOB.strip()}\n```"
    record("Tuning a real model", text, facts)


def duel(whole: dict[str, Any], *wanted: str) -> dict[str, Any]:
    """The step times of these variants in a run of their own."""
    variants = {one["id"]: one for one in whole["variants"] if one["id"] in wanted}
    settings = {
        key: {"strategy": one["strategy"], "split": one["split"], **one["varied"]}
        for key, one in variants.items()
    }
    values: dict[str, list[Any]] = {}
    for each in settings.values():
        for name, value in each.items():
            values.setdefault(name, [])
            values[name] += [] if value in values[name] else [value]
    lists = [f"compare.{name}={json.dumps(each)}" for name, each in values.items()]
    again, _ = ended(*(word for one in (*AGAIN, *lists) for word in ("--set", one)))
    return {
        key: one["step_ms"]
        for key, each in settings.items()
        for one in again["variants"]
        if {"strategy": one["strategy"], "split": one["split"], **one["varied"]}.items() <= each.items()
    }


EXAMPLES = Path(__file__).parents[2] / "examples"


def examples() -> None:
    """Writes how long the examples of strategies and of tuning take."""
    facts = machine_facts()
    compared, compared_s = ended(job=(EXAMPLES / "strategies.yaml").read_text())
    tuned, tuned_s = ended("tune", "--budget", "10m", job=(EXAMPLES / "tune.yaml").read_text())
    search = tuned["search"]
    missed = search["at_most_missed_percent"]
    rows = [
        [
            "`gpurun examples/strategies.yaml`",
            f"{len(compared['variants'])} compared",
            f"{compared_s:.0f}",
            "180",
        ],
        [
            "`gpurun tune examples/tune.yaml --budget 10m`",
            f"{search['distinct']} searched, {search['tried']} tried; at most {missed:.1f} % missed",
            f"{tuned_s:.0f}",
            "600",
        ],
    ]
    record("Examples of strategies", table(["command", "combinations", "s", "goal"], rows), facts)


def ended(*words: str, job: str = JOB) -> tuple[dict[str, Any], float]:
    """What `gpurun` concludes of the job, and the seconds that it takes."""
    command = [word for word in words if word == "tune"]
    return concluded(job, *(word for word in words if word != "tune"), command=command)


def named(comparison: dict[str, Any], variant: str) -> str:
    """`ddp even accumulate=2 …`."""
    one = next(one for one in comparison["variants"] if one["id"] == variant)
    varied = (f"{key}={value}" for key, value in one["varied"].items())
    return " ".join((one["strategy"], one["split_name"], *varied))


def step_text(step_ms: dict[str, Any]) -> str:
    """`41.2 ms (39.0 to 43.1)`."""
    low, high = step_ms["ci"] or (math.nan, math.nan)
    return f"{step_ms['estimate']:.1f} ms ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    {"": main, "--real": real, "--examples": examples}[" ".join(sys.argv[1:])]()
