"""Run directories made by hand, with known answers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.plan.model import Launch, Plan, Process, Variant
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import Kind, Status, StepRecord, VariantStatus


def variant(variant_id: str, split: tuple[int, ...], strategy: str = "ddp", **changes: Any) -> Variant:
    plain = Variant(
        id=variant_id,
        strategy=strategy,
        devices=tuple(f"cpu:{i}" for i in range(len(split))),
        split=split,
        split_name="/".join(map(str, split)) if strategy != "single" else "-",
        global_batch=sum(split),
        precision="fp32",
        accumulate=1,
        params={"width": 8},
        seed=0,
        varied={},
    )
    return replace(plain, **changes)


EVEN = variant("ddp-2-even", (32, 32))
UNEVEN = variant("ddp-2-48-16", (48, 16))
DP = variant("dp-2-even", (32, 32), "dp")
SINGLE = variant("single-1", (64,), "single")


def launch(
    launch_id: str, group: str, repetition: int, variants: Sequence[Variant], rounds: int = 28
) -> Launch:
    process = Process(0, {}, ("cpu:0",))
    return Launch(launch_id, group, repetition, tuple(v.id for v in variants), rounds, (process,))


def plan(
    variants: Sequence[Variant], launches: Sequence[Launch], baseline: str = "ddp-2-even", **changes: Any
) -> Plan:
    whole = Plan("job", "gpt", baseline, tuple(variants), (), tuple(launches), ())
    return replace(whole, **changes)


@dataclass
class Files:
    """Writes the files of a run as workers and the command would."""

    run: RunDir
    written: dict[str, Any] = field(default_factory=dict)

    def block(
        self,
        variant: Variant,
        launch_id: str,
        number: int,
        step_ns: float | tuple[float, ...],
        kind: Kind = "timed",
        ranks: int | None = None,
        steps: int = 2,
        **more: Any,
    ) -> None:
        """`steps` equal steps on every rank; `step_ns` may be one figure per rank."""
        num_ranks = ranks if ranks is not None else (len(variant.devices) if variant.strategy == "ddp" else 1)
        times = step_ns if isinstance(step_ns, tuple) else (step_ns,) * num_ranks
        for rank, rank_ns in enumerate(times[:num_ranks]):
            lines = [
                StepRecord(
                    launch_id, number, 0, i, kind, round(rank_ns), more.get("phases", {}), more.get("peak")
                )
                for i in range(steps)
            ]
            append_lines(self.run.steps(variant.id, rank), lines)

    def rounds(
        self, variant: Variant, launch_id: str, times_ms: Sequence[float], kind: Kind = "timed"
    ) -> None:
        for number, time_ms in enumerate(times_ms, 1):
            self.block(variant, launch_id, number, time_ms * 1e6, kind)

    def close(self, *variants: Variant, status: Status = "ok", **more: Any) -> None:
        for variant in variants:
            write_json(self.run.status(variant.id), VariantStatus(status, **more))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(RunDir(tmp_path))


def by_id(comparison: Comparison) -> dict[str, VariantResult]:
    return {result.id: result for result in comparison.variants}


def add_load(
    files: Files,
    variant: Variant,
    queue_ms: float = 30.0,
    reason: str | None = None,
    others_ms: float | None = None,
) -> None:
    """Has rank 1 of the variant wait so long in each step, while others have the cores."""
    for path in files.run.variant(variant.id).glob("rank1.jsonl"):
        text = path.read_text()
        found = json.dumps(
            {"queue_ns": round(queue_ms * 1_000_000), "throttled": reason}, separators=(",", ":")
        )
        text = text.replace('"queue_ns":null,"throttled":null', found[1:-1])
        if others_ms is not None:
            text = text.replace('"others_ns":null', f'"others_ns":{round(others_ms * 1_000_000)}')
        path.write_text(text)
    for path in files.run.path.glob("variants/*/rank*.jsonl"):
        path.write_text(path.read_text().replace('"queue_ns":null', '"queue_ns":0'))


def add_cpu_time(files: Files, variant: Variant, cpu_ms: float) -> None:
    """Has each rank of the variant take so much CPU time in each step, give or take a thousandth."""
    for path in files.run.variant(variant.id).glob("rank*.jsonl"):
        lines = path.read_text().splitlines()
        cpu_ns = (round(cpu_ms * 1e6 * (1 + wobble(number))) for number in range(len(lines)))
        text = (
            line.replace('"cpu_ns":null', f'"cpu_ns":{ns}') for line, ns in zip(lines, cpu_ns, strict=True)
        )
        path.write_text("\n".join(text) + "\n")


def wobble(number: int) -> float:
    """A small deterministic scatter, symmetric about 0."""
    return 0.001 * ((number * 7) % 11 - 5)


def splits_plan(**changes: Any) -> Plan:
    return plan([EVEN, UNEVEN], [launch("01-ddp-2", "ddp-2", 0, [EVEN, UNEVEN])], **changes)


def write_splits(files: Files, rounds: int = 28, ratio: float = 1.2) -> None:
    """ddp even at 100 ms, 48/16 at `ratio` of it, both drifting upwards together."""
    write_json(files.run.plan, splits_plan())
    drift = [100.0 + 2 * i for i in range(rounds)]
    files.rounds(EVEN, "01-ddp-2", drift)
    files.rounds(EVEN, "01-ddp-2", [ms * (1 + wobble(i)) for i, ms in enumerate(drift)], "aa")
    files.rounds(UNEVEN, "01-ddp-2", [ms * ratio * (1 + wobble(i)) for i, ms in enumerate(drift)])
    files.close(EVEN, UNEVEN)
