"""Makes a `TraceReport` from files: reads each, matches the ranks, converts to µs, adds tables on request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any

from gpurun.launcher.errors import SpecError, TraceError
from gpurun.launcher.findings.finding import Finding, noticed, with_figures
from gpurun.launcher.trace.analysis.collectives.clocks import Clocks, Realigned, Shift
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.analysis.collectives.match import (
    Collective,
    Matched,
    RankCollectives,
    bandwidths,
    last_rank,
    match,
)
from gpurun.launcher.trace.analysis.critical_path import (
    Graph,
    RankTasks,
    StepEnds,
    Tasks,
    critical_path,
    join,
    savings,
)
from gpurun.launcher.trace.analysis.digest import MAX_STEPS, Digest
from gpurun.launcher.trace.analysis.discover import (
    HOW_TO_TRACE,
    LEFT_OUT,
    Ranked,
    assign_ranks,
    find_traces,
    of_one_job,
)
from gpurun.launcher.trace.analysis.on_request.call_tree import operator_totals
from gpurun.launcher.trace.analysis.on_request.rank_tables import (
    Copies,
    LaunchStatistics,
    thinned,
)
from gpurun.launcher.trace.analysis.on_request.shapes import kernel_totals, shape_totals
from gpurun.launcher.trace.analysis.parallelism import (
    GroupKinds,
    Views,
    group_kinds,
    parallel_kinds,
    pipeline,
)
from gpurun.launcher.trace.analysis.rank_trace import MatchedRank, rank_trace
from gpurun.launcher.trace.explain import CPU, explain, outlying_steps, stragglers
from gpurun.launcher.trace.model import (
    CollectivePart,
    CollectiveReport,
    CollectiveTotal,
    CopyTotal,
    CpuFacts,
    CriticalPath,
    LaunchTotals,
    PipelineStage,
    Saving,
    Table,
    TraceReport,
    overall_gb_per_s,
)
from gpurun.launcher.trace.parallel import Read, read_all
from gpurun.launcher.units import first_of

MENTION_SLACK_NS = 10_000
"""Uncertainty of a clock from which on it is mentioned."""
MAX_RANKS_SHOWN = 8
MAX_TASKS = 200_000
"""The most tasks of all ranks together in the steps that are replayed."""
MAX_UNIX_NS = 1 << 63
"""Later times, after the year 2262, aren't Unix times; then only differences count."""


Ranks = Sequence[tuple[int, Digest]]


@dataclass(frozen=True)
class Analysis:
    """A report and the digests it was made from."""

    report: TraceReport
    ranked: Ranked
    matched: Matched

    def stages_in(self, steps: Set[int]) -> tuple[PipelineStage, ...]:
        """The stages of the pipeline, as the means of these steps alone."""
        stages = _kinds(self.ranked, self.matched).stages
        views = tuple(_views(self.ranked, self.matched, 0)) if stages else ()
        return pipeline(_whole(views), stages, self.matched.offsets, steps)

    def cpu_in(self, steps: Set[int]) -> dict[int, CpuFacts]:
        """What holds of each rank's CPU in every one of these steps."""
        return {
            rank: reduce(CpuFacts.common, (digest.step_cpu[step] for step in steps))
            if steps and steps <= digest.step_cpu.keys()
            else digest.cpu.of_job
            for rank, digest in self.ranked.digests
        }

    def of_rank(self, rank: int) -> TraceReport:
        """The report with one rank's figures, and the tables on request of its part alone.

        Without a critical path: it goes over all ranks.
        """
        mine = replace(
            self.report,
            ranks=tuple(each for each in self.report.ranks if each.rank == rank),
        )
        digests = [(number, each) for number, each in self.ranked.digests if number == rank]
        return replace(_with_tables(mine, digests, self.matched), critical_path=None)


def analyse_paths(
    paths: Sequence[Path],
    steps: slice | None = None,
    show: Set[Table] = frozenset(),
    within: Sequence[Path] = (),
) -> TraceReport:
    """The report on all traces in `paths`, files or directories: the ranks of one capture.

    Args:
        paths: Kineto traces, or directories of them.
        steps: numbers of the steps to look at, the last one excluded, as `slice(A, B)`; `None`: everything.
        show: the tables to make in addition, which takes longer.
        within: where they have to be, as `find_traces` takes it.

    Raises:
        TraceError: no readable trace is found, or those of several jobs; the message says which.
        SpecError: no trace has any of the steps.
    """
    return analyse(paths, steps, show, within=within).report


