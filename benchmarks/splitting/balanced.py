"""Quality of the balanced split: sleeping devices of known cost, and a real model on unequal ranks.

`python -m benchmarks.splitting.balanced [DRAWS]` sets the number of random machines of eight devices (50).
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.splitting.bare import bare_ms
from benchmarks.timing import concluded, machine_facts, record, table
from gpurun.launcher.balance import slowest, solve

SEED = 2026
DRAWS = 50
DEVICES = 8
SHORT = {"profile": {"steps": 0}, "gradient_check": False}
CASES = (
    # alpha in ms, beta in ms, batch, rounds, least speed-up
    ((0.0, 0.0), (4.0, 10.0), 64, 28, 1.6),
    ((3.3, 25.5), (1.0, 2.5), 64, 28, 1.8),
)
QUOTA = 0.4
"""Share of a core for the limited rank."""


def main(draws: int = DRAWS) -> None:
    """Writes the section "Balanced"."""
    facts = machine_facts()
    two = [two_devices(*case) for case in CASES]
    eight = [one_draw(SEED + number) for number in range(draws)]
    limited = limited_rank()
    header = [
        "α ms",
        "β ms",
        "even ms",
        "balanced ms",
        "faster",
        "goal",
        "split",
        "T* ms",
        "T over T*",
        "bare loop",
    ]
    parts = [
        "Two `sleep` devices. T* is the slowest device's time in the best split of whole samples, as the "
        "devices were measured (in brackets: by the formula, without what a step itself costs); T the "
        "measured step of the split that was found (goal: 2 % over T*, as measured). Bare loop: one written "
        "by hand with DDP over the same split, its step over its own step without exchange:",
        table(header, two),
        eight_text(eight),
        limited,
    ]
    record("Balanced", "\n\n".join(parts), facts)


def two_devices(
    alphas: Sequence[float], betas: Sequence[float], batch: int, rounds: int, goal: float
) -> list[str]:
    found = run(sleep_job(alphas, betas, batch) | {"compare": {"split": ["even", "balanced"]}}, rounds)
    even, balanced = (variant["step_ms"]["estimate"] for variant in found["variants"])
    split, best = found["variants"][1]["split"], optimum_ms(alphas, betas, batch)
    measured_best = found["variants"][1]["balanced"]["optimum_ms"]
    together_ms, alone_ms = bare_ms(alphas, betas, split)
    return [
        "/".join(map(str, alphas)),
        "/".join(map(str, betas)),
        f"{even:.1f}",
        f"{balanced:.1f}",
        f"{even / balanced:.2f}×",
        f"≥ {goal}×",
        "/".join(map(str, split)),
        f"{measured_best:.1f} ({best:.1f})",
        f"{balanced / measured_best - 1:+.1%} ({balanced / best - 1:+.1%})",
        f"{together_ms / alone_ms - 1:+.1%}",
    ]


def one_draw(seed: int) -> tuple[float, float, float]:
    """Over the integer optimum: the split by the formula, the measured step less a zero sleep's; seconds."""
    rng = random.Random(seed)
    alphas = [round(rng.uniform(0, 100), 1) for _ in range(DEVICES)]
    betas = [round(rng.uniform(1, 6), 2) for _ in range(DEVICES)]
    batch = rng.randint(512, 768)
    start = time.monotonic()
    found = run(sleep_job(alphas, betas, batch) | {"split": "balanced"}, rounds=4)
    wall = time.monotonic() - start
    variant, best = found["variants"][0], optimum_ms(alphas, betas, batch)
    by_formula = max(a + b * n for a, b, n in zip(alphas, betas, variant["split"], strict=True))
    net_ms = variant["step_ms"]["estimate"] - zero_ms(DEVICES, batch)
    print(f"draw {seed}: {by_formula / best - 1:+.2%} {net_ms / best - 1:+.2%} {wall:.0f} s", file=sys.stderr)
    return by_formula / best, net_ms / best, wall


