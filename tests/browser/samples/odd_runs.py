"""Runs and traces with something odd about them: markup in names, damage, one that goes on."""

import gzip
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

from gpurun.launcher.compare.figures.ranks import RankFigures
from gpurun.launcher.compare.figures.size_curves import Curve, CurvePoint, ProbeResult
from gpurun.launcher.findings.finding import finding
from gpurun.launcher.machine.process_tree import start_ticks
from gpurun.launcher.plan.model import Launch, Plan
from gpurun.launcher.rundir.claim import Running, boot_id
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Event
from tests.browser.samples.sample_runs import MARKUP, rank_figures, variant, write_comparison, write_steps
from tests.browser.samples.sample_traces import write_traces
from tests.unit.tensorboard_plugin.test_tab_progress import IDS, VARIANTS


def write_hostile(path: Path) -> RunDir:
    """Names that would be markup, in the variant's label, the reason, and the trace; traced steps are others
    than timed ones."""
    first = variant(
        "ddp", (32, 32), 60.0, varied={"params": MARKUP}, ranks=[rank_figures(0, 32, (40, 5, 1, 1, 1, 2))]
    )
    second = variant("dp", (32, 32), 0.0, status="failed", reason=MARKUP)
    far = finding("noticed", first.id, of="", case="traced-far", variants=(first.id,))
    run = write_comparison(path, MARKUP, [first, second], headline=MARKUP, findings=(far,))
    write_traces(run.variant(first.id), [40.0], num_steps=2, kernels_per_step=8)
    trace = run.trace(first.id, 0)
    text = gzip.decompress(trace.read_bytes()).decode().replace("aten::addmm", MARKUP)
    trace.write_bytes(gzip.compress(text.encode()))
    return run


def write_all_failed(path: Path) -> RunDir:
    """Variants that one failure ended together."""
    failed = [
        variant(name, (32, 32), 0.0, status="failed", reason="no data") for name in ("ddp", "dp", "fsdp")
    ]
    return write_comparison(path, "all-failed", failed)


def write_one(path: Path) -> RunDir:
    """A run of a single variant."""
    ranks = [
        rank_figures(0, 32, (40.8, 5.5, 2.7, 0.5, 0.4, 0.8)),
        rank_figures(1, 32, (45.6, 3.4, 0, 0.5, 0.4, 0.8)),
    ]
    return write_comparison(path, "one", [variant("ddp", (32, 32), 50.7, ranks=ranks)])


def write_broken(path: Path) -> RunDir:
    """Two variants, the trace of one of which is damaged."""
    variants = [
        variant("ddp", (32, 32), 50.0, ranks=[rank_figures(0, 32, (40, 5, 1, 1, 1, 2))]),
        variant("ddp", (40, 24), 52.0, percent=4.0, ranks=[rank_figures(0, 40, (42, 5, 1, 1, 1, 2))]),
    ]
    run = write_comparison(path, "broken", variants)
    for each in variants:
        write_traces(run.variant(each.id), [40.0], num_steps=2, kernels_per_step=40)
    trace = run.trace(variants[1].id, 0)
    damage(trace)
    return run


def damage(trace: Path) -> None:
    """Loses a byte in the middle of the file."""
    content = trace.read_bytes()
    middle = len(content) // 2
    trace.write_bytes(content[:middle] + content[middle + 1 :])


def write_live(path: Path) -> RunDir:
    """A run in round 6 of 10, which this process is at; `advance` goes on with it."""
    run = RunDir(path)
    launch = Launch("01-ddp-2", "ddp-2", 0, IDS, 10, ())
    write_json(run.plan, Plan("live", "gpt", IDS[0], VARIANTS, (), (launch,), ()))
    write_json(run.host, {"hostname": platform.node(), "cpu_model": "CPU", "cpu_cores": 2})
    claim = Running(platform.node(), boot_id(), os.getpid(), start_ticks(os.getpid()) or 0)
    write_json(run.running, claim)
    for rank in range(2):
        write_steps(run, IDS[1], rank, 48.0, 40, seed=rank)
    advance(run, 6)
    return run


