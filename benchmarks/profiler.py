"""What a profiler costs that isn't recording: steps of a process that has taken traces, and one that hasn't.

gpurun records steps of its own, after the timed ones of a variant; those of the next variant and launch must
not be slower for it.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import record, table
from launcher.stats.paired import hodges_lehmann, wilcoxon_interval

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 60
STEPS = 200
"""Of a block."""
CAPTURES = 3
GOAL_US = 20


def main() -> None:
    """Writes the section "Idle profiler"."""
    with start("never") as never, start("captured") as captured:
        blocks = [in_turn(never, captured, swapped=round_ % 2 == 1) for round_ in range(ROUNDS)]
        for child in (never, captured):
            child.communicate()
    differences = [after - before for before, after in blocks]
    centre, interval = hodges_lehmann(differences), wilcoxon_interval(differences, 0.05)
    assert centre is not None
    assert interval is not None
    never_us, captured_us = (statistics.median(values) for values in zip(*blocks, strict=True))
    row = [
        f"{never_us:.1f}",
        f"{captured_us:.1f}",
        f"{centre:+.1f}",
        f"{interval[0]:+.1f} to {interval[1]:+.1f}",
    ]
    header = ["never traced µs", "idle profiler µs", "difference µs", "95 % interval", "goal"]
    text = (
        f"Steps of a small network in a process that took {CAPTURES} traces before, against one that took "
        f"none: {ROUNDS} rounds, a block of {STEPS} steps of each in turn; Hodges–Lehmann difference of a "
        "step.\n\n"
    )
    record("Idle profiler", text + table(header, [[*row, f"≤ {GOAL_US}"]]))


def start(kind: str) -> subprocess.Popen[str]:
    """A process that runs a block of steps for every line that it is sent."""
    argv = [sys.executable, "-m", "benchmarks.profiler", kind]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def in_turn(
    never: subprocess.Popen[str], captured: subprocess.Popen[str], swapped: bool
) -> tuple[float, float]:
    """µs per step of both, one after the other."""
    if swapped:
        second = step_us(captured)
        return step_us(never), second
    return step_us(never), step_us(captured)


def step_us(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("block\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def serve(captures: int) -> None:
    """The body of such a process."""
    import torch

    from launcher.records import ProfileOrder
    from launcher.worker.profile import capture

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 32)

    def run_one_step() -> None:
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(captures):
            capture(run_one_step, ProfileOrder(3), Path(folder) / "rank0.pt.trace.json.gz")
    for _ in range(STEPS):
        run_one_step()
    for _ in sys.stdin:
        begin_ns = time.perf_counter_ns()
        for _ in range(STEPS):
            run_one_step()
        print((time.perf_counter_ns() - begin_ns) / STEPS / 1000, flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(CAPTURES if sys.argv[1] == "captured" else 0)
    else:
        main()