def analyse(
    paths: Sequence[Path],
    steps: slice | None = None,
    show: Set[Table] = frozenset(),
    among: Sequence[Path] = (),
    within: Sequence[Path] = (),
) -> Analysis:
    """Like `analyse_paths`, with each rank's digest and the collectives as they were matched.

    `among`: all traces that are read for the same answer, if these are some of them.
    """
    found = find_traces(paths, within)
    reads = read_all(found.files, steps, show, among, found.within)
    return combine(reads, found.notes, found.searched)


def combine(reads: Sequence[Read], notes: Sequence[Finding] = (), searched: Sequence[Path] = ()) -> Analysis:
    """Like `analyse`, from files that have been read, each by `digest_file`.

    Args:
        reads: the files.
        notes: on files that weren't read.
        searched: directories in which the files were found.

    Raises:
        TraceError: none could be read, or they are of several jobs; the message lists all with the reason.
        SpecError: steps were chosen that none of them has.
    """
    read = [each for each in reads if isinstance(each, Digest)]
    notes = (*notes, *(noticed("not-read", why=each) for each in reads if isinstance(each, str)))
    if not read:
        texts = (each.text for each in notes)
        raise TraceError("\n".join(["none of the traces can be analysed:", *texts, HOW_TO_TRACE]))
    job = of_one_job(read, searched)
    lacking = _without_chosen_steps(job.digests)
    ranked = assign_ranks(job.digests, lacking)
    matched = match([_collectives_of(rank, digest) for rank, digest in ranked.digests])
    of_files = (note for _, digest in ranked.digests for note in digest.notes)
    without = (each.recorded for each in lacking)
    notes = (*notes, *job.notes, *without, *ranked.notes, *of_files)
    notes = (*notes, *_doubts(ranked, matched), *_clock_notes(matched))
    report = _with_tables(_report(ranked, matched, notes), ranked.digests, matched)
    return Analysis(report, ranked, matched)


def _without_chosen_steps(digests: Sequence[Digest]) -> Sequence[Digest]:
    """The traces that have none of the chosen steps; none where none were chosen.

    Raises:
        SpecError: all are such.
    """
    found = [each for each in digests if not each.steps and each.window is not None]
    if len(found) == len(digests):
        texts = (each.recorded.text for each in found)
        raise SpecError("\n".join(["no trace has the steps that --steps asks for:", *texts]))
    return found


def _collectives_of(rank: int, digest: Digest) -> RankCollectives:
    numbers = {scope.position: scope.step for scope in digest.steps}
    steps = {at: number for at, number in numbers.items() if at is not None and number is not None}
    return RankCollectives(
        rank, digest.base_ns, digest.collectives, steps, digest.world_size, digest.clock, digest.host
    )


def _doubts(ranked: Ranked, matched: Matched) -> Iterator[Finding]:
    """Notes that a reader needs to interpret the figures."""
    ranks = [rank for rank, _ in ranked.digests]
    sizes = sorted({digest.world_size for _, digest in ranked.digests if digest.world_size is not None})
    if len(sizes) == 1 and sizes[0] > len(ranks):
        case = "ranks-missing" if len(ranks) > 1 else "one-rank-present"
        yield noticed(case, num_present=len(ranks), num_ranks=sizes[0])
    partial = [rank for rank, digest in ranked.digests if digest.is_partial]
    if partial and len(partial) < len(ranks):
        yield _noticed_of("ranks-cut-off", partial)
    if len(sizes) > 1:
        yield noticed("world-sizes", sizes=sizes)
    by_range: defaultdict[str, list[int]] = defaultdict(list)
    for rank, digest in ranked.digests:
        by_range[_step_range(digest)].append(rank)
    if len(by_range) > 1:
        recorded = [f"{steps} on {_ranks_text(of)}" for steps, of in by_range.items()]
        yield noticed("different-steps", recorded=recorded)
    unknown = matched.unknown_groups + matched.unknown_peers
    open_waits = [each for each in matched.collectives if not each.matched]
    alone = sum(len(each.parts) == 1 for each in open_waits) - unknown
    loose = sum(len(each.parts) > 1 for each in open_waits)
    if matched.unknown_groups and len(ranks) > 1:
        yield noticed("unknown-groups", num_collectives=matched.unknown_groups)
    if matched.unknown_peers and len(ranks) > 1:
        yield noticed("unknown-peers", num_messages=matched.unknown_peers)
    if alone and len(ranks) > 1:
        yield noticed("on-one-rank", num_alone=alone, num_collectives=len(matched.collectives))
    if loose:
        yield noticed("unknown-waits", num_exchanges=loose)


