"""Finds the files to read and the rank of each, without those that `gpurun trace --merge` wrote."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path

import msgspec

from gpurun.launcher.errors import SpecError, TraceError, no_directory
from gpurun.launcher.findings.finding import Finding, noticed
from gpurun.launcher.grouping import grouped
from gpurun.launcher.rundir.paths import places_of, real_path
from gpurun.launcher.rundir.store import source_of
from gpurun.launcher.trace.analysis.digest import Digest
from gpurun.launcher.trace.kineto.classify import SYNCHRONISING
from gpurun.launcher.trace.kineto.trace_file import ReadLimits, open_source
from gpurun.launcher.units import first_of, ranks_text

HOW_TO_TRACE = """\
    record steps with torch.profiler, then prof.export_chrome_trace("trace.json"); gpurun does in a run"""
"""The advice for who has no traces."""
SUFFIXES = (".json", ".json.gz")
OWN_FILES = frozenset(
    {
        "comparison.json",
        "facts.json",
        "host.json",
        "invocation.json",
        "launch.json",
        "plan.json",
        "spec.json",
        "status.json",
        "trace.json",
    }
)
"""JSON files of a run directory; skipped without a note, unless they are traces of these names."""
OWN_SUFFIX = ".memory.json"
"""The ending of further JSON files of a run, after the rank, that are skipped without a note."""
HEAD_BYTES = 1 << 20
MAX_LISTED = 10
LEFT_OUT = ("copies", "captures", "same-rank", "jobs-apart")
"""Cases of notes on traces that are left out beside those that are shown."""
NEAR_NS, CLOCKS_NS = 3600 * 10**9, 60 * 10**9
"""Traces of one capture are no further apart, also where clocks differ; of several captures, less."""
DAY_NS = 24 * 3600 * 10**9
"""Nor are those whose collectives agree: the same training runs again on other days."""
EARLIEST_NS = 10**18
"""The least Unix time; a clock that begins anew shows earlier ones."""
_OF_WORKER = re.compile(r"(.+)\.\d{10,20}\.pt\.trace\.json")
"""What `tensorboard_trace_handler` calls a file: its process, and when it was written."""
_RANK = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,9})(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class FoundTraces:
    """Files to read, in order, and notes on skipped ones."""

    files: tuple[Path, ...]
    notes: tuple[Finding, ...]
    searched: tuple[Path, ...]
    """The directories that were searched."""
    within: tuple[Path, ...]
    """The directories that each file has to be in when it is opened, as `open_file` takes them."""


def find_traces(paths: Sequence[Path], within: Sequence[Path] = ()) -> FoundTraces:
    """The files in `paths`; directories are searched recursively for `*.json` and `*.json.gz`.

    Symbolic links that lead out of a directory aren't followed. Traces merged by gpurun are skipped, since
    their ranks would count twice.

    Args:
        paths: files or directories; one that is a link means what it leads to.
        within: where the files have to be, as `open_file` takes it. None: in `paths`, as they are now.

    Raises:
        TraceError: a path doesn't exist, or no file is found at all.
    """
    files: list[Path] = []
    notes: list[Finding] = []
    within = tuple(within) or places_of(paths)
    for path in paths:
        if path.is_dir():
            _look_into(path, within, files, notes)
        elif is_merged(path, within):
            notes.append(_note_on_merged(path, within))
        else:
            files.append(path)
    unique = {file.resolve(): file for file in reversed(files)}
    if not unique:
        raise _no_traces(paths, notes)
    searched = tuple(path for path in paths if path.is_dir())
    kept = tuple(file for file in files if unique.get(file.resolve()) is file)
    return FoundTraces(kept, tuple(notes), searched, within)


def _no_traces(paths: Sequence[Path], notes: Sequence[Finding]) -> TraceError:
    """Nothing is left to analyse: where traces were looked for, what was found instead, and what to do."""
    searched = [path for path in paths if path.is_dir()]
    named = ", ".join(map(str, searched)) or "nothing"
    missing = f"{named}: no traces here (looked for *.json and *.json.gz)"
    told = [] if notes and not searched else [missing]
    has_merged = any(note.figures["case"] == "merged" for note in notes)
    advice = [] if has_merged else [HOW_TO_TRACE]
    return TraceError("\n".join([*told, *(each.text for each in notes), *advice]))


def _note_on_merged(path: Path, within: Sequence[Path]) -> Finding:
    mark = _mark(path, within)
    return noticed("merged", file=str(path), files=first_of(mark.of, MAX_LISTED) if mark.of else None)


def _look_into(directory: Path, within: Sequence[Path], files: list[Path], notes: list[Finding]) -> None:
    for path in sorted(_everything_in(directory, notes)):
        if _is_own(path, within):
            continue
        try:  # what counts is where it is when it is opened
            place = real_path(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(noticed("not-read", why=f"{path}: {error.strerror}"))
            continue
        if not any(map(place.is_relative_to, within)):
            notes.append(noticed("link-not-followed", file=str(path)))
        elif path.is_file() and is_merged(path, within):
            notes.append(_note_on_merged(path, within))
        elif path.is_file():
            files.append(path)


def _everything_in(directory: Path, notes: list[Finding]) -> Iterator[Path]:
    """What may be traces in a directory and below, and links to directories, however deep: no recursion.

    `notes` gets the directories that can't be read.
    """
    todo = [directory]
    while todo:
        place = todo.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(Path(entry.path))
                    elif not entry.name.startswith(".") and (
                        entry.name.endswith(SUFFIXES) or _is_link_to_directory(entry)
                    ):
                        yield Path(entry.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            notes.append(noticed("not-read", why=f"{place}: {error.strerror}"))


def _is_link_to_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_symlink() and entry.is_dir()
    except OSError:
        return False


def _is_own(path: Path, within: Sequence[Path]) -> bool:
    """Whether this is a file of a run directory; a trace may well be called `trace.json`."""
    is_named_so = path.name in OWN_FILES or path.name.endswith(OWN_SUFFIX)
    return is_named_so and not begins_as_trace(path, within)


def begins_as_trace(path: Path, within: Sequence[Path] = ()) -> bool:
    """Whether the beginning of a file has the key of a trace's events; false for unreadable files."""
    try:
        with open_source(path, ReadLimits(within=within)) as source:
            return b'"traceEvents"' in source.read(HEAD_BYTES)
    except TraceError:
        return False


