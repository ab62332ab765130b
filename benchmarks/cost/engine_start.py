"""From an engine's start until all ranks are ready: gpurun once per node, against a script once per rank."""

import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.cost.launch import SCRIPT, last_ready_s
from benchmarks.faults.clusters import GPURUN, RANKS, Engine, engines
from benchmarks.faults.engines import PROGRAM
from benchmarks.timing import in_turn, machine_facts, ratio, record, table, wall_s
from tests.integration.command import write
from tests.integration.nodes.hosts import ADDRESSES

GOAL = 1.1
RUNS = 3
PER_NODE = 2
"""Ranks."""
MEETING = dict.fromkeys(("Open MPI", "MPICH"), ADDRESSES[0])
"""Where the nodes meet, of engines that don't say it; Slurm does, and Ray's driver."""
BARE = f"""
import os, sys
if "MASTER_ADDR" not in os.environ:
    names = [name for name in {RANKS} if name in os.environ]
    os.environ.update(RANK=os.environ[names[0]], WORLD_SIZE=sys.argv[1], MASTER_ADDR=sys.argv[2])
    os.environ.update(MASTER_PORT="29555")
"""


def start_s(engine: Engine, directory: Path, argv: Sequence[str], processes: int) -> float:
    """Seconds from the engine's start until the last rank has done its first all_reduce."""
    assert engine.bare is not None
    known = ["env", f"READY_DIRECTORY={directory}"]  # Ray's actors don't inherit it
    command = engine.bare(directory, [*known, *argv], processes)
    started_ns = time.time_ns()
    wall_s(command, directory, engine.env)
    return last_ready_s(directory, started_ns, 2 * PER_NODE)


def starts(name: str, engine: Engine) -> list[str]:
    """A row: gpurun once per node, against the script itself once per rank."""
    with tempfile.TemporaryDirectory() as place:
        directory, node0 = Path(place), MEETING.get(name)
        write(directory, "train.py", BARE + SCRIPT)
        write(directory, "job.yaml", textwrap.dedent(PROGRAM).replace("RANKS", str(PER_NODE)))
        bare = [sys.executable, "train.py", str(2 * PER_NODE), node0 or "127.0.0.1"]
        ours = [*GPURUN, "job.yaml", *(("--rendezvous", f"{node0}:29400") if node0 else ())]
        figures = in_turn(
            {
                "bare": partial(start_s, engine, directory, bare, PER_NODE),
                "gpurun": partial(start_s, engine, directory, ours, 1),
            },
            RUNS,
        )
    medians = [f"{statistics.median(figures[key]):.2f}" for key in ("bare", "gpurun")]
    goal = f"≤ {GOAL}"
    return [name, *medians, f"{ratio(figures['gpurun'], figures['bare']):.2f}", goal]


def main() -> None:
    """Writes the section "Start by engines"."""
    facts = machine_facts()
    with engines() as found:
        timed = {name: engine for name, engine in found.items() if engine.bare is not None}
        rows = [starts(name, engine) for name, engine in timed.items()]
    header = ["engine", "script s", "gpurun s", "ratio", "goal"]
    text = (
        "From the engine's start until all ranks, two on each of two nodes, have done one all_reduce: a "
        "script that the engine starts once per rank, and gpurun with the same script, which it starts once "
        "per node. On Ray the driver that `gpurun submit` writes starts both, by an actor per node; "
        "that of the script has a shell start its ranks. "
        f"Medians of {RUNS} runs in turn, and of the ratios of neighbouring runs.\n\n"
    )
    record("Start by engines", text + table(header, rows), facts)