def _clock_notes(matched: Matched) -> Iterator[Finding]:
    """How well the clocks are known of ranks that share no collective with the lowest one."""
    clocks = matched.clocks
    if not matched.collectives:
        return
    if unlinked := [rank for part in clocks.unlinked for rank in part]:
        yield _noticed_of("clocks-not-linked", unlinked)
    if one_way := [rank for rank, slack_ns in clocks.slack.items() if slack_ns is None]:
        yield _noticed_of("clocks-linked-one-way", one_way)
    widths = {
        rank: most - least
        for rank, (least, most) in clocks.between.items()
        if rank in clocks.slack
        and least is not None
        and most is not None
        and most - least >= 2 * MENTION_SLACK_NS
    }
    if widths:
        slack = round(max(widths.values()) / 2000)
        yield _noticed_of("clocks-linked-by-messages", list(widths), slack_us=slack)


def _noticed_of(case: str, ranks: Sequence[int], **figures: Any) -> Finding:
    return noticed(case, ranks=ranks, who=_ranks_text(ranks), **figures)


def _ranks_text(ranks: Sequence[int]) -> str:
    named = first_of([str(rank) for rank in sorted(ranks)], MAX_RANKS_SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def _step_range(digest: Digest) -> str:
    numbers = [scope.step for scope in digest.steps if scope.step is not None]
    return f"{min(numbers)} to {max(numbers)}" if numbers else "none"


def _report(ranked: Ranked, matched: Matched, notes: Sequence[Finding]) -> TraceReport:
    base_ns = min(_first_ns(rank, digest, matched.clocks) for rank, digest in ranked.digests) // 1000 * 1000
    views = tuple(_views(ranked, matched, base_ns))
    kinds = _kinds(ranked, matched)
    ranks = [rank for rank, _ in ranked.digests]
    collectives = tuple(_collective(each, kinds.of(each), matched, base_ns) for each in matched.collectives)
    is_any_matched = any(each.matched for each in matched.collectives)  # else no rank is known to be late
    report = TraceReport(
        schema=4,
        base_time_ns=base_ns if abs(base_ns) < MAX_UNIX_NS else 0,
        clock_offsets_us={str(rank): matched.offsets[rank] / 1000 for rank in ranks},
        clock_offset_bounds_us={str(rank): _in_us(matched.clocks.between[rank]) for rank in ranks},
        clock_drift_ppm={str(rank): _ppm(matched.clocks.rates.get(rank)) for rank in ranks},
        clock_drift_bounds_ppm={str(rank): _bounds_ppm(matched.clocks.bounds.get(rank)) for rank in ranks},
        ranks=tuple(rank_trace(rank, view) for rank, view in views),
        groups={each.group: each.group_ranks for each in matched.collectives},
        collectives=collectives,
        stragglers=tuple(stragglers(collectives, ranks)) if is_any_matched else (),
        parallelism=parallel_kinds(_whole(views), kinds),
        pipeline=pipeline(_whole(views), kinds.stages, matched.offsets),
    )
    outlying = {each.step for each in outlying_steps(report.ranks)}
    saved, unreplayed = _savings(ranked, matched, report, outlying)
    report = replace(report, savings=saved, unreplayed=unreplayed)
    left_out = Counter[str]()
    for each in notes:
        if (case := each.figures.get("case")) in (*LEFT_OUT, "other-jobs"):
            left_out["num_captures" if case == "captures" else "num_left_out"] += each.figures["num_captures"]
    usual = _of_usual_steps(Analysis(report, ranked, matched), outlying) if outlying else report
    digests = ranked.digests if outlying else ()
    cpu = {(rank, step): facts for rank, each in digests for step, facts in each.step_cpu.items()}
    first, *causes = explain(usual, unreplayed, cpu)
    first = with_figures(first, **left_out)
    by_place = any(each.figures.get("case") == "rank-by-place" for each in notes)
    if len(ranks) > 1 and by_place and not any(each.matched for each in matched.collectives):
        first = with_figures(first, num_assumed=len(ranks))
    return replace(report, findings=(first, *causes, *notes))


def _of_usual_steps(found: Analysis, outlying: Set[int]) -> TraceReport:
    """The report with the pipeline and the facts of the CPU of all steps but these.

    Of `MAX_STEPS` or more those of the CPU are of all steps, without times of what is done once.
    """
    report = found.report
    steps = {step.step for rank in report.ranks for step in rank.steps} - outlying
    cpu = {rank.rank: replace(rank.cpu, once_us={}) for rank in report.ranks}
    if len(steps) < MAX_STEPS:
        cpu = found.cpu_in(steps)
    ranks = tuple(replace(rank, cpu=cpu[rank.rank]) for rank in report.ranks)
    return replace(report, ranks=ranks, pipeline=found.stages_in(steps) if report.pipeline else ())


def _savings(
    ranked: Ranked, matched: Matched, report: TraceReport, outlying: Set[int]
) -> tuple[tuple[Saving, ...], str]:
    """By a replay of the same steps of all ranks, or why there is none; ranks of one stage do the same.

    They are of a step that isn't outlying, if there are any of both.
    """
    if not _has_times(ranked.digests):
        return (), "times"
    sizes = {digest.world_size for _, digest in ranked.digests} - {None}
    if len(ranked.digests) < max((size or 0 for size in sizes), default=0):
        return (), "ranks"
    if len({rank.device.startswith(CPU) for rank in report.ranks}) > 1:
        return (), "devices"
    tasks = list[tuple[int, Tasks]]()
    for rank, digest in ranked.digests:
        if digest.unreplayed or digest.tasks is None:
            return (), digest.unreplayed
        tasks.append((rank, digest.tasks))
    numbers, *others = {tuple(scope.step for scope in digest.steps) for _, digest in ranked.digests}
    if others:
        return (), "steps"
    if sum(len(each.ends) for _, each in tasks) > MAX_TASKS:
        return (), "long"
    peers = [stage.ranks for stage in report.pipeline] or [tuple(rank for rank, _ in tasks)]
    spans_us = [
        sum(step.span_us for step in rank.steps) if numbers else rank.total.span_us for rank in report.ranks
    ]
    groups = {kind.kind: kind.groups for kind in report.parallelism}
    graph = _graph(tasks, ranked.digests, matched)
    places = tuple(place for place, number in enumerate(numbers) if number not in outlying)
    ends = _step_ends(tasks, ranked.digests, matched)
    steps = StepEnds(ends, places or range(len(numbers))) if numbers else None
    saved = savings(graph, len(numbers), peers, groups, 1000 * max(spans_us), steps)
    return saved, "" if saved else "length"


def _step_ends(
    tasks: Sequence[tuple[int, Tasks]], digests: Ranks, matched: Matched
) -> dict[int, Sequence[int]]:
    """When the steps of each rank end, in ns since the first task of all."""
    clocks = _since_first(tasks, digests, matched)
    return {
        rank: [clocks[rank].time_ns(step.measure.end) for step in digest.steps]
        for rank, digest in digests
        if rank in clocks
    }


def _has_times(digests: Ranks) -> bool:
    """Whether all times fit into a column of ns; else they are damage."""
    return all(abs(digest.base_ns) < MAX_UNIX_NS for _, digest in digests)


def _graph(tasks: Sequence[tuple[int, Tasks]], digests: Ranks, matched: Matched) -> Graph:
    clocks = _since_first(tasks, digests, matched)
    return join([RankTasks(rank, each, clocks[rank]) for rank, each in tasks], matched.collectives)


def _since_first(
    tasks: Sequence[tuple[int, Tasks]], digests: Ranks, matched: Matched
) -> dict[int, Realigned]:
    """Turns the times of each rank's digest into those since the first task of all."""
    bases_ns = {rank: digest.base_ns for rank, digest in digests}
    clocks = {rank: matched.clocks.realigned(rank, bases_ns[rank], 0) for rank, _ in tasks}
    first_ns = min(clocks[rank].time_ns(each.start) for rank, each in tasks)
    return {rank: matched.clocks.realigned(rank, bases_ns[rank], first_ns) for rank in clocks}


def _in_us(bounds_ns: Shift) -> tuple[float | None, float | None]:
    least, most = bounds_ns
    return None if least is None else least / 1000, None if most is None else most / 1000


def _ppm(rate: float | None) -> float | None:
    return None if rate is None else rate * 1e6


def _bounds_ppm(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if bounds is None else (bounds[0] * 1e6, bounds[1] * 1e6)


def _kinds(ranked: Ranked, matched: Matched) -> GroupKinds:
    digests = [digest for _, digest in ranked.digests]
    sizes = {digest.world_size for digest in digests}
    num_ranks = sizes.pop() if len(sizes) == 1 else None
    return group_kinds(matched.collectives, num_ranks, any(each.wraps_data_parallel for each in digests))


def _views(ranked: Ranked, matched: Matched, base_ns: int) -> Iterator[tuple[int, MatchedRank]]:
    parts: defaultdict[int, list[tuple[Collective, RankPart]]] = defaultdict(list)
    for each in matched.collectives:
        for part in each.parts:
            parts[part.rank].append((each, part))
    for rank, digest in ranked.digests:
        realigned = matched.clocks.realigned(rank, digest.base_ns, base_ns)
        yield rank, MatchedRank(digest, realigned, tuple(parts[rank]))


def _whole(views: Views) -> Views:
    """Views of the files that don't end early, else all: what others lack would look like waiting."""
    return tuple((rank, view) for rank, view in views if not view.digest.is_partial) or views


def _first_ns(rank: int, digest: Digest, clocks: Clocks) -> int:
    first_ns = min(scope.measure.start for scope in (digest.total, *digest.steps))
    return clocks.realigned(rank, digest.base_ns, 0).time_ns(first_ns)


def _collective(each: Collective, parallelism: str, matched: Matched, base_ns: int) -> CollectiveReport:
    algorithm, bus = bandwidths(each)
    return CollectiveReport(
        group=each.group,
        seq=each.seq,
        kind=each.kind,
        parallelism=parallelism,
        bytes=each.num_bytes,
        dtype=each.dtype,
        algorithm_gb_per_s=algorithm,
        bus_gb_per_s=bus,
        last_rank=last_rank(each, matched.clocks),
        ranks=tuple(
            CollectivePart(
                rank=part.rank,
                start_us=(part.start_ns - matched.offsets[part.rank] - base_ns) / 1000,
                wait_us=each.waits[part.rank] / 1000 if each.matched else None,
                transfer_us=each.transfer(part) / 1000 if each.matched else None,
            )
            for part in each.parts
        ),
    )


def _with_tables(report: TraceReport, digests: Ranks, matched: Matched) -> TraceReport:
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
        critical_path=_path(digests, matched) if "critical-path" in wanted else None,
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
    rows = [_collective_total(same, ranks) for same in found.values()]
    return tuple(sorted(rows, key=lambda row: -(row.wait_us or 0.0) - row.count * (row.transfer_us or 0.0)))


def _collective_total(same: Sequence[CollectiveReport], ranks: Set[int]) -> CollectiveTotal:
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
        algorithm_gb_per_s=overall_gb_per_s(matched, lambda each: each.algorithm_gb_per_s),
        bus_gb_per_s=overall_gb_per_s(matched, lambda each: each.bus_gb_per_s),
        arrival_spread_us=_mean([_spread(each) for each in matched]),
        wait_us=sum(waits) if waits else None,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


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


def _path(digests: Ranks, matched: Matched) -> CriticalPath | None:
    found = [(rank, digest.tasks) for rank, digest in digests if digest.tasks is not None]
    if not found or not _has_times(digests):
        return None
    numbers, *others = {tuple(scope.step for scope in digest.steps) for _, digest in digests}
    ends = _step_ends(found, digests, matched)
    steps = StepEnds(ends, range(len(numbers))) if numbers and not others else None
    num_steps = max(len(digest.steps) for _, digest in digests)
    return critical_path(_graph(found, digests, matched), num_steps, steps)
