"""Damaged traces, analysed and shown as by `gpurun trace`."""

import gzip
import random
from functools import cache
from pathlib import Path

import msgspec

from gpurun.launcher.errors import GpurunError
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from tests.damage.content import damaged
from tests.unit.trace.trace_files import kernel, launch, rank_info, step, write

COUNT = 10_000
RUNS = Path(__file__).resolve().parents[2] / "docs" / "runs"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def case(chance: random.Random, directory: Path) -> None:
    """Traces are analysed as far as they can be read, or refused with a message that names the file."""
    damage(chance, directory)
    try:
        report = analyse_paths([directory])
    except GpurunError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "rank" in message
        return
    assert render_trace(report, 100)
    assert msgspec.json.decode(msgspec.json.encode(report))


def damage(chance: random.Random, directory: Path) -> None:
    """One or two ranks' traces, one of them damaged before or after it is compressed."""
    content = chance.choice((recorded(), by_hand(directory)))
    ranks = chance.choice((1, 2))
    for rank in range(ranks - 1):
        (directory / f"rank{rank}.pt.trace.json").write_bytes(content)
    name = directory / f"rank{ranks - 1}.pt.trace.json"
    match chance.choice(("plain", "plain", "plain", "inside", "gzip")):
        case "plain":
            name.write_bytes(damaged(content, chance))
        case "inside":
            name.with_suffix(".json.gz").write_bytes(gzip.compress(damaged(content, chance), 1))
        case _:
            name.with_suffix(".json.gz").write_bytes(damaged(gzip.compress(content, 1), chance))


@cache
def recorded() -> bytes:
    """A rank's trace of a recorded run, on CPUs."""
    return gzip.decompress(next(RUNS.rglob("rank0.pt.trace.json.gz")).read_bytes())


def by_hand(directory: Path) -> bytes:
    """A small trace with kernels and collectives."""
    events = []
    for n in range(3):
        at, number = 300 * n, 10 * n
        events += [step(n, at, 290), launch(at + 10, 2, number + 1), launch(at + 40, 2, number + 2)]
        events += [kernel("gemm", at + 20, 30, number + 1)]
        events += [kernel(ALL_REDUCE, at + 50, 20, number + 2, stream=20)]
    path = write(directory / "rank.json", events, **rank_info(0, 2))
    content = path.read_bytes()
    path.unlink()
    return content
