"""The seven networks of Shi et al. 2016 on this machine, next to the published times.

`python -m benchmarks shi2016` measures them and writes their section of `RESULTS.md`.
`python -m benchmarks.shi2016 [RUN…]` shows the published times, next to those of runs of
`examples/shi2016*.yaml`.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shi2016.report import ours_of_runs, render_published
from benchmarks.timing import machine_facts, record, wall_s

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shi2016.yaml"


def main() -> None:
    """Measures the networks, some minutes, and writes the section "Shi et al. 2016"."""
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        wall_s([sys.executable, "-m", "gpurun", str(EXAMPLE), "--out", str(run)], Path(directory))
        record_runs([run], facts)


def record_runs(runs: Sequence[Path], facts: str | None = None) -> None:
    """Prints and writes the section of these runs; `facts`: of the machine, when they were measured."""
    record("Shi et al. 2016", f"```\n{render_published(ours_of_runs(runs)).rstrip()}\n```", facts)
