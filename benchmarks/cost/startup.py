"""Start-up time of the commands that never import torch."""

import compileall
import statistics
from pathlib import Path

from benchmarks.timing import BIN, in_turn, record, table, wall_s

ROOT = Path(__file__).resolve().parents[2]


def main(runs: int = 7) -> None:
    """Writes the section "Start-up"."""
    for package in ("launcher", "workloads"):  # as a first run does, where PYTHONDONTWRITEBYTECODE isn't set
        compileall.compile_dir(ROOT / package, quiet=1)
    gpurun = str(BIN / "gpurun")
    commands = {
        "gpurun --help": [gpurun, "--help"],
        "gpurun check examples/quickstart.yaml": [gpurun, "check", "examples/quickstart.yaml"],
        "python -c pass": [str(BIN / "python"), "-c", "pass"],
        "python -c 'import torch'": [str(BIN / "python"), "-c", "import torch"],
    }
    figures = in_turn({name: lambda a=argv: wall_s(a, ROOT) for name, argv in commands.items()}, runs)  # type: ignore[misc]
    rows = [
        [name, f"{statistics.median(values):.2f}", "≤ 0.3" if "gpurun" in name else ""]
        for name, values in figures.items()
    ]
    record(
        "Start-up",
        f"Seconds, medians of {runs} alternating runs.\n\n" + table(["command", "s", "goal"], rows),
    )