@dataclass(frozen=True)
class OneJob:
    """The traces of one job, and notes on those of others."""

    digests: tuple[Digest, ...]
    notes: tuple[Finding, ...]


def of_one_job(digests: Sequence[Digest], searched: Sequence[Path]) -> OneJob:
    """The traces of one job: a directory may hold those of several jobs, each in a subdirectory.

    The traces of several directories are those of one job if they state different ranks of one world. Else
    those that lie directly in a searched directory count.

    Raises:
        TraceError: none do; the message lists the directories to choose from.
    """
    kept, notes = list(digests), []
    for root in searched:
        inside = [digest for digest in kept if digest.path.is_relative_to(root)]
        directories = _by_directory(inside)
        if len(directories) < 2 or _is_one_job(directories):
            continue
        others = {path: found for path, found in directories.items() if path != root}
        listed = _commands(list(others))
        if root not in directories:
            raise TraceError(f"{source_of(root)} holds the traces of several jobs; choose one:{listed}")
        left_out = [digest for found in others.values() for digest in found]
        kept = [digest for digest in kept if digest not in left_out]
        named = [str(source_of(path)) for path in others]
        notes.append(
            noticed("other-jobs", directories=first_of(named, MAX_LISTED), num_captures=len(left_out))
        )
    return OneJob(tuple(kept), tuple(notes))


def _commands(directories: Sequence[Path]) -> str:
    """A line for each of the first directories, with the command that reads it."""
    more = len(directories) - MAX_LISTED
    lines = [f"\n    gpurun trace {source_of(path)}" for path in directories[:MAX_LISTED]]
    return "".join([*lines, *([f"\n    … and {more} more"] if more > 0 else [])])