def advance(run: RunDir, round_: int) -> None:
    """The run's second variant enters a round."""
    append_lines(run.events("01-ddp-2"), [Event(time.time_ns(), "round", "ddp-2-48-16", round_, 10)])


def write_traced(path: Path) -> None:
    """A directory with anybody's traces, no plan, no comparison: the second step is longer than the first."""
    write_traces(path, [40.0, 36.0], num_steps=2, kernels_per_step=12, growth=1.5)


def write_unmarked(path: Path, count: int = 2) -> None:
    """Anybody's traces of a loop without `profiler.step()`, which don't state their rank either."""
    write_traces(path, [40.0 - rank for rank in range(count)], num_steps=2, kernels_per_step=12)
    for file in sorted(path.glob("*.gz")):
        content = json.loads(gzip.decompress(file.read_bytes()))
        events = content["traceEvents"]
        kept = [event for event in events if not event["name"].startswith("ProfilerStep")]
        file.write_bytes(gzip.compress(json.dumps({"traceEvents": kept}).encode()))


def write_damaged(path: Path) -> None:
    """Anybody's traces: rank 0's is damaged, and next to it a whole one."""
    write_traces(path, [40.0, 36.0], num_steps=2, kernels_per_step=12)
    damage(path / "rank0.pt.trace.json.gz")


def write_changing(path: Path, num_steps: int = 2) -> None:
    """A trace that a test writes again, with more steps."""
    write_traces(path, [4.0], num_steps=num_steps, kernels_per_step=8)


def write_linked(path: Path) -> None:
    """A directory whose only trace is a link that leads out."""
    path.mkdir(parents=True)
    (path / "rank0.pt.trace.json").symlink_to(__file__)


def write_apart(path: Path) -> None:
    """Two traces that have nothing to do with each other: the second begins a minute later."""
    write_traces(path, [4.0], num_steps=2, kernels_per_step=8)
    first = path / "rank0.pt.trace.json.gz"
    content = json.loads(gzip.decompress(first.read_bytes()))
    own = [event for event in content["traceEvents"] if "allreduce" not in event["name"].lower()]
    content["traceEvents"] = [event | {"ts": event["ts"] + 60e6} for event in own]
    content["distributedInfo"]["rank"] = 1
    (path / "rank1.pt.trace.json").write_text(json.dumps(content))


def write_timed(path: Path) -> RunDir:
    """A variant of nine ranks without traces: only how long their phases take is known."""
    phases = {"forward": 8.0, "backward": 11.0, "optimizer": 1.0}
    ranks = [RankFigures(rank, f"cuda:{rank}", 4, 20.0, phases, None, None) for rank in range(9)]
    timed = variant("ddp", [4] * 9, 20.0, ranks=ranks)
    return write_comparison(path, "timed", [timed, variant("single", [36], 150.0, percent=650.0)])


def write_curves(path: Path) -> RunDir:
    """An all-reduce over two and four devices; the smallest message of two is not known well."""
    sizes = [1024 << (2 * power) for power in range(8)]

    def probe(latency_us: float, gb_per_s: float, ends: tuple[float, float]) -> ProbeResult:
        points = []
        for size in sizes:
            us, rate = latency_us + size / gb_per_s / 1000, size / 1000
            low, high = ends if size == sizes[0] else (0.95, 1.05)
            points.append(CurvePoint(size, us, (low * us, high * us), rate / us, rate / us))
        return ProbeResult((Curve("all-reduce", "bytes", tuple(points)),))

    found = [(2, probe(20, 40, (0.3, 2.2))), (4, probe(45, 25, (0.9, 1.1)))]
    variants = [
        replace(
            variant("ddp", [1] * count, 1.0),
            workload="allreduce",
            step_ms=None,
            samples_per_s=None,
            vs_baseline=None,
            probe=curves,
        )
        for count, curves in found
    ]
    return write_comparison(
        path, "curves", variants, headline="2 devices, all-reduce: 20 µs + size / 40 GB/s."
    )
