"""The cost of an idle profiler: steps of a process that has taken traces, and of one that hasn't.

gpurun records extra steps after the timed ones of a variant; the steps of the next variant and launch must
not become slower.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.timing import centre_and_interval, machine_facts, record, table

ROOT = Path(__file__).resolve().parents[2]
GROUPS = 10
"""Each with three fresh processes: memory layout of a process also affects its steps."""
ROUNDS = 20
"""Of each group."""
STEPS = 200
"""Of a block."""
CAPTURES = 3
GOAL_US = 20
KINDS = ("never", "again", "captured")
"""Two that took no trace, the second one as a control, and one that did."""

Block = tuple[float, float]
"""µs per step: by the clock, and of CPU time of the whole process."""


def main() -> None:
    """Writes the section "Idle profiler"."""
    facts = machine_facts()
    blocks = [block for group in range(GROUPS) for block in group_blocks(random.Random(group))]
    rows = []
    for name, clock in (("by the clock", 0), ("CPU time", 1)):
        for kind, label in (("captured", "idle profiler"), ("again", "control: never traced, too")):
            pairs = [(block["never"][clock], block[kind][clock]) for block in blocks]
            rows.append(
                [f"{label}, {name}", *difference(pairs), f"≤ {GOAL_US}" if kind == "captured" else ""]
            )
    text = (
        f"Steps of a small network in a process that took {CAPTURES} traces before, against one that took "
        f"none: {GROUPS} times fresh processes, {ROUNDS} rounds each, a block of {STEPS} steps of every "
        "process in random order; Hodges–Lehmann difference of a step. The control says what two processes "
        "differ by without any trace.\n\n"
    )
    header = ["", "never traced µs", "this one µs", "difference µs", "95 % interval", "goal"]
    record("Idle profiler", text + table(header, rows), facts)


def difference(pairs: Sequence[tuple[float, float]]) -> list[str]:
    centre, (low, high) = centre_and_interval([after - before for before, after in pairs])
    before_us, after_us = (median(values) for values in zip(*pairs, strict=True))
    return [f"{before_us:.1f}", f"{after_us:.1f}", f"{centre:+.1f}", f"{low:+.1f} to {high:+.1f}"]


def group_blocks(chance: random.Random) -> list[dict[str, Block]]:
    """Blocks of fresh processes, one of every kind per round."""
    with ExitStack() as stack:
        children = {kind: stack.enter_context(start(kind)) for kind in KINDS}
        blocks = []
        for _ in range(ROUNDS):
            order = chance.sample(KINDS, len(KINDS))
            blocks.append({kind: step_us(children[kind]) for kind in order})
        for child in children.values():
            child.communicate()
    return blocks


def start(kind: str) -> subprocess.Popen[str]:
    """A process that runs a block of steps for every line that it is sent."""
    argv = [sys.executable, "-m", "benchmarks.cost.profiler", kind]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def step_us(child: subprocess.Popen[str]) -> Block:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("block\n")
    child.stdin.flush()
    wall_us, cpu_us = map(float, child.stdout.readline().split())
    return wall_us, cpu_us


def serve(captures: int) -> None:
    """The body of such a process."""
    import torch

    from gpurun.launcher.rundir.records import ProfileConfig
    from gpurun.launcher.worker.profiling import capture

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 32)

    def run_one_step() -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as directory:
        for _ in range(captures):
            capture(run_one_step, ProfileConfig(3), Path(directory) / "rank0.pt.trace.json.gz")
    for _ in range(STEPS):
        run_one_step()
    for _ in sys.stdin:
        begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(STEPS):
            run_one_step()
        wall_ns, cpu_ns = time.perf_counter_ns() - begin_ns, time.process_time_ns() - begin_cpu_ns
        print(wall_ns / STEPS / 1000, cpu_ns / STEPS / 1000, flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(CAPTURES if sys.argv[1] == "captured" else 0)
    else:
        main()
