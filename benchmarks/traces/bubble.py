"""Bubbles of pipelines that run on gloo, with stages that sleep, against the formula of their schedule.

Four stages, four micro-batches; a stage's bubble is (stages - 1) forward and backward passes.
Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from benchmarks.timing import machine_facts, record, table
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from tests.integration.parallel import parallel_worker
from tests.integration.ranks import run_ranks

NAP_SCALE = 4
"""Naps of 320 and 240 ms: what messages and Python take is small next to them."""
GOAL = 0.03


def main() -> None:
    """Writes the section "Bubbles of pipelines"."""
    facts = machine_facts()
    os.environ["NAP_SCALE"] = str(NAP_SCALE)
    with tempfile.TemporaryDirectory() as place:
        run_ranks(parallel_worker.__name__, parallel_worker.RANKS, Path(place))
        found = [row for name in ("1f1b", "interleaved") for row in _bubbles(name, Path(place))]
    worst = max(abs(bubble / formula - 1) for *_, bubble, formula in found)
    rows = [
        [name, str(stage), f"{bubble:.1f}", f"{formula:.1f}", f"{bubble / formula - 1:+.1%}"]
        for name, stage, bubble, formula in found
    ]
    text = f"{table(['schedule', 'stage', 'bubble ms', 'formula ms', 'off by'], rows)}\n\n"
    record("Bubbles of pipelines", f"{text}At most {worst:.1%} off (goal: {GOAL:.0%}).", facts)


def _bubbles(name: str, place: Path) -> Iterator[tuple[str, int, float, float]]:
    """Each stage's bubble in ms, as traced and by the formula."""
    ranks = range(parallel_worker.RANKS)
    naps_s = [json.loads((place / name / f"rank{rank}.timed").read_text())["nap"] for rank in ranks]
    formula_ms = 2000 * (len(ranks) - 1) * fmean(nap for rank in naps_s for nap in rank)
    for stage in analyse_paths([place / name]).pipeline:
        yield name, stage.stage, stage.bubble_us / 1000, formula_ms
