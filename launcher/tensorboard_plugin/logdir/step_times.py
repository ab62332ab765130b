"""The steps that workers have recorded, thinned out to what a page can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpurun.launcher.compare.figures.recorded import step_numbers
from gpurun.launcher.rundir.paths import rank_files
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.tensorboard_plugin.logdir.directories import read_end
from gpurun.launcher.tensorboard_plugin.logdir.listing import Listed

MAX_BYTES = 64 << 20
"""Of one rank's file, from its end; 300,000 steps."""
MAX_RANKS = 256
MAX_VALUES = 2000
"""Of one variant, over all ranks."""
NUM_SLOWEST = 10
"""Steps that stay in any case."""

Key = tuple[str, int, int, int]
_DECODER = msgspec.json.Decoder(StepRecord)


def variant_steps(listed: Listed, variant: str) -> dict[str, Any]:
    """Every timed step, or evenly chosen ones, on every rank; see README.md."""
    ranks = read_ranks(listed, variant)
    by_rank = {rank: timed(records) for rank, records in ranks.items()}
    common = set.intersection(*(set(steps) for steps in by_rank.values())) if by_rank else set()
    found = {key: one for one in next(iter(ranks.values()), []) if (key := key_of(one)) in common}
    ordered, numbers = list(found), step_numbers(list(found.values()))
    slowest = [max(steps[key] for steps in by_rank.values()) for key in ordered]
    chosen = choose(slowest, max(MAX_VALUES // max(len(by_rank), 1), 2 * NUM_SLOWEST))
    keys = [ordered[i] for i in chosen]
    return {
        "total": len(ordered),
        "ranks": list(by_rank),
        "number": [numbers[i] for i in chosen],
        "round": [key[1] for key in keys],
        "launch": [key[0] for key in keys],
        "step_ms": [slowest[i] for i in chosen],
        "by_rank_ms": [[steps[key] for key in keys] for steps in by_rank.values()],
    }


def read_ranks(listed: Listed, variant: str) -> dict[int, list[StepRecord]]:
    """What each rank has written about the variant."""
    files = list(rank_files(listed.run.variant(variant), ".jsonl").items())
    return {rank: decode(read_end(listed.root, path, MAX_BYTES)) for rank, path in files[:MAX_RANKS]}


def decode(lines: bytes) -> list[StepRecord]:
    """The records; lines that are damaged are left out."""
    found = []
    for line in lines.splitlines():
        try:
            found.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue
    return found


def timed(records: Sequence[StepRecord]) -> Mapping[Key, float]:
    """Milliseconds of the timed steps, in their order."""
    return {key_of(record): record.step_ns / 1e6 for record in records if record.kind == "timed"}


def key_of(record: StepRecord) -> Key:
    """Which step this is, on all ranks."""
    return record.launch, record.round, record.order, record.step


def choose(values: Sequence[float], number: int) -> list[int]:
    """Positions of `number` values, evenly chosen, the largest ones always among them; in order."""
    if len(values) <= number:
        return list(range(len(values)))
    largest = sorted(range(len(values)), key=values.__getitem__)[-NUM_SLOWEST:]
    even = [i * len(values) // (number - NUM_SLOWEST) for i in range(number - NUM_SLOWEST)]
    return sorted({*largest, *even})