def _by_directory(digests: Sequence[Digest]) -> dict[Path, list[Digest]]:
    found: dict[Path, list[Digest]] = {}
    for digest in digests:
        found.setdefault(digest.path.parent, []).append(digest)
    return found


def _is_one_job(directories: Mapping[Path, Sequence[Digest]]) -> bool:
    """Whether all state a rank, no rank is in two directories, and all agree about the size of the world."""
    ranks = [{_stated_rank(digest) for digest in found} for found in directories.values()]
    every = set().union(*ranks)
    sizes = {digest.world_size for found in directories.values() for digest in found}
    return None not in every and len(every) == sum(map(len, ranks)) and len(sizes) == 1


def _stated_rank(digest: Digest) -> int | None:
    """The rank as the trace states it, else as the name of its file or directory does."""
    if digest.rank is not None:
        return digest.rank
    by_file = rank_in_name(digest.path.name)
    return rank_in_name(digest.path.parent.name) if by_file is None else by_file


@dataclass(frozen=True)
class Ranked:
    """Digests with their ranks, sorted by rank, and notes on what was assumed."""

    digests: tuple[tuple[int, Digest], ...]
    notes: tuple[Finding, ...]


def assign_ranks(digests: Sequence[Digest], lacking: Sequence[Digest] = ()) -> Ranked:
    """The rank of each trace of one capture.

    In this order of trust: the rank that the trace states; the one in the name of its file or directory,
    unless several processes share it; one process, by its name or number, that was traced several times, one
    after the other. What is left are ranks by their place. Of traces with the same content one counts, unless
    they state different ranks or processes. Of several captures, or jobs, the newest that has all ranks
    counts.

    Args:
        digests: the traces.
        lacking: those without the chosen steps, which aren't shown, but count where ranks go by their place.
    """
    digests, copies = _without_copies(digests)
    alike = grouped((each for each in digests if each.rank is None), _stated_rank)
    shared = {each for found in alike.values() if _are_of_processes(found) for each in found}
    stated: dict[int, list[Digest]] = {}
    nameless: list[Digest] = []
    for digest in digests:
        rank = None if digest in shared else _stated_rank(digest)
        if rank is None:
            nameless.append(digest)
        else:
            stated.setdefault(rank, []).append(digest)
    free = (number for number in range(len(digests) + len(stated)) if number not in stated)
    by_place = dict(zip(free, _processes(nameless), strict=False))
    every = {rank: sorted(found, key=_begin_ns) for rank, found in (stated | by_place).items()}
    having = {rank: [each for each in found if each not in lacking] for rank, found in every.items()}
    of_rank = {rank: found for rank, found in having.items() if found}
    shown = _one_capture(of_rank)
    at_all = _one_capture(every) if lacking else shown
    numbers = _numbers(shown.keys(), at_all.keys(), stated.keys())
    chosen = {numbers[rank]: shown[rank] for rank in sorted(shown)}
    taken = shown.keys() & stated.keys()
    by_name = {rank: chosen[rank] for rank in sorted(taken) if chosen[rank].rank is None}
    assumed = {rank: each for rank, each in chosen.items() if rank not in taken}
    notes = [
        *_assumed("rank-by-name", by_name),
        *_assumed("rank-by-place", assumed, len(at_all) if len(at_all) > 1 else None),
        *_left_out(
            {rank: [copy for each in found for copy in copies[each]] for rank, found in of_rank.items()},
            shown,
            {rank: numbers.get(rank, rank) for rank in (*stated, *shown)},
        ),
    ]
    return Ranked(tuple(sorted(chosen.items(), key=lambda item: item[0])), tuple(notes))


def _without_copies(digests: Sequence[Digest]) -> tuple[list[Digest], dict[Digest, list[Digest]]]:
    """One trace of each content, in their order; and by it, all that have this content.

    What states neither a rank nor a process is a copy of what does. Of copies, the one with the shortest name
    counts: others are called `copy of …` or `… (1)`.
    """
    copies: dict[Digest, list[Digest]] = {}
    for alike in grouped(digests, _content).values():
        named = grouped(alike, _stated_process)
        nameless = named.pop(None, []) if len(named) > 1 else []
        for i, same in enumerate(named.values()):
            found = same if i else [*same, *nameless]
            copies[min(same, key=lambda each: len(each.path.name))] = found
    return [each for each in digests if each in copies], copies


