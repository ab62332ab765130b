"""Times whole commands in turn, and writes the results."""

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from gpurun.launcher.stats.estimates import hodges_lehmann, wilcoxon_interval

K = TypeVar("K")
T = TypeVar("T")
RESULTS = Path(__file__).with_name("RESULTS.md")
BIN = Path(sys.executable).parent


def output(argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it failed; with all that it said.
    """
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def wall_s(argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> float:
    """Seconds that a command takes."""
    start = time.perf_counter()
    output(argv, cwd, env)
    return time.perf_counter() - start


def in_turn(commands: Mapping[K, Callable[[], T]], runs: int, uncounted: int = 1) -> dict[K, list[T]]:
    """Figures of all commands, run alternately (A B, B A, …) after so many uncounted runs each."""
    figures: dict[K, list[T]] = {name: [] for name in commands}
    for run in range(uncounted + runs):
        order = list(commands) if run % 2 == 0 else list(commands)[::-1]
        for name in order:
            figures[name].append(commands[name]())
    return {name: found[uncounted:] for name, found in figures.items()}


def centre_and_interval(differences: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Hodges and Lehmann's estimate, and Wilcoxon's exact interval of 95 %."""
    centre, interval = hodges_lehmann(differences), wilcoxon_interval(differences, 0.05)
    assert centre is not None
    assert interval is not None
    return centre, interval


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine_facts() -> str:
    """Date, machine, versions and load, now: long benchmarks call it before they begin."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "CPU")
    return (
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {os.cpu_count()} × {cpu}, "
        f"Python {platform.python_version()}, torch {version('torch')}, load {os.getloadavg()[0]:.1f}"
    )


def record(title: str, text: str, facts: str | None = None) -> None:
    """Prints a benchmark's result, and replaces its section in `RESULTS.md`.

    Args:
        title: of the section.
        text: the result.
        facts: `machine_facts()` from before the benchmark, whose own work would count as load.
    """
    section = f"## {title}\n\n{facts or machine_facts()}\n\n{text.strip()}\n"
    print(section)
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    head, *sections = old.split("\n## ")
    kept = [s for s in sections if not s.startswith(f"{title}\n")]
    body = "\n".join([*(f"## {s.rstrip()}\n" for s in kept), section])
    RESULTS.write_text(f"{head.rstrip()}\n\n{body}")
