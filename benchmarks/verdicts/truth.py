"""Correctness of the explanation: known faults in real runs, their cause, rank and size against the report's.

The faults are those of `tests/truth`; sizes, splits and ranks are drawn from a seed. `python -m
benchmarks.verdicts.truth SEED` uses another one; with `SEED SERIES` it runs fewer series, of which
1 is enough to try it out.
"""

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import machine_facts, record, table
from tests.truth.plan import FAULTS, SIZE_MS, STEP_MS, WORLD_SIZES, slow_device
from tests.truth.sessions import draw_session, run_session, shuffled
from tests.truth.verdict import BOUND, Verdict, confusion, verdicts

SEED = 2026
NUM_SERIES = 15
"""Of each number of ranks; a series has every fault once."""
NUM_CAPTURES = 2
"""Of each run, some ten seconds apart: other load lasts longer than a capture."""
GOAL = 0.99
TIMEOUT_S = 1800


def main(seed: int = SEED, series: int = NUM_SERIES) -> None:
    """Writes the section "Truth"."""
    facts, start = f"{machine_facts()} when the runs began", time.monotonic()
    found = [verdict for ranks in WORLD_SIZES for verdict in session_verdicts(seed, ranks, series)]
    record("Truth", text(found, seed, time.monotonic() - start), facts)


def session_verdicts(seed: int, ranks: int, series: int) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as name:
        session = draw_session(Path(name), seed, ranks, shuffled(seed + ranks, series), NUM_CAPTURES)
        if ranks == len(slow_device().cases[0].split):
            session = replace(session, series=(*session.series, slow_device()))
        run_session(session, TIMEOUT_S)
        return verdicts(session)


def text(found: Sequence[Verdict], seed: int, wall_s: float) -> str:
    right = sum(verdict.right for verdict in found)
    wrong = [verdict for verdict in found if not verdict.right]
    parts = [
        f"{len(found)} runs on 2 and 3 gloo ranks (seed {seed}, {wall_s / 60:.1f} min), each with one fault "
        f"of {SIZE_MS[0]:g} to {SIZE_MS[1]:g} ms in steps of {STEP_MS[0]:g} to {STEP_MS[1]:g} ms, or none; "
        "one more has 17/15 samples and a device that takes three times as long for each. "
        f"Each was captured {NUM_CAPTURES} times; the capture in which all ranks together were busy least "
        f"counts, whatever it shows. The injected size is what the ranks took for it by their own clocks. "
        f"Cause, ranks and size (±{BOUND:.0%}) are right in {right}, {right / len(found):.1%} "
        f"(goal: {GOAL:.0%}). A row is an injected cause, a column what the report named.",
        table(["injected", *FAULTS], confusion(found)),
        "Reported size against injected size, of the runs whose cause is right:",
        table(["cause", "runs", "all right", "median error", "largest error"], list(size_rows(found))),
        "\n".join(["Wrong:", *(f"- {verdict}" for verdict in wrong)]) if wrong else "None is wrong.",
    ]
    return "\n\n".join(parts)


def size_rows(found: Sequence[Verdict]) -> Iterable[Sequence[str]]:
    for fault in FAULTS:
        runs = [verdict for verdict in found if verdict.case.fault == fault]
        errors = sorted(abs(v.size_error) for v in runs if v.reported == fault and fault != "none")
        sizes = [f"{errors[len(errors) // 2]:.1%}", f"{errors[-1]:.1%}"] if errors else ["", ""]
        yield [fault, str(len(runs)), str(sum(verdict.right for verdict in runs)), *sizes]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