def _stated_process(digest: Digest) -> int | str | None:
    """The rank that is stated, else the host and process in the name of the file."""
    rank, named = _stated_rank(digest), _OF_WORKER.match(digest.path.name)
    return named[1] if rank is None and named else rank


def _content(of: Digest) -> tuple[object, ...]:
    """What two processes never share: the same work at the same times, to the nanosecond."""
    total = of.total
    return of.process, of.device, _begin_ns(of), _end_ns(of), of.names, total.num_kernels, len(of.collectives)


def _numbers(shown: Set[int], at_all: Set[int], stated: Set[int]) -> dict[int, int]:
    """The rank as it is shown, by rank: those by place are counted from 0 on, as far as numbers are free.

    Args:
        shown: the ranks that are.
        at_all: those that are shown where no steps are chosen.
        stated: those that aren't by place.
    """
    counted = [*sorted(at_all), *sorted(shown - at_all)] if shown & at_all else sorted(shown)
    free = (number for number in count() if number not in stated or number not in counted)
    return {rank: rank if rank in stated else next(free) for rank in counted}


def _assumed(case: str, found: Mapping[int, Digest], num_files: int | None = None) -> Iterator[Finding]:
    """A note on all of them."""
    if found:
        ranks, first = sorted(found), str(next(iter(found.values())).path)
        figures = {"num_more": len(found) - 1 or None, "num_files": num_files}
        yield noticed(case, ranks=ranks, who=ranks_text(ranks), file=first, **figures)


def _begin_ns(digest: Digest) -> int:
    return digest.base_ns + digest.extent[0]


def _end_ns(digest: Digest) -> int:
    return digest.base_ns + digest.extent[1]


def _are_of_processes(digests: Sequence[Digest]) -> bool:
    """Whether several processes were traced at the same time; a number that they share is their node's."""
    ordered = sorted(digests, key=_begin_ns)
    return any(
        _begin_ns(later) < _end_ns(earlier) and len({earlier.process, later.process} - {None}) > 1
        for earlier, later in pairwise(ordered)
    )


def _processes(digests: Sequence[Digest]) -> list[list[Digest]]:
    """The traces of each process; a process is traced by one profiler at a time."""
    found: dict[object, list[Digest]] = {}
    for place, digest in enumerate(digests):
        named = _OF_WORKER.match(digest.path.name)
        by_number = digest.process is not None and abs(_begin_ns(digest)) > EARLIEST_NS
        key = named[1] if named else (digest.process, digest.device) if by_number else place
        found.setdefault((digest.path.parent, key), []).append(digest)
    return [
        part
        for same in found.values()
        for part in ([same] if _are_apart(same) else [[each] for each in same])
    ]


def _are_apart(digests: Sequence[Digest]) -> bool:
    """Whether they were recorded one after the other."""
    ordered = sorted(digests, key=_begin_ns)
    return all(_end_ns(earlier) <= _begin_ns(later) for earlier, later in pairwise(ordered))


def _one_capture(of_rank: Mapping[int, Sequence[Digest]]) -> dict[int, Digest]:
    """The newest capture that has all ranks; else, of those with most ranks, the newest.

    Of captures that don't state how many ranks there are, those with most ranks may have all.
    """
    newest = {rank: found[-1] for rank, found in of_rank.items()}
    within_ns = NEAR_NS if all(len(found) == 1 for found in of_rank.values()) else CLOCKS_NS
    if len({len(found) for found in of_rank.values()}) == 1 and _are_near([*newest.values()], within_ns):
        return newest
    best: dict[int, Digest] = {}
    of_any_size: dict[int, Digest] = {}
    tried: set[int] = set()
    every = ((rank, each) for rank, found in of_rank.items() for each in found)
    for rank, last in sorted(every, key=lambda item: -_end_ns(item[1])):
        if id(last) in tried:
            continue
        found = {
            other: each
            for other, same in of_rank.items()
            for each in [last if other == rank else _nearest(same, last)]
            if _are_near([last, each], within_ns) and _nearest(of_rank[rank], each) is last
        }
        tried |= set(map(id, found.values()))
        size = max((each.world_size or 0 for each in found.values()), default=0)
        if len(found) > len(best):
            best = found
        if not size and len(found) > len(of_any_size):
            of_any_size = found
        if len(found) == (size or len(of_rank)):
            return of_any_size or found
    return best


