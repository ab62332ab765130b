"""Does `gpurun tune` find what an exhaustive measurement would? On costs that are known, in virtual time.

Each draw has 240 combinations of four keys, whose values change the step by some 15 %, with an interaction of
two of the keys and a deviation of each combination's own. Steps scatter by 4 %, trials by 1 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.timing import record, table
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
    first, other = rng.choice(len(SHAPE), 2, replace=False)
    times += rng.normal(0, 0.1, (SHAPE[first], SHAPE[other]))[levels[:, first], levels[:, other]]
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
    close = sum(outcome.behind_percent <= MOST_BEHIND for outcome in outcomes)
    kept = sum(outcome.is_bound_kept for outcome in outcomes)
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
    values = [getattr(outcome, name) for outcome in outcomes]
    return f"{median(values):.3g}{unit} ({max(values):.3g}{unit})"
