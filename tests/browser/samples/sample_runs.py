"""Run directories as `gpurun` would leave them, made from a few figures: what the browser tests look at."""
# ruff: noqa: E501

import json
import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gpurun.launcher.compare.figures.ranks import ExposedComm, RankFigures
from gpurun.launcher.compare.figures.searched import search_result
from gpurun.launcher.compare.figures.size_curves import (
    Balanced,
    BatchCurve,
    BatchPoint,
    DeviceCost,
    SplitCost,
)
from gpurun.launcher.compare.headline import ranking_findings
from gpurun.launcher.compare.model import (
    CONCLUSIONS,
    Comparison,
    Difference,
    Noise,
    StepTime,
    VariantResult,
    Verdict,
)
from gpurun.launcher.compare.ranking import standings, time_per_sample
from gpurun.launcher.findings.finding import Finding, finding, ranked
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, write_json
from gpurun.launcher.rundir.improvement import Gain, Improvement, RemedyResult
from gpurun.launcher.rundir.records import Effect, SearchRecord, Status, TimeChange, TrialRecord, Unmeasured
from tests.browser.samples.sample_traces import write_traces
from tests.known import known

MARKUP = "<img src=x onerror=document.title='hacked'>"
HOST = {
    "hostname": "node1",
    "gpus": [
        {"index": index, "name": "NVIDIA H200 NVL", "memory_gib": 139.8, "power_limit_w": limit, "max_sm_clock_mhz": 1785}
        for index, limit in enumerate((600, 450))
    ],
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


def rank_figures(
    rank: int, batch: int, parts: Sequence[float], device: str | None = None, peak_gib: float = 75.7
) -> RankFigures:
    """A rank by its parts of a step: compute, transfer, wait, copy, input, the rest of idle, in ms."""
    compute, transfer, wait, copy, data, idle = parts
    return RankFigures(
        rank=rank, device=device or f"cuda:{rank}", local_batch=batch, step_ms=sum(parts), phases_ms={},
        peak_gib=peak_gib, trace=None, span_ms=sum(parts), compute_ms=compute, exposed_transfer_ms=transfer,
        exposed_wait_ms=wait, exposed_memcpy_ms=copy, idle_ms=data + idle, input_ms=data, wait_ms=wait,
        transfer_ms=transfer, exposed_comm_ms=ExposedComm(trace=transfer + wait),
    )  # fmt: skip


def variant(
    strategy: str,
    split: Sequence[int],
    step_ms: float,
    *,
    half: float = 0.2,
    percent: float | None = None,
    percent_half: float = 0.8,
    verdict: Verdict = "slower",
    ranks: Sequence[RankFigures] = (),
    status: Status = "ok",
    reason: str | None = None,
    efficiency: float | None = None,
    varied: dict[str, str] | None = None,
    devices: Sequence[str] | None = None,
) -> VariantResult:
    """A variant by its figures; its id is made from strategy and split."""
    measured = status == "ok"
    name = "-".join(str(part) for part in split)
    return VariantResult(
        id=f"{strategy}-{len(split)}-{name}", strategy=strategy,
        devices=tuple(devices or (f"cuda:{index}" for index in range(len(split)))), split=tuple(split),
        split_name=name.replace("-", "/"), global_batch=sum(split), precision="bf16", accumulate=1,
        varied=varied or {}, status=status, reason=reason,
        log="launches/01/log/rank1.log" if status == "failed" else None,
        rounds=28 if measured else 0, launches=1,
        step_ms=StepTime(step_ms, (step_ms - half, step_ms + half)) if measured else None,
        samples_per_s=1000 * sum(split) / step_ms if measured else None,
        vs_baseline=None if not measured else Difference(None, None, "baseline") if percent is None
        else Difference(percent, (percent - percent_half, percent + percent_half), verdict),
        scaling_efficiency=efficiency, gradient_error=1e-7 if measured else None, gradient_reference=None,
        exposed_comm_ms=ExposedComm(), ranks=tuple(ranks),
    )  # fmt: skip


FASTEST = "Fastest: ddp 34/30, 4.9 % faster than the baseline ddp 32/32 (4.2 to 5.6)."
"""Headline of the run `gpt`."""


class ByMedian:
    """Differences between any two variants as their step times show them, all of them sure."""

    def __init__(self, variants: Sequence[VariantResult]) -> None:
        self.variants = {result.id: result for result in variants}

    def between(self, variant: str, other: str) -> Difference:
        a, b = (time_per_sample(self.variants[id_]) for id_ in (variant, other))
        percent = 100 * (a / b - 1)
        return Difference(percent, (percent - 0.8, percent + 0.8), "slower" if percent > 0 else "faster")

    def all_against(self, other: str, variants: Iterable[str]) -> dict[str, Difference]:
        return {variant: self.between(variant, other) for variant in variants}


def write_comparison(
    path: Path,
    name: str,
    variants: Sequence[VariantResult],
    headline: str | None = None,
    batch_curves: Sequence[BatchCurve] = (),
    findings: Sequence[Finding] = (),
) -> RunDir:
    """The run directory with what the reports read."""
    run = RunDir(path)
    measured = [result for result in variants if result.step_ms]
    best = min(
        measured, key=lambda each: known(each.step_ms).estimate / known(each.global_batch), default=None
    )
    base = next(
        (each for each in variants if each.vs_baseline and each.vs_baseline.verdict == "baseline"),
        variants[0],
    )
    ranking = standings(variants, ByMedian(variants))
    found = ranking_findings(ranking, base.id) if ranking else (finding("not-measured", case="none"),)
    found = (finding("probe", found=headline),) if headline else found
    comparison = Comparison(
        schema=1, name=name, job={}, host=HOST, baseline=base.id, ci_level=0.95,
        noise=Noise(0.2, (-0.5, 0.9), None), variants=tuple(variants), fastest=best.id if best else None,
        leader=best.id if best else None, complete=True, findings=ranked((*found, *findings)),
        batch_curves=tuple(batch_curves), conclusions=CONCLUSIONS,
    )  # fmt: skip
    write_json(run.comparison, comparison)
    write_json(run.host, HOST)
    return run


def write_steps(run: RunDir, variant_id: str, rank: int, step_ms: float, count: int, seed: int) -> None:
    """Timed steps of a rank around a median, a few of them slow."""
    random_number = random.Random(seed)
    lines = []
    for step in range(count):
        slow = random_number.random() * 4 if random_number.random() < 0.05 else 0.0
        ns = int(1e6 * (step_ms + random_number.gauss(0, 0.4) + slow))
        phases = {
            "data": 300_000,
            "h2d": 400_000,
            "forward": int(0.3 * ns),
            "backward": int(0.6 * ns),
            "optimizer": int(0.05 * ns),
        }
        lines.append(
            json.dumps(
                {"launch": "01-ddp-2", "round": step // 8 + 1, "order": 0, "step": step, "kind": "timed", "step_ns": ns,
                 "phases_ns": phases, "peak_bytes": None},
                separators=(",", ":"),
            )
        )  # fmt: skip
    path = run.steps(variant_id, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


TRACED = ((34, 30), (32, 32), (40, 24), (48, 16))


def write_gpt_splits(path: Path, traced: Sequence[tuple[int, ...]] = TRACED) -> RunDir:
    """Two GPUs of which one is slower; splits, strategies, one unsteady and one out of memory; some traced."""

    def two(a: tuple[int, Sequence[float]], b: tuple[int, Sequence[float]], gib: float) -> list[RankFigures]:
        return [rank_figures(0, a[0], a[1], peak_gib=gib), rank_figures(1, b[0], b[1], peak_gib=gib * 0.8)]

    rest = (0.5, 0.4, 0.8)
    single = (77.6, 0, 0, 0.5, 0.4, 0.8)
    variants = [
        variant("ddp", (34, 30), 48.2, half=0.3, percent=-4.9, verdict="faster", efficiency=0.823,
                ranks=two((34, (43.1, 3.4, 0.0, *rest)), (30, (43.0, 3.4, 0.1, *rest)), 80.1)),
        variant("ddp", (33, 31), 49.4, percent=-2.6, percent_half=0.7, verdict="faster", efficiency=0.803,
                ranks=two((33, (42.0, 4.4, 1.3, *rest)), (31, (44.3, 3.4, 0.0, *rest)), 77.9)),
        variant("ddp", (36, 28), 50.5, half=0.6, percent=-0.4, percent_half=1.6, verdict="inconclusive", efficiency=0.785,
                ranks=two((36, (45.4, 3.4, 0.0, *rest)), (28, (40.4, 5.6, 2.8, *rest)), 84.5)),
        variant("ddp", (32, 32), 50.7, efficiency=0.782,
                ranks=two((32, (40.8, 5.5, 2.7, *rest)), (32, (45.6, 3.4, 0.0, *rest)), 75.7)),
        variant("ddp", (40, 24), 55.1, half=0.3, percent=8.7, percent_half=0.9, efficiency=0.72,
                ranks=two((40, (50.0, 3.4, 0.0, *rest)), (24, (35.2, 10.2, 8.0, *rest)), 93.3)),
        variant("ddp", (48, 16), 64.3, half=0.5, percent=26.8, percent_half=1.1, efficiency=0.617,
                ranks=two((48, (59.2, 3.4, 0.0, *rest)), (16, (24.8, 17.0, 20.8, *rest)), 110.9)),
        variant("single", (64,), 79.3, half=0.3, percent=56.4, efficiency=1.0, ranks=[rank_figures(0, 64, single)]),
        variant("dp", (32, 32), 84.6, half=0.7, percent=66.9, percent_half=1.4, efficiency=0.469,
                ranks=two((32, (41.9, 24.6, 6.2, 4.3, 0.4, 7.2)), (32, (45.6, 24.6, 1.4, 3.9, 0.4, 8.7)), 84.2)),
        variant("dp", (40, 24), 0.0, status="unsteady", reason="step time drifted from 88 to 97 ms over 28 rounds"),
        variant("dp", (48, 16), 0.0, status="oom", reason="cuda:0 asked for 146.1 GiB of 139.8 in the first backward"),
    ]  # fmt: skip
    run = write_comparison(path, "gpt-splits", variants)
    for number, each in enumerate(variants):
        for rank in each.ranks if each.strategy == "ddp" else each.ranks[:1]:
            write_steps(run, each.id, rank.rank, known(each.step_ms).estimate, 224, 10 * number + rank.rank)
    for result in variants:
        if result.strategy == "ddp" and result.split in traced:
            write_traces(run.variant(result.id), [rank.compute_ms or 0.0 for rank in result.ranks])
    return run


def write_balanced(path: Path) -> RunDir:
    """Two devices, one of them slow to start and slow per sample, split by what they cost; once straight and
    measured, once through the points of a device that is full, and never measured."""
    costs = (
        DeviceCost(4.86, (2.95, 5.41), 1.0, (0.987, 1.06), True,
                   ((31, 35.8), (42, 46.9), (52, 57.0), (62, 66.8)), device="cpu:0"),
        DeviceCost(26.75, (26.59, 26.94), 2.53, (2.49, 2.57), True,
                   ((7, 44.5), (10, 51.9), (12, 57.4), (14, 62.1)), device="cpu:1"),
    )  # fmt: skip
    found = Balanced(
        costs, optimum_ms=57.1, overhead_ms=0.588, predicted_ms=57.688, measured_ms=58.6,
        optimum_over_measured=57.1 / 58.6, even=SplitCost((32, 32), 108.2),
        proportional=SplitCost((46, 18), 72.8), same_as=("ddp-2-32-32",),
    )  # fmt: skip
    full = replace(costs[1], straight=False, points=((4, 30.0), (8, 44.0), (12, 66.0)), max_samples=12)
    unmeasured = replace(
        found, devices=(costs[0], full), measured_ms=None, optimum_over_measured=None, even=None, same_as=()
    )
    both = ("cpu:0", "cpu:1")
    variants = [
        variant("ddp", (32, 32), 108.0, devices=both),
        replace(
            variant("ddp", (52, 12), 58.6, percent=-45.8, verdict="faster", devices=both),
            split_name="balanced", balanced=found,
        ),
        replace(
            variant("ddp", (53, 11), 0.0, devices=both, status="failed", reason="rank 1 was killed"),
            split_name="balanced", balanced=unmeasured,
        ),
    ]  # fmt: skip
    return write_comparison(path, "balanced", variants)


STEPS_MS = {8: 15.1, 32: 20.6, 128: 45.1, 512: 141.0, 1024: 269.0}
"""By global batch; with the knee at 512."""


def write_batches(path: Path) -> RunDir:
    """One split at rising batches; another one that still gains at the largest."""
    variants, curves = [], []
    for name, percent, factor in (("even", 0.0, 1.0), ("balanced", -3.0, 1.4)):
        points = []
        for batch, step_ms in STEPS_MS.items():
            found_ms = step_ms / (1 + (factor - 1) * batch / 1024)
            behind = 100 * (found_ms / batch) / (STEPS_MS[8] / 8) - 100 + percent
            verdict: Verdict = "inconclusive" if batch == 32 else "faster"
            found = variant("ddp", (batch // 2, batch // 2), found_ms, verdict=verdict, devices=("cpu:0", "cpu:1"),
                          percent=None if (name, batch) == ("even", 8) else behind,
                          varied={"precision": "fp32", "global_batch": str(batch)})  # fmt: skip
            found = replace(found, id=f"ddp-2-{name}-global_batch-{batch}", split_name=name)
            variants.append(found)
            points.append(BatchPoint(found.id, batch, found.samples_per_s or 0.0))
        curves.append(BatchCurve(f"ddp {name} on 2", tuple(points), 512 if name == "even" else None))
    return write_comparison(path, "batches", variants, batch_curves=curves)


def write_many(path: Path, count: int = 500) -> RunDir:
    """So many variants of four devices, a few out of memory and unsteady."""
    random_number = random.Random(5)
    variants = [variant("ddp", (16, 16, 16, 16), 31.8, half=0.1)]
    for number in range(1, count):
        split = (16 + number % 9, 16 + number // 9 % 9, 16 + number // 81 % 9, 40 - number % 7)
        percent = -9.4 + 34 * random_number.betavariate(2, 4)
        ends: dict[int, tuple[Status, str]] = {
            0: ("oom", "cuda:0 had 139.8 of 140.0 GiB in use"),
            1: ("unsteady", "warm-up never settled"),
        }
        ended = ends.get(number % 60)
        step_ms = 31.8 * (1 + percent / 100)
        verdict: Verdict = "faster" if percent < -1.4 else "slower" if percent > 1.4 else "same"
        parts = (
            0.85 * step_ms,
            0.1 * step_ms,
            0.02 * step_ms,
            0.01 * step_ms,
            0.01 * step_ms,
            0.01 * step_ms,
        )
        variants.append(
            variant(("ddp", "dp", "single")[number % 11 % 3], split, step_ms, half=0.1, percent=percent, percent_half=0.4,
                    verdict=verdict, ranks=[rank_figures(0, split[0], parts)], varied={"seed": str(number)},
                    status=ended[0] if ended else "ok", reason=ended[1] if ended else None)
        )  # fmt: skip
    return write_comparison(
        path, "many", [replace(result, id=f"{result.id}-{number}") for number, result in enumerate(variants)]
    )


def write_ranks(path: Path, count: int = 64) -> RunDir:
    """One variant of many ranks, all of which wait for one; traced."""
    slow = 37 % count
    compute = [24.0 + 3.0 * ((rank * 29) % count) / count for rank in range(count)]
    compute[slow] = 29.0
    figures = [
        rank_figures(rank, 4, (ms, 1.0, 29.2 - ms, 0.2, 0.1, 0.1), device=f"cuda:{rank % 8}")
        for rank, ms in enumerate(compute)
    ]
    ddp = variant(
        "ddp", [4] * count, 30.6, ranks=figures, devices=[f"cuda:{rank % 8}" for rank in range(count)]
    )
    run = write_comparison(path, "ranks", [ddp, variant("ddp", [2 * count, 2 * count], 60.0, percent=96.0)])
    write_traces(run.variant(ddp.id), compute, num_steps=3, kernels_per_step=10)
    return run


def write_improvement(path: Path) -> RunDir:
    """The last run of `gpurun improve`: a remedy is kept, another wasn't tried."""
    own, best = (
        variant("ddp", (32, 32), 20.0),
        variant("ddp", (33, 31), 14.6, percent=-27.0, verdict="faster"),
    )
    kept = RemedyResult(
        *("DataLoader(num_workers=2)", "DataLoader", "train.py:41", "kept"), -27.0, (-29.0, -25.1)
    )
    other = RemedyResult(
        *("DataLoader(pin_memory=True)", "DataLoader", "train.py:41", "not tried"),
        why="it has no effect on CPUs",
    )
    found = Improvement(
        *(
            1,
            "train.py",
            240.0,
            Gain(-27.0, (-29.0, -25.1)),
            (kept, other),
            "ranks waited 44 % of a step for data",
        ),
        diff="--- a/train.py\n+++ b/train.py\n@@ -41 +41 @@\n-DataLoader(data)\n+DataLoader(data, num_workers=2)\n",
        complete=True,
    )
    run = write_comparison(path / "3-together-1", "improved", [best, own])
    write_json(path / "improve.json", found)
    return run


def write_search(path: Path, is_over: bool = True) -> RunDir:
    """A search of `ddp` and `fsdp` with buckets: one failed, one is too large; while it goes on, of one no memory is known."""
    rows: list[tuple[str, float | None, float | None, str | None]] = [
        ("ddp bucket_mb=25", 20.0, 2.0, None),
        ("ddp bucket_mb=5", 18.0, 2.1, None),
        ("ddp bucket_mb=1", 19.0, 1.9, None),
        ("ddp bucket_mb=100", 18.5, 4.5, None),
        ("fsdp reshard=false", 24.0, 1.4, None),
        ("fsdp reshard=true", 26.0, 1.0, None),
        ("ddp bucket_mb=50", 23.0, 2.2 if is_over else None, None),
        ("fsdp split=3:1", None, None, f"rank 1 raised ValueError: {MARKUP}"),
    ]
    ids = [label.replace(" ", "-").replace("=", "-") for label, *_ in rows]
    own, best = (
        variant("ddp", (32, 32), 20.0),
        variant("ddp", (33, 31), 18.0, percent=-10.0, verdict="faster"),
    )
    own, best = replace(own, id=ids[0]), replace(best, id=ids[1])
    run = write_comparison(path, "search", [best, own])
    records = [
        TrialRecord(
            id_,
            1,
            "failed" if reason else "ok",
            1.0,
            {"strategy": label.split()[0]},
            label,
            64,
            ms,
            1e-5,
            gib,
            reason,
        )
        for id_, (label, ms, gib, reason) in zip(ids, rows, strict=True)
    ]
    append_lines(run.trials, records)
    search = SearchRecord(
        space=12, distinct=10, own=ids[0], budget_s=600.0, finalists=(ids[1], ids[0]) if is_over else (), best=ids[1],
        left_out=(Unmeasured({"strategy": "single", "bucket_mb": [1, 5]}, "not tried: by the model 40.2 % slower than the best that was"),),
        failed=(), at_most_missed_percent=1.4, memory_gib=4.0,
        effects_at={ids[1]: (
            Effect("bucket_mb", "25", "5", TimeChange(11.1, (9.0, 13.2), ids[0]), TimeChange(9.8, (8.6, 11.0))),
            Effect("bucket_mb", "1", "5", TimeChange(5.6, (3.1, 8.0), ids[2]), TimeChange(-0.4, (-2.3, 1.5))),
            Effect("strategy", "fsdp", "ddp", TimeChange(33.3, (30.2, 36.5), ids[4]), TimeChange(-24.0, (-29.2, -19.0))),
            Effect("split", "3:1", "even", None, TimeChange(12.0, (8.0, 16.1))),
        )},
    )  # fmt: skip
    write_json(run.search, search)
    result = search_result(run, best.id if is_over else None, -10.0)
    write_json(run.comparison, replace(read_json(run.comparison, Comparison), search=result))
    return run


def write_tuned(path: Path) -> None:
    """The recorded run of `gpurun tune`: many points close to each other, and long labels."""
    shutil.copytree(Path(__file__).resolve().parents[3] / "docs" / "runs" / "tune", path)