def _nearest(digests: Sequence[Digest], other: Digest) -> Digest:
    return min(digests, key=partial(_distance_ns, other))


def _distance_ns(digest: Digest, other: Digest) -> int:
    """Nanoseconds from the end of the earlier to the beginning of the later; below 0 where they overlap."""
    return max(_begin_ns(digest), _begin_ns(other)) - min(_end_ns(digest), _end_ns(other))


def _are_near(digests: Sequence[Digest], within_ns: int) -> bool:
    """Whether they may be of one capture: of one world, at one time, as far as clocks agree.

    What neither states a rank nor communicates is of one capture only if it was recorded at the same time, on
    the same kind of device.
    """
    sizes = {each.world_size for each in digests} - {None}
    first_ns, last_ns = min(map(_begin_ns, digests)), max(map(_begin_ns, digests))
    is_known = all(_stated_rank(each) is not None or each.communicates for each in digests)
    apart_ns = last_ns - min(map(_end_ns, digests))
    is_near = apart_ns <= (within_ns if is_known else 0) or (is_known and first_ns < EARLIEST_NS)
    if not is_near and within_ns == NEAR_NS and apart_ns <= DAY_NS:
        is_near = all(_communicate_together(digests[0], each) for each in digests[1:])
    is_alike = is_known or len({each.device for each in digests if not each.is_cut}) < 2
    is_one = len(sizes) < 2 and is_near and is_alike
    return is_one and all(_may_be_together(digests[0], each) for each in digests[1:])


SAME_PACE = 0.5
"""The share of a step by which the time between the ends of two ranks' steps may differ."""


def _may_be_together(first: Digest, other: Digest) -> bool:
    """Whether they overlap in time, or may, by clocks that differ: they show the same steps at one pace.

    Ranks that communicate are done with their steps together.
    """
    if _distance_ns(first, other) <= 0:
        return True
    if first.clock is not None and first.clock == other.clock:
        return False
    ends, others = ({step.step or 0: step.measure.end for step in each.steps} for each in (first, other))
    common = ends.keys() & others.keys()
    if len(common) < 2:
        return bool(common) or min(len(ends), len(others)) < 2
    return _pace_differs([(ends[step], others[step]) for step in common]) <= SAME_PACE


def _pace_differs(ends: Sequence[tuple[int, int]]) -> float:
    """How far the time between two clocks' ends of the same moves, as a share of the mean from end to end.

    Args:
        ends: by both clocks; at least two.
    """
    apart = [first - other for first, other in ends]
    length = max(max(times) - min(times) for times in ([own for own, _ in ends], [own for _, own in ends]))
    return (max(apart) - min(apart)) * (len(ends) - 1) / max(length, 1)


SAME_ENDS, MIN_COLLECTIVES = 0.05, 3
"""The share of their distance by which the ends of collectives may differ; and how many have to agree."""


def _communicate_together(first: Digest, other: Digest) -> bool:
    """Whether both state a rank and show the same collectives, by their numbers, ending at one pace.

    No rank leaves them before all have come; those of another run end at other times.
    """
    if None in (first.rank, other.rank) or first.rank == other.rank:
        return False
    ends, others = (
        {
            (work.group, work.kind, work.sequence, work.num_bytes): work.end
            for work in each.collectives
            if work.kind in SYNCHRONISING and work.sequence is not None
        }
        for each in (first, other)
    )
    common = ends.keys() & others.keys()
    if len(common) < max(MIN_COLLECTIVES, min(len(ends), len(others))):
        return False
    return _pace_differs([(ends[work], others[work]) for work in common]) <= SAME_ENDS


