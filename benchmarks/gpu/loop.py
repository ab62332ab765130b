"""A hand-written loop against gpurun's timed steps over the same model, in one process.

    python -m benchmarks.gpu.loop DEVICE DIRECTORY

On a GPU also events against the GPU work of a trace of the same steps, and what an event costs the host.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.summary import AGREE_PERCENT, events_of, steps_ms
from benchmarks.timing import centre_and_interval
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.records import VariantConfig
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.timed_rounds import TimedRounds, TraceRequests, load_of
from gpurun.launcher.worker.training.trainer import Trainer
from gpurun.workloads.base import Workload

GOAL = 1.02
MOST_S = 35.0
"""How long a model is measured: three models and their traces fit into the check's time."""
LEAST_ROUNDS = 6
"""Of fewer, no interval of 95 % is known."""
TRACED_STEPS = 6
NUM_EVENTS = 2000


@dataclass(frozen=True)
class Model:
    """A model, and how much of it is measured."""

    workload: str
    params: Mapping[str, Any]
    batch: int
    precision: str
    steps: int
    rounds: int


ON_GPU = {
    "mlp": Model("mlp", {"width": 512}, 32, "fp32", 400, 20),
    "wide mlp": Model("mlp", {"width": 4096}, 4096, "fp32", 20, 20),
    "GPT-2 124M": Model("gpt", {"preset": "124M"}, 16, "bf16", 6, 10),
}
REHEARSED = {"mlp": Model("mlp", {"width": 64}, 32, "fp32", 5, 6)}