def eight_text(draws: Sequence[tuple[float, float, float]]) -> str:
    formula, net, walls = zip(*draws, strict=True)
    return (
        f"Eight `sleep` devices, α 0 to 100 ms, β 1 to 6 ms, batch 512 to 768, {len(draws)} draws: by the "
        f"formula the split found is within 5 % of the integer optimum in {sum(x <= 1.05 for x in formula)} "
        f"of {len(draws)} (worst {max(formula) - 1:+.2%}), its measured step, less a zero sleep's, in "
        f"{sum(x <= 1.05 for x in net)} (worst {max(net) - 1:+.2%}); the longest run took {max(walls):.0f} s "
        f"(goal: 60 s)."
    )


def limited_rank() -> str:
    """A small GPT on two CPU ranks, one of them limited to a part of a core."""
    body = MODEL.format(group=Path(GROUP), quota=QUOTA)
    found = run(GPT_JOB, rounds=28, files={"model.py": body})
    Path(GROUP).rmdir()
    even, balanced = found["variants"]
    vs_even, split = balanced["vs_baseline"], "/".join(map(str, balanced["split"]))
    text = (
        f"A small GPT on two CPU ranks, rank 1 limited by its cgroup to {QUOTA:.0%} of a core. "
        f"Even takes {even['step_ms']['estimate']:.1f} ms, balanced ({split}) "
        f"{balanced['step_ms']['estimate']:.1f} ms: {-vs_even['percent']:.0f} % less, verdict "
        f"*{vs_even['verdict']}*."
    )
    load = next((each for each in found["findings"] if each["code"] == "affected-by-load"), None)
    return f"{text} {load['text']}." if load else text


GROUP = "/sys/fs/cgroup/cpu/gpurun-benchmark"
GPT_JOB: dict[str, Any] = {
    "workload": "model.py:build",
    "devices": "cpu:2",
    "global_batch": 32,
    "compare": {"split": ["even", "balanced"]},
}
MODEL = """
import os
from pathlib import Path
from gpurun.workloads.gpt import build as gpt

GROUP = Path("{group}")

def build():
    if os.environ.get("RANK") == "1":
        GROUP.mkdir(exist_ok=True)
        (GROUP / "cpu.cfs_period_us").write_text("5000")
        (GROUP / "cpu.cfs_quota_us").write_text(str(int(5000 * {quota})))
        (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    return gpt(layers=2, width=64, context=64)
"""


def optimum_ms(alphas: Sequence[float], betas: Sequence[float], batch: int) -> float:
    """The slowest device's time in the best split of whole samples."""
    costs: list[Callable[[int], float]] = [
        lambda n, a=a, b=b: a + b * n  # type: ignore[misc]
        for a, b in zip(alphas, betas, strict=True)
    ]
    return slowest(costs, solve(costs, batch, [1] * len(costs), [batch] * len(costs)))


_zero_ms: dict[int, float] = {}


def zero_ms(num_devices: int, batch: int) -> float:
    """The step of a sleep of no length, measured once for each number of ranks."""
    if num_devices not in _zero_ms:
        found = run(sleep_job([0.0] * num_devices, [0.0] * num_devices, batch), rounds=8)
        _zero_ms[num_devices] = found["variants"][0]["step_ms"]["estimate"]
    return _zero_ms[num_devices]


def sleep_job(alphas: Sequence[float], betas: Sequence[float], batch: int) -> dict[str, Any]:
    return {
        "workload": "sleep",
        "params": {"alpha_ms": list(alphas), "beta_ms": list(betas)},
        "devices": f"cpu:{len(alphas)}",
        "global_batch": batch,
    }


def run(job: dict[str, Any], rounds: int, files: dict[str, str] | None = None) -> Any:
    """The comparison of a job that runs in a directory of its own."""
    return concluded(json.dumps({"steps": {"rounds": rounds}} | SHORT | job), files=files)[0]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
