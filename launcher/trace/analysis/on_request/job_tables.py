"""The tables on request, of all ranks together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from statistics import fmean

from gpurun.launcher.trace.analysis.collectives.match import Matched
from gpurun.launcher.trace.analysis.critical.graph import RankTasks, critical_path, join
from gpurun.launcher.trace.analysis.digest import Digest
from gpurun.launcher.trace.analysis.on_request.call_tree import operator_totals
from gpurun.launcher.trace.analysis.on_request.rank_tables import (
    Copies,
    LaunchStatistics,
    RankTables,
    thinned,
)
from gpurun.launcher.trace.analysis.on_request.shapes import kernel_totals, shape_totals
from gpurun.launcher.trace.model import (
    CollectiveReport,
    CollectiveTotal,
    CopyTotal,
    CriticalPath,
    LaunchTotals,
    TraceReport,
)

Ranks = Sequence[tuple[int, Digest]]


def with_tables(report: TraceReport, digests: Ranks, matched: Matched) -> TraceReport:
    """The report with the tables that the digests were made for, of the ranks that are given.

    Of collectives, where only one rank is given, those that it takes part in, and its own waiting.
    """
    tables = [(rank, digest.tables) for rank, digest in digests if digest.tables is not None]
    if not tables:
        return report
    kernels = [each.kernels for _, each in tables if each.kernels is not None]
    shapes = [each.shapes for _, each in tables if each.shapes is not None]
    in_steps = [each.step_shapes for _, each in tables if each.step_shapes is not None]
    trees = [each.operators for _, each in tables if each.operators is not None]
    step_trees = [each.step_operators for _, each in tables if each.step_operators is not None]
    copies = [each.copies for _, each in tables if each.copies is not None]
    feeding = [(rank, each.launches) for rank, each in tables if each.launches is not None]
    wanted = digests[0][1].show
    return replace(
        report,
        kernels_by_shape=kernel_totals(kernels) if "kernels" in wanted else None,
        shapes=shape_totals(shapes) if "shapes" in wanted else None,
        shapes_in_steps=shape_totals(in_steps) if in_steps else None,
        operators=operator_totals(trees) if "operators" in wanted else None,
        operators_in_steps=operator_totals(step_trees) if step_trees else None,
        collective_totals=(
            _collectives(report.collectives, {rank for rank, _ in digests})
            if "collectives" in wanted
            else None
        ),
        copies=_copies(copies) if "copies" in wanted else None,
        launches=_launches(feeding, digests, report.base_time_ns) if "launches" in wanted else None,
        critical_path=_path(tables, digests, matched),
    )


def _copies(ranks: Iterable[Sequence[Copies]]) -> tuple[CopyTotal, ...]:
    found: dict[str, list[Copies]] = {}
    for row in (row for rows in ranks for row in rows):
        found.setdefault(row.direction, []).append(row)
    totals = [_copy(direction, rows) for direction, rows in found.items()]
    return tuple(sorted(totals, key=lambda row: -row.device_us))


def _copy(direction: str, rows: Sequence[Copies]) -> CopyTotal:
    sizes = [row.num_bytes for row in rows]
    num_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
    ns = sum(row.device_ns for row in rows)
    return CopyTotal(
        direction=direction,
        count=sum(row.count for row in rows),
        bytes=num_bytes,
        device_us=ns / 1000,
        gb_per_s=num_bytes / ns if num_bytes is not None and ns else None,
        exposed_us=sum(row.exposed_ns for row in rows) / 1000,
    )


def _collectives(collectives: Iterable[CollectiveReport], ranks: Set[int]) -> tuple[CollectiveTotal, ...]:
    """Collectives by group, operation, size and type; those with most transfer and waiting first."""
    found: defaultdict[tuple[object, ...], list[CollectiveReport]] = defaultdict(list)
    for each in collectives:
        if any(part.rank in ranks for part in each.ranks):
            found[each.group, each.kind, each.bytes, each.dtype].append(each)
    rows = [_collective(same, ranks) for same in found.values()]
    return tuple(sorted(rows, key=lambda row: -(row.wait_us or 0.0) - row.count * (row.transfer_us or 0.0)))


def _collective(same: Sequence[CollectiveReport], ranks: Set[int]) -> CollectiveTotal:
    first = same[0]
    matched = [each for each in same if each.ranks[0].transfer_us is not None]
    parts = [part for each in matched for part in each.ranks if part.rank in ranks]
    waits = [part.wait_us for part in parts if part.wait_us is not None]
    transfers = [min(part.transfer_us or 0.0 for part in each.ranks) for each in matched]
    return CollectiveTotal(
        group=first.group,
        kind=first.kind,
        bytes=first.bytes,
        dtype=first.dtype,
        count=len(same),
        transfer_us=_mean(transfers),
        algorithm_gb_per_s=_rate([each.algorithm_gb_per_s for each in matched]),
        bus_gb_per_s=_rate([each.bus_gb_per_s for each in matched]),
        arrival_spread_us=_mean([_spread(each) for each in matched]),
        wait_us=sum(waits) if waits else None,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rate(rates: Iterable[float | None]) -> float | None:
    """Bytes per second of all together: all have the same size, so the harmonic mean."""
    known = [rate for rate in rates if rate]
    return len(known) / sum(1 / rate for rate in known) if known else None


def _spread(each: CollectiveReport) -> float | None:
    starts = [part.start_us for part in each.ranks]
    return max(starts) - min(starts) if len(starts) > 1 else None


def _launches(
    ranks: Iterable[tuple[int, LaunchStatistics]], digests: Ranks, base_ns: int
) -> tuple[LaunchTotals, ...]:
    bases = {rank: digest.base_ns - base_ns for rank, digest in digests}
    return tuple(_launch_totals(rank, each, bases[rank]) for rank, each in ranks)


def _launch_totals(rank: int, each: LaunchStatistics, shift_ns: int) -> LaunchTotals:
    half, most, nearly_all, largest = each.delay_percentiles
    points = thinned(each.queue_times, each.queue_lengths)
    return LaunchTotals(
        rank=rank,
        delay_percentiles_us=(half / 1000, most / 1000, nearly_all / 1000, largest / 1000),
        queue_mean=each.queue_mean,
        queue_max=each.queue_max,
        queue_empty_percent=100 * each.queue_empty,
        queue=tuple(((time + shift_ns) / 1000, length) for time, length in points),
        short_kernels=each.short,
        short_us=each.short_ns / 1000,
        slow_launches=each.slow_launches,
    )


def _path(tables: Sequence[tuple[int, RankTables]], digests: Ranks, matched: Matched) -> CriticalPath | None:
    shifts = {rank: digest.base_ns - matched.offsets[rank] for rank, digest in digests}
    found = [(rank, each.tasks) for rank, each in tables if each.tasks is not None]
    if not found:
        return None
    first_ns = min(tasks.start + shifts[rank] for rank, tasks in found)
    ranks = [RankTasks(rank, tasks, shifts[rank] - first_ns) for rank, tasks in found]
    return critical_path(join(ranks, matched.collectives), max(each.num_steps for _, each in tables))
