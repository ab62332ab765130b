"""Makes a `TraceReport` from files: reads each, matches the ranks, converts to µs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun.launcher.errors import SpecError, TraceError
from gpurun.launcher.trace.analysis.collectives.clocks import Clocks, Shift
from gpurun.launcher.trace.analysis.collectives.collective import (
    Collective,
    bandwidths,
    last_rank,
    stragglers,
)
from gpurun.launcher.trace.analysis.collectives.local_collectives import Part
from gpurun.launcher.trace.analysis.collectives.match import Matched, RankCollectives, match
from gpurun.launcher.trace.analysis.digest import Digest
from gpurun.launcher.trace.analysis.discover import (
    HOW_TO_TRACE,
    Ranked,
    assign_ranks,
    find_traces,
    of_one_job,
)
from gpurun.launcher.trace.analysis.on_request.job_tables import with_tables
from gpurun.launcher.trace.analysis.parallelism import (
    GroupKinds,
    Views,
    group_kinds,
    parallel_kinds,
    pipeline,
)
from gpurun.launcher.trace.analysis.rank_trace import RankView, rank_trace
from gpurun.launcher.trace.explain import explain
from gpurun.launcher.trace.model import (
    CollectivePart,
    CollectiveReport,
    PipelineStage,
    StragglerReport,
    TraceReport,
)
from gpurun.launcher.trace.parallel import Read, read_all
from gpurun.launcher.trace.requested_tables import Table
from gpurun.launcher.units import first_of, format_count, plural

MENTION_SLACK_NS = 10_000
"""From here on it is said how well a clock is known."""
MAX_RANKS_SHOWN = 8
_AS_TRANSFER = "their waiting is counted as transfer"
MAX_UNIX_NS = 1 << 63
"""Later times, after the year 2262, aren't Unix times; then only differences count."""


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

    def of_rank(self, rank: int) -> TraceReport:
        """The report with one rank's figures, and the tables on request of its part alone.

        Without a critical path: it goes over all ranks.
        """
        mine = replace(
            self.report,
            ranks=tuple(each for each in self.report.ranks if each.rank == rank),
        )
        digests = [(number, each) for number, each in self.ranked.digests if number == rank]
        return replace(with_tables(mine, digests, self.matched), critical_path=None)


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
    return combine(reads, found.warnings, found.searched)


def combine(reads: Iterable[Read], notes: Sequence[str] = (), searched: Sequence[Path] = ()) -> Analysis:
    """Like `analyse`, from files that have been read, each by `digest_file`.

    Args:
        reads: the files.
        notes: on files that weren't read.
        searched: directories in which the files were found.

    Raises:
        TraceError: none could be read, or they are of several jobs; the message lists all with the reason.
        SpecError: steps were chosen that none of them has.
    """
    digests, problems = _split(reads)
    warnings = [*notes, *problems]
    if not digests:
        raise TraceError("\n".join(["none of the traces can be read:", *warnings, HOW_TO_TRACE]))
    job = of_one_job(digests, searched)
    digests = list(job.digests)
    warnings += job.warnings
    if digests[0].window is not None and not any(digest.steps for digest in digests):
        found = [f"{digest.path}: {digest.recorded}" for digest in digests]
        raise SpecError("\n".join(["no trace has the steps that --steps asks for:", *found]))
    ranked = assign_ranks(digests)
    matched = match([_collectives_of(rank, digest) for rank, digest in ranked.digests])
    warnings += [*ranked.warnings, *(text for digest in digests for text in digest.warnings)]
    warnings += _doubts(ranked, matched)
    if matched.collectives:
        warnings += _clock_notes(matched.clocks)
    report = with_tables(_report(ranked, matched, warnings), ranked.digests, matched)
    return Analysis(report, ranked, matched)


def _split(results: Iterable[Read]) -> tuple[list[Digest], list[str]]:
    digests: list[Digest] = []
    problems: list[str] = []
    for result in results:
        if isinstance(result, Digest):
            digests.append(result)
        else:
            problems.append(result)
    return digests, problems


def _collectives_of(rank: int, digest: Digest) -> RankCollectives:
    numbers = {scope.position: scope.step for scope in digest.steps}
    steps = {at: number for at, number in numbers.items() if at is not None and number is not None}
    return RankCollectives(rank, digest.base_ns, digest.collectives, steps, digest.world_size, digest.clock)


def _doubts(ranked: Ranked, matched: Matched) -> list[str]:
    """Notes that a reader needs to interpret the figures."""
    ranks = [rank for rank, _ in ranked.digests]
    sizes = {digest.world_size for _, digest in ranked.digests if digest.world_size is not None}
    found = []
    if len(sizes) == 1 and max(sizes) > len(ranks):
        bounds = ", so bandwidths are at least those shown" if len(ranks) > 1 else ""
        present = f"{len(ranks)} of {max(sizes)} ranks are present"
        found.append(f"{present}: waiting for the others counts as transfer{bounds}")
    cut = [rank for rank, digest in ranked.digests if digest.is_cut]
    if cut and len(cut) < len(ranks):
        found.append(f"means, bubbles and causes are without {_ranks_text(cut)}: what is cut off isn't known")
    if len(sizes) > 1:
        found.append(f"the traces disagree about the number of ranks: {', '.join(map(str, sorted(sizes)))}")
    ranges = {_step_range(digest) for _, digest in ranked.digests}
    if len(ranges) > 1:
        named = "; ".join(f"rank {rank}: {_step_range(digest)}" for rank, digest in ranked.digests)
        found.append(f"the ranks recorded different steps ({named})")
    unknown = matched.unknown_groups + matched.unknown_peers
    open_waits = [each for each in matched.collectives if not each.matched]
    alone = sum(len(each.parts) == 1 for each in open_waits) - unknown
    loose = sum(len(each.parts) > 1 for each in open_waits)
    if matched.unknown_groups and len(ranks) > 1:
        found.append(
            f"between which ranks {plural(matched.unknown_groups, 'collective')} ran isn't recorded: "
            "their waiting is unknown and counts as transfer, and they don't align clocks"
        )
    if matched.unknown_peers and len(ranks) > 1:
        found.append(
            f"{matched.unknown_peers} sends and receives don't name the other rank: "
            "their waiting is unknown and counts as transfer"
        )
    if alone and len(ranks) > 1:
        found.append(
            f"{alone} of {len(matched.collectives)} collectives are seen on one rank only: {_AS_TRANSFER}"
        )
    if loose:
        found.append(
            f"who waited in {plural(loose, 'exchange')} of several ranks isn't known, as their clocks aren't "
            f"known well enough: {_AS_TRANSFER}"
        )
    return found


