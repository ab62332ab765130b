"""Step records as series of points for charts: per step and rank, and per round."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite

from gpurun.launcher.compare.figures.recorded import step_numbers
from gpurun.launcher.compare.figures.slowest import BEFORE_COMMUNICATION
from gpurun.launcher.compare.size_curves import CurvePoint, ProbeResult
from gpurun.launcher.rundir.records import StepRecord

NS_PER_MS = 1e6


@dataclass(frozen=True)
class Times:
    """What happened when, in seconds since the epoch. Records carry durations only."""

    rounds: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """When each round of a launch began."""
    progress: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Of each launch of a program: how many steps had ended when."""

    @property
    def known(self) -> list[float]:
        """All of them."""
        return [*self.rounds.values(), *(time_s for points in self.progress.values() for _, time_s in points)]

    def began(self, records: Sequence[StepRecord]) -> list[float]:
        """When each step began: its round's start, plus the steps of the block before it.

        Of a program, whose records may be a sample, when the steps before it had ended.
        """
        times: list[float] = []
        ended = {launch: [num for num, _ in points] for launch, points in self.progress.items() if points}
        ended_s = {launch: [time_s for _, time_s in self.progress[launch]] for launch in ended}
        now_s, last = min(self.rounds.values(), default=0.0), None
        for record in records:
            if (record.launch, record.round) != last:
                last = (record.launch, record.round)
                now_s = self.rounds.get(last, now_s)
            if record.launch in ended:
                times.append(_between(ended[record.launch], ended_s[record.launch], record))
            else:
                times.append(now_s)
            now_s += record.step_ns / 1e9
        return times


def _between(ended: Sequence[int], times_s: Sequence[float], record: StepRecord) -> float:
    """When a step began that so many steps came before; before the first point, by its own length.

    Args:
        ended: how many steps had ended at some points, in rising order.
        times_s: when that was.
    """
    after = bisect_right(ended, record.step)
    if after == 0:
        return times_s[0] - (ended[0] - record.step) * record.step_ns / 1e9
    if after == len(ended):
        return times_s[-1]
    share = (record.step - ended[after - 1]) / (ended[after] - ended[after - 1])
    return times_s[after - 1] + share * (times_s[after] - times_s[after - 1])


@dataclass(frozen=True)
class Point:
    """What was measured at one step or in one round, by tag, in milliseconds."""

    step: int
    wall_time_s: float
    values: Mapping[str, float]


def step_points(ranks: Mapping[int, Sequence[StepRecord]], times: Times) -> list[Point]:
    """A point per timed step: `step_ms/rank0`, `phases_ms/rank0/forward`.

    Steps count from 0 over all rounds and launches, those that a sample leaves out as well. A phase that is
    zero throughout has no tag.
    """
    phases = _used_phases(ranks)
    timed = {rank: _timed(records) for rank, records in ranks.items()}
    longest = max(timed.values(), key=len, default=[])
    return [
        Point(number, time_s, _step_values(_at(timed, position), phases))
        for position, (number, time_s) in enumerate(
            zip(step_numbers(longest), times.began(longest), strict=True)
        )
    ]


def round_points(ranks: Mapping[int, Sequence[StepRecord]], times: Times) -> list[Point]:
    """A point per round, from the means of its block of steps.

    `step_ms/round` is the maximum over ranks, `slowest_rank_ms/PHASE` what the slowest-computing rank does,
    and `ahead_ms/rankN` how much earlier than that one a rank is through with its forward pass: the time
    that it then waits.
    """
    phases = _used_phases(ranks)
    blocks = {rank: _blocks(records) for rank, records in ranks.items()}
    first = [block[0] for block in next(iter(blocks.values()), {}).values()]
    points = []
    for number, (record, time_s) in enumerate(zip(first, times.began(first), strict=True), start=1):
        key = (record.launch, record.round)
        block = {rank: found[key] for rank, found in blocks.items() if key in found}
        points.append(Point(number, time_s, _round_values(block, phases)))
    return points


def curve_points(probe: ProbeResult | None, time_s: float) -> list[Point]:
    """A point per size of a micro-benchmark's curves, at the size in place of a step: `curve/SERIES/us`."""
    return [
        Point(point.size, time_s, _finite(_curve_values(curve.series.replace(" ", "_"), point)))
        for curve in (probe.curves if probe else ())
        for point in curve.points
    ]


def _curve_values(series: str, point: CurvePoint) -> dict[str, float]:
    rates = {"GB_per_s": point.gb_per_s, "bus_GB_per_s": point.bus_gb_per_s, "GFLOP_per_s": point.gflop_per_s}
    known = {f"curve/{series}/{name}": rate for name, rate in rates.items() if rate is not None}
    return {f"curve/{series}/us": point.time_us, **known}


def _at(timed: Mapping[int, Sequence[StepRecord]], step: int) -> dict[int, StepRecord]:
    return {rank: records[step] for rank, records in timed.items() if step < len(records)}


def _step_values(records: Mapping[int, StepRecord], phases: Sequence[str]) -> dict[str, float]:
    values = {f"step_ms/rank{rank}": record.step_ns / NS_PER_MS for rank, record in records.items()}
    for rank, record in records.items():
        for phase in phases:
            values[f"phases_ms/rank{rank}/{phase}"] = record.phases_ns.get(phase, 0) / NS_PER_MS
    return _finite(values)


def _round_values(block: Mapping[int, Sequence[StepRecord]], phases: Sequence[str]) -> dict[str, float]:
    means = {rank: _mean_ms(records, phases) for rank, records in block.items()}
    early = {rank: sum(ms.get(phase, 0.0) for phase in BEFORE_COMMUNICATION) for rank, ms in means.items()}
    slowest = max(early, key=lambda rank: early[rank])
    values = {"step_ms/round": max(ms["step"] for ms in means.values())}
    values |= {f"slowest_rank_ms/{phase}": means[slowest][phase] for phase in phases}
    if len(means) > 1 and early[slowest] > 0:  # of a program's steps no phase is known
        values |= {f"ahead_ms/rank{rank}": early[slowest] - ms for rank, ms in early.items()}
    return _finite(values)


def _mean_ms(records: Sequence[StepRecord], phases: Sequence[str]) -> dict[str, float]:
    count = len(records) * NS_PER_MS
    means = {phase: sum(record.phases_ns.get(phase, 0) for record in records) / count for phase in phases}
    times_ns = (record.step_ns if record.block_ns is None else record.block_ns for record in records)
    return {"step": sum(times_ns) / count, **means}


def _blocks(records: Sequence[StepRecord]) -> dict[tuple[str, int], list[StepRecord]]:
    by_round = groupby(_timed(records), key=lambda record: (record.launch, record.round))
    return {key: list(block) for key, block in by_round}


def _timed(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.kind == "timed"]


def _used_phases(ranks: Mapping[int, Sequence[StepRecord]]) -> list[str]:
    """In the order in which they happen, as the workers write them."""
    found = {
        phase: None
        for records in ranks.values()
        for record in _timed(records)
        for phase, ns in record.phases_ns.items()
        if ns > 0
    }
    return list(found)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without NaN and infinity, which break the axes of a chart."""
    return {tag: value for tag, value in values.items() if isfinite(value)}