class Loop:
    """The steps of a model, by hand and by gpurun."""

    def __init__(self, chosen: Model, device: torch.device, out: Path) -> None:
        self.device, self.sync = device, runtime_of(device).synchronize
        self.num_events = 0
        self.variant = VariantConfig("single", (chosen.batch,), 1)
        config = LaunchConfig(
            launch="loop",
            run_dir=str(out),
            workload=chosen.workload,
            job_dir=str(out),
            params=dict(chosen.params),
            strategy="single",
            devices=(str(device),),
            backend=None,
            precision=chosen.precision,
            seed=0,
            threads=torch.get_num_threads(),
            variants=(self.variant,),
            baseline=None,
            warmup=10,
            rounds=chosen.rounds,
        )
        trainer = Trainer(self._built(chosen, out), config, 0)
        clock, journal = runtime_of(device).clock(device), Journal(config, 0)
        requests, load = TraceRequests(config, 0, None), load_of(config, 0)
        self.ours = TimedRounds(config, trainer, clock, Peers(), journal, device, requests, load)
        bare = self._built(chosen, out)
        assert bare.batch is not None
        assert bare.loss is not None
        self.model, self.loss = bare.model.to(device), bare.loss
        make = bare.optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
        self.optimizer: Any = make(self.model.parameters())
        self.precision = PRECISIONS[chosen.precision]
        drawn = [bare.batch(chosen.batch, torch.Generator().manual_seed(seed)) for seed in range(8)]
        self.pool = [
            tuple(each.pin_memory() if device.type == "cuda" else each for each in two) for two in drawn
        ]

    def _built(self, chosen: Model, out: Path) -> Workload:
        torch.manual_seed(0)
        workload = load_workload(chosen.workload, dict(chosen.params), out)
        assert isinstance(workload, Workload)
        return workload

    def step(self, number: int) -> None:
        """One by hand."""
        inputs, targets = (
            each.to(self.device, non_blocking=True) for each in self.pool[number % len(self.pool)]
        )
        with self.precision.autocast(self.device):
            loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def by_hand_ms(self, num_steps: int) -> float:
        self.step(0)
        self.sync(self.device)
        start_ns = time.perf_counter_ns()
        for number in range(num_steps):
            self.step(number)
        self.sync(self.device)
        return (time.perf_counter_ns() - start_ns) / num_steps / 1e6

    def by_gpurun_ms(self, num_steps: int) -> float:
        timings = list(self.ours.run_steps(self.variant, num_steps))
        self.num_events = 1 + len(timings[0].phases_ns)
        return fmean(timing.step_ns for timing in timings) / 1e6

    def traced_ms(self, path: Path) -> tuple[float, float | None]:
        """Mean milliseconds of steps in one traced run: by events, and by the GPU's work in the trace; `None`
        where a profiler that may not use CUPTI has recorded none."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            self.step(0)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(TRACED_STEPS + 1)]
            events[0].record()
            for number in range(TRACED_STEPS):
                with record_function(f"ProfilerStep#{number + 1}"):
                    self.step(number)
                events[number + 1].record()
            self.sync(self.device)
        recorded.export_chrome_trace(str(path))
        by_work, _, _ = steps_ms(events_of(path))
        by_events = [events[i].elapsed_time(events[i + 1]) for i in range(1, TRACED_STEPS)]
        return fmean(by_events), fmean(by_work) if by_work else None


def compare(name: str, chosen: Model, device: torch.device, out: Path, event_ms: float) -> tuple[Loop, bool]:
    """The loops, and whether a step by gpurun takes longer than the goal; says how much longer."""
    found = Loop(chosen, device, out)
    found.ours.warm_up(found.variant)
    found.by_hand_ms(10)
    times: dict[str, list[float]] = {"by hand": [], "by gpurun": []}
    ways: list[tuple[str, Callable[[int], float]]] = [
        ("by hand", found.by_hand_ms),
        ("by gpurun", found.by_gpurun_ms),
    ]
    ends_s = time.monotonic() + MOST_S
    for round_ in range(chosen.rounds):
        if round_ >= LEAST_ROUNDS and time.monotonic() > ends_s:
            break
        random.Random(round_).shuffle(ways)
        for way, measure in ways:
            times[way].append(measure(chosen.steps))
    return found, is_slower(name, times["by hand"], times["by gpurun"], event_ms * found.num_events)


def is_slower(
    name: str, by_hand_ms: Sequence[float], by_gpurun_ms: Sequence[float], events_ms: float = 0.0
) -> bool:
    """Whether gpurun's steps take longer than the goal, by all of the interval; says the ratio.

    Args:
        events_ms: what the events of a step cost the host. A step of which that is more than half of what
            the goal allows is shown, and doesn't fail: it is too short for the goal on any GPU.
    """
    share = events_ms / median(by_hand_ms)
    is_short = share > (GOAL - 1) / 2
    pairs = zip(by_gpurun_ms, by_hand_ms, strict=True)
    logs, interval = centre_and_interval([math.log(ours / bare) for ours, bare in pairs])
    centre, low, high = map(math.exp, (logs, *interval))
    decided = ", undecided" if low <= GOAL < high else ""
    text = f", not for steps of which the events are {share:.1%}" if is_short else decided
    return said(
        f"{name}: {median(by_hand_ms):.4g} ms by hand; by gpurun {centre:.4f} times that "
        f"({low:.4f} to {high:.4f}; goal {GOAL}{text})",
        is_wrong=low > GOAL and not is_short,
    )


def is_off(name: str, by_events_ms: float, by_work_ms: float | None) -> bool:
    """Whether events differ too much from the GPU's work in a trace, or there is none; says by how much."""
    if by_work_ms is None:
        return said(f"{name}: events {by_events_ms:.4g} ms, no GPU work in the trace", is_wrong=True)
    off = 100 * (by_events_ms / by_work_ms - 1)
    text = f"{name}: events {by_events_ms:.4g} ms, GPU work {by_work_ms:.4g} ms: {off:+.2f} %"
    return said(text, is_wrong=abs(off) > AGREE_PERCENT)


def said(found: str, is_wrong: bool) -> bool:
    """Prints what was found; `is_wrong` itself."""
    print(f"FOUND: {found}{' FAILED' if is_wrong else ''}")
    return is_wrong


def cost_of_an_event_ms(device: torch.device) -> float:
    """What an event costs the host; says so."""
    clock, took_ns = runtime_of(device).clock(device), 0.0
    for _ in range(2):  # the first time they are made
        clock.start()
        start_ns = time.perf_counter_ns()
        for _ in range(NUM_EVENTS):
            clock.mark("forward")
        took_ns = (time.perf_counter_ns() - start_ns) / NUM_EVENTS
        clock.end_step()
        clock.read()
    print(f"FOUND: an event costs the host {took_ns / 1e3:.2f} µs")
    return took_ns / 1e6


def main() -> int:
    """Compares every model; 1 if a figure of a GPU fails.

    Traces come last, since a profiler that has ended slows steps down.
    """
    device, out = torch.device(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    event_ms = cost_of_an_event_ms(device) if is_gpu else 0.0
    models = ON_GPU if is_gpu else REHEARSED
    compared = {name: compare(name, chosen, device, out, event_ms) for name, chosen in models.items()}
    if not is_gpu:
        return 0
    wrong = [is_wrong for _, is_wrong in compared.values()]
    wrong += [is_off(name, *loop.traced_ms(out / f"{name}.json.gz")) for name, (loop, _) in compared.items()]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