def _clock_notes(clocks: Clocks) -> list[str]:
    """How well the clocks are known of ranks that share no collective with the lowest one."""
    found = []
    unlinked = [rank for part in clocks.unlinked for rank in part]
    if unlinked:
        found.append(
            f"no collective or message links {_ranks_text(unlinked)} to the lowest rank: their clocks "
            "can't be aligned, and their times are as recorded"
        )
    one_way = [rank for rank, slack_ns in clocks.slack.items() if slack_ns is None]
    if one_way:
        found.append(
            f"messages run only one way between {_ranks_text(one_way)} and the lowest rank: "
            "the clocks are aligned as if the fastest of them took no time, "
            "and how far they are off to one side is unknown"
        )
    widths = {
        rank: most - least
        for rank, (least, most) in clocks.between.items()
        if rank in clocks.slack
        and least is not None
        and most is not None
        and most - least >= 2 * MENTION_SLACK_NS
    }
    if widths:
        found.append(
            f"only messages link the clocks of {_ranks_text(list(widths))} with that of the lowest rank: "
            f"known to ±{format_count(max(widths.values()) / 2000)} µs"
        )
    return found


def _ranks_text(ranks: Sequence[int]) -> str:
    named = first_of([str(rank) for rank in sorted(ranks)], MAX_RANKS_SHOWN)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"


def _step_range(digest: Digest) -> str:
    numbers = [scope.step for scope in digest.steps if scope.step is not None]
    return f"{min(numbers)} to {max(numbers)}" if numbers else "no step"


def _report(ranked: Ranked, matched: Matched, warnings: Sequence[str]) -> TraceReport:
    base_ns = min(_first_ns(rank, digest, matched.clocks) for rank, digest in ranked.digests) // 1000 * 1000
    views = tuple(_views(ranked, matched, base_ns))
    kinds = _kinds(ranked, matched)
    ranks = [rank for rank, _ in ranked.digests]
    last_ranks = [last_rank(each, matched.offsets) for each in matched.collectives]
    report = TraceReport(
        schema=2,
        base_time_ns=base_ns if abs(base_ns) < MAX_UNIX_NS else 0,
        warnings=tuple(warnings),
        clock_offsets_us={str(rank): matched.offsets[rank] / 1000 for rank in ranks},
        clock_offset_bounds_us={str(rank): _in_us(matched.clocks.between[rank]) for rank in ranks},
        clock_drift_ppm={str(rank): _ppm(matched.clocks.rates.get(rank)) for rank in ranks},
        clock_drift_bounds_ppm={str(rank): _bounds_ppm(matched.clocks.bounds.get(rank)) for rank in ranks},
        ranks=tuple(rank_trace(rank, view) for rank, view in views),
        groups={each.group: each.group_ranks for each in matched.collectives},
        collectives=tuple(
            _collective(each, last, kinds.of(each), matched, base_ns)
            for each, last in zip(matched.collectives, last_ranks, strict=True)
        ),
        stragglers=_stragglers(matched, last_ranks, ranks),
        parallelism=parallel_kinds(_whole(views), kinds),
        pipeline=pipeline(_whole(views), kinds.stages, matched.offsets),
    )
    return replace(report, findings=explain(report))


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


def _views(ranked: Ranked, matched: Matched, base_ns: int) -> Iterator[tuple[int, RankView]]:
    parts: defaultdict[int, list[tuple[Collective, Part]]] = defaultdict(list)
    for each in matched.collectives:
        for part in each.parts:
            parts[part.rank].append((each, part))
    for rank, digest in ranked.digests:
        realigned = matched.clocks.realigned(rank, digest.base_ns, base_ns)
        yield rank, RankView(digest, realigned, tuple(parts[rank]))


def _whole(views: Views) -> Views:
    """Those of files that don't end early, if there are any: what the others lack would look like waiting."""
    return tuple((rank, view) for rank, view in views if not view.digest.is_cut) or views


def _first_ns(rank: int, digest: Digest, clocks: Clocks) -> int:
    first_ns = min(scope.measure.start for scope in (digest.total, *digest.steps))
    return clocks.realigned(rank, digest.base_ns, 0).one(first_ns)


def _stragglers(
    matched: Matched, last_ranks: Sequence[int | None], ranks: Sequence[int]
) -> tuple[StragglerReport, ...]:
    """Empty if no collective is seen on two ranks: then no rank is known to be late."""
    if not any(each.matched for each in matched.collectives):
        return ()
    return tuple(stragglers(matched.collectives, last_ranks, ranks))


def _collective(
    each: Collective, last: int | None, parallelism: str, matched: Matched, base_ns: int
) -> CollectiveReport:
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
        last_rank=last,
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
