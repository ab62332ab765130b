"""The seven networks of Shi et al. 2016 on this machine, beside the published times.

`python -m benchmarks.shi2016 [RUN]`: of a run of `examples/shi2016.yaml` that is there, else of a new one.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import machine_facts, record, wall_s

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "shi2016.yaml"
GPURUN = (sys.executable, "-m", "gpurun")


def main(run: Path | None = None) -> None:
    """Writes the section "Shi et al. 2016"."""
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "run"
            wall_s([*GPURUN, str(EXAMPLE), "--out", str(run)], Path(folder))
        argv = [*GPURUN, "report", str(run), "--format", "shi2016"]
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    record("Shi et al. 2016", f"```\n{told.rstrip()}\n```", facts)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