def _left_out(
    of_rank: Mapping[int, Sequence[Digest]], chosen: Mapping[int, Digest], numbers: Mapping[int, int]
) -> Iterator[Finding]:
    """Notes on copies, other captures of the same processes, others of the same rank, and other jobs.

    `numbers`: the ranks as they are shown; a rank by place that isn't shown has none.
    """
    parts: dict[str, list[tuple[int, Digest]]] = {case: [] for case in LEFT_OUT}
    for rank, found in of_rank.items():
        shown = chosen.get(rank)
        for each in found:
            if each is not shown:
                parts["jobs-apart" if shown is None else _why_left_out(each, shown)].append((rank, each))
    for case, others in parts.items():
        if others:
            ranks = sorted({numbers[rank] for rank, _ in others if rank in numbers})
            files = [str(each.path) for _, each in others]
            yield noticed(
                case,
                ranks=ranks,
                who=ranks_text(ranks) if ranks else None,
                num_captures=len(files),
                files=first_of(files, MAX_LISTED),
            )


def _why_left_out(each: Digest, shown: Digest) -> str:
    """The case of `LEFT_OUT` of a trace that is of the same rank as one that is shown."""
    if _content(each) == _content(shown):
        return "copies"
    if each.process == shown.process:
        return "captures"
    return "same-rank" if _distance_ns(each, shown) < 0 else "jobs-apart"


def rank_in_name(name: str) -> int | None:
    """The number after `rank` or `worker` in a file name."""
    found = _RANK.search(name)
    return int(found[1]) if found else None


MARKED_BYTES = 1 << 16
"""The most that the header of a merged trace has before its events."""


class _Mark(msgspec.Struct):
    merged: bool = False
    of: Sequence[str] = ()
    """The traces that it was merged from, within the directory that has them all."""


class _Header(msgspec.Struct):
    gpurun: _Mark | None = None


def mark_of_merged(files: Sequence[Path]) -> dict[str, dict[str, object]]:
    """The beginning of the header of a trace merged from these; their names are left out if too long."""
    places = [file.absolute() for file in files]
    root = os.path.commonpath([place.parent for place in places]) if places else ""
    names = [str(place.relative_to(root)) for place in places]
    is_short = len(msgspec.json.encode(names)) < MARKED_BYTES // 2
    return {"gpurun": {"merged": True, **({"of": names} if is_short else {})}}


def is_merged(path: Path, within: Sequence[Path] = ()) -> bool:
    """Whether the header marks the file as a trace merged by gpurun; false for unreadable files."""
    return _mark(path, within).merged


def _mark(path: Path, within: Sequence[Path]) -> _Mark:
    try:
        with open_source(path, ReadLimits(within=within)) as source:
            head, found, _ = source.read(MARKED_BYTES).partition(b'"traceEvents"')
        header = msgspec.json.decode(head.rstrip(b", \r\n\t") + b"}", type=_Header) if found else _Header()
    except (TraceError, msgspec.DecodeError, RecursionError):
        return _Mark()
    return header.gpurun or _Mark()


def place_for(out: Path, inputs: Sequence[Path] = ()) -> Path:
    """`out`, if it may be written: there is nothing yet, or a regular file. A link, which whoever made the
    directory may have put there, is not followed.

    Raises:
        SpecError: the path is not a regular file, is one of `inputs`, or its directory is missing.
    """
    try:
        status = _status(out)
        if status is not None and any(os.path.samestat(status, each.stat()) for each in inputs):
            raise SpecError(f"can't write {out}: it is one of the traces to merge; name another file")
    except OSError as error:
        raise SpecError(f"can't write {out}: {error.strerror}; name another file") from error
    return out


def _status(out: Path) -> os.stat_result | None:
    """Status of the regular file at `out`; `None` if there is none yet, in a directory that exists."""
    if not out.parent.is_dir():
        raise SpecError(f"can't write {out}: {no_directory(out.parent)} or name another file")
    if not os.path.lexists(out):
        return None
    status = out.lstat()
    if not stat.S_ISREG(status.st_mode):
        kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
        what = kinds.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise SpecError(f"can't write {out}: it is {what}; name a file, such as all.json.gz")
    return status
