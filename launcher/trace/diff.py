"""Differences of two captures by class, kernel, operator, shape and caller, per step if there are steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, TypeVar

from gpurun.launcher.findings.finding import Finding, finding, noticed, of_level, with_figures, worded
from gpurun.launcher.findings.finding_kinds import SPENT
from gpurun.launcher.findings.trace_cases import DIFFERS, IN_STEP, NOT_RECORDED, PARTS_OF_STEP
from gpurun.launcher.trace.causes import MENTION_FROM, to_do
from gpurun.launcher.trace.explain import (
    CPU,
    has_launches,
    is_waiting_unknown,
    of_usual_steps,
    outlying_steps,
)
from gpurun.launcher.trace.model import (
    GAPS_OF_IDLE,
    Breakdown,
    NameTotal,
    RankTrace,
    RowKind,
    ShapeTotal,
    TraceReport,
)
from gpurun.launcher.units import MINUS, change_text, first_of, format_ms, listed, numbers_text, ranks_text

Per = Literal["step", "capture", "second"]
State = Literal["new", "gone", "slower", "faster", "same"]
SECOND_US = 1e6
N = TypeVar("N", str, "Path")
Totals = Mapping[N, tuple[float, float]]
"""Time in µs and calls, by name or path."""
LEAST_PERCENT = 1.0
"""Below this, a step takes about as long in both captures; its parts may have changed."""
UNEVEN = 0.1
"""Difference from which on captures don't call operators equally often."""
OFFSETS = 0.2
"""Share of a part's change from which on an opposite change of another one is named."""


@dataclass(frozen=True)
class Change:
    """Time under one name in both captures, µs per step and rank; see `TraceDiff.per`."""

    name: str
    a_us: float
    b_us: float
    change_us: float
    percent: float | None
    """`None` for a name that only B has."""


@dataclass(frozen=True)
class OperatorChange(Change):
    """A row of the tree of modules and operators; see `OperatorTotal`. `name` is that of the row alone."""

    depth: int
    kind: RowKind
    state: State
    """new: only in B does it take any time there; gone: only in A; else which takes longer."""
    a_count: float
    """Calls, per step and rank; without steps, all of them."""
    b_count: float


@dataclass(frozen=True)
class TraceDiff:
    """The changes from A to B, sorted by growth, except in `classes`."""

    schema: int
    num_ranks: tuple[int, int]
    num_steps: tuple[int, int]
    """Steps, summed over ranks; 0 where the traces mark none."""
    per: Per
    """The unit of times: a step; where a rank of A or B has no steps, a call for names, and for `classes` all
    of a rank's trace if both have nearly as many calls of each name, else a second of it.

    Then how long a step takes can't be compared.
    """
    classes: tuple[Change, ...]
    """The parts that add up to the span, with idle time split by cause; per step also the span itself.

    Of steps only those count that aren't `outlying`; for names, all. `idle` is not split where the
    causes are known of one capture only.
    """
    kernels: tuple[Change, ...]
    ops: tuple[Change, ...]
    """The operators by time on the GPU; by time on the CPU where no GPU worked, or no launch is recorded."""
    shapes: tuple[Change, ...]
    """Operators with the shapes and types of their tensors; empty without shapes in the traces of A or B."""
    operators: tuple[OperatorChange, ...] | None = None
    """The tree of what calls what: rows that changed, and those around them; by growth within each.
    `None` unless asked for, and where they can't be compared."""
    outlying: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The steps that are far longer than the others, as `gpurun trace` leaves them out of causes."""
    devices: tuple[str, str] = ("", "")
    """The models of the ranks' devices: of others, times differ whatever changed."""
    findings: tuple[Finding, ...] = ()
    """The answer, the part that changed most, the next step, and what was noticed about both captures."""


_CLASSES: tuple[tuple[str, Callable[[Breakdown], float]], ...] = (
    ("span", lambda each: each.span_us),
    ("compute", lambda each: each.compute_us),
    ("exposed_comm", lambda each: each.exposed_comm_us),
    ("exposed_transfer", lambda each: each.exposed_transfer_us),
    ("exposed_wait", lambda each: each.exposed_wait_us),
    ("exposed_memcpy", lambda each: each.exposed_memcpy_us),
    ("other_steps", lambda each: each.other_steps_us),
    ("idle_host", lambda each: each.idle_by_cause_us.of_launches),
    ("idle_one_off", lambda each: each.idle_by_cause_us.one_off),
    ("idle_comm_wait", lambda each: each.idle_by_cause_us.comm_wait),
    ("idle_data", lambda each: each.idle_by_cause_us.data),
    ("idle_allocating", lambda each: each.idle_by_cause_us.allocating),
    ("idle_loading", lambda each: each.idle_by_cause_us.loading),
    ("idle_blocked", lambda each: each.idle_by_cause_us.blocked),
    ("idle_other", lambda each: each.idle_by_cause_us.other),
    ("idle_unknown", lambda each: each.idle_by_cause_us.unknown),
)
_UNDIVIDED, _DIVIDED = "exposed_comm", ("exposed_transfer", "exposed_wait")
"""The class instead of two, where it isn't known of A or B how much of their communication is waiting."""


def diff_traces(a: TraceReport, b: TraceReport) -> TraceDiff:
    """The changes from `a` to `b`: by the ranks of both, where a rank of the same job is missing in one.

    Then operators aren't compared by shape or by caller.
    """
    whole = a, b
    common = _common_ranks(a, b)
    a, b = (_of_ranks(report, common) for report in whole)
    on_gpu = [any(rank.kernels for rank in report.ranks) for report in (a, b)]
    has_cpu = [any(rank.ops for rank in report.ranks) for report in (a, b)]
    is_alike = on_gpu[0] == on_gpu[1]
    by_device = all(on_gpu) and has_launches(a) and has_launches(b)
    is_timed = by_device or not any(on_gpu)
    has_callers = is_timed and has_cpu[0] == has_cpu[1] and common is None  # they are sums over all ranks
    per: Per = "capture" if _is_as_much(a, b) else "second"
    if all(rank.steps for report in whole for rank in report.ranks):
        per = "step"
    uneven = frozenset[str]() if per == "step" else _unevenly_called(a, b)
    found = TraceDiff(
        schema=4,
        num_ranks=(len(whole[0].ranks), len(whole[1].ranks)),
        num_steps=(_num_steps(a), _num_steps(b)),
        devices=(_devices(a), _devices(b)),
        outlying=(_outlying(a, per), _outlying(b, per)),
        per=per,
        classes=tuple(_classes(a, b, per) if is_alike else _spans(a, b, per)),
        kernels=_changes(a, b, lambda rank: _rows(rank, per, "kernels"), True, per) if is_alike else (),
        ops=tuple(
            each
            for each in _changes(a, b, lambda rank: _rows(rank, per, "ops"), by_device, per)
            if all(has_cpu) and each.name not in uneven
        ),
        shapes=_shape_changes(a, b, per) if has_callers else (),
        operators=operator_changes(a, b, per, uneven) if has_callers else None,
    )
    lacks = None
    notes = [*_notes(*whole)]
    if not is_alike:
        side, other, report = ("A", "B", b) if on_gpu[0] else ("B", "A", a)
        lacks = other if any(rank.device != CPU for rank in report.ranks) else None
        notes.insert(0, noticed("other-device", side=side))
    doubts = [*_doubts(found, a, b, common, has_cpu)]
    if uneven:
        times = _by_name(b, lambda rank: rank.ops, by_device)
        longest = sorted(uneven, key=lambda name: (-times[name][0], name))
        doubts.append(worded(DIFFERS["uneven-calls"], {"operators": first_of(longest, 3)}))
    return replace(found, findings=(*_findings(found, doubts, on_gpu[0], has_callers, lacks), *notes))


def _common_ranks(a: TraceReport, b: TraceReport) -> frozenset[int] | None:
    """The ranks of both captures of jobs of one size, where one of them lacks some; else `None`."""
    ranks = [frozenset(rank.rank for rank in report.ranks) for report in (a, b)]
    sizes = {rank.world_size for report in (a, b) for rank in report.ranks}
    is_one_size = len(sizes) == 1 and None not in sizes
    return ranks[0] & ranks[1] or None if is_one_size and ranks[0] != ranks[1] else None


def _of_ranks(report: TraceReport, chosen: frozenset[int] | None) -> TraceReport:
    if chosen is None:
        return report
    return replace(report, ranks=tuple(rank for rank in report.ranks if rank.rank in chosen))


def _doubts(
    diff: TraceDiff, a: TraceReport, b: TraceReport, common: frozenset[int] | None, has_cpu: Sequence[bool]
) -> Iterator[str]:
    """What else differs, so that times do, too: other ranks, devices, much more work, steps left out."""
    if common:
        yield worded(DIFFERS["common-ranks"], {"ranks": ranks_text(sorted(common))})
    elif diff.num_ranks[0] != diff.num_ranks[1]:
        yield worded(DIFFERS["ranks"], {"num_a": diff.num_ranks[0], "num_b": diff.num_ranks[1]})
    if diff.devices[0] != diff.devices[1]:
        yield worded(DIFFERS["devices"], {"a": diff.devices[0], "b": diff.devices[1]})
    for side, is_known in zip("AB", has_cpu, strict=True):
        if not is_known and any(has_cpu):
            yield worded(DIFFERS["cpu"], {"side": side})
    for side, report in zip("AB", (a, b), strict=True):
        if diff.kernels and all(has_cpu) and not has_launches(report):
            yield worded(DIFFERS["operators"], {"side": side})
    if any(each.name == "idle" for each in diff.classes):
        yield worded(DIFFERS["launches"], {"side": "B" if _is_idle_known(a) else "A"})
    if all(has_cpu):
        calls = [_num_calls(report, diff.per) / (_units(report, diff.per) or 1) for report in (a, b)]
        if abs(calls[1] - calls[0]) > UNEVEN * calls[0]:
            part = "a step of " if diff.per == "step" else ""
            figures = {"part": part, "num_a": round(calls[0]), "num_b": round(calls[1])}
            yield worded(DIFFERS["calls"], figures)
    for side, left_out in zip("AB", diff.outlying, strict=True):
        if left_out:
            named = f"{'step' if len(left_out) == 1 else 'steps'} {numbers_text(left_out)}"
            yield worded(DIFFERS["steps"], {"side": side, "steps": named})


def _outlying(report: TraceReport, per: Per) -> tuple[int, ...]:
    return tuple(each.step for each in outlying_steps(report.ranks)) if per == "step" else ()


def _num_calls(report: TraceReport, per: Per) -> float:
    return sum(row.count for rank in report.ranks for row in _rows(rank, per, "ops"))


def _unevenly_called(a: TraceReport, b: TraceReport) -> frozenset[str]:
    """Operators whose calls grew unlike those of most operators and kernels: a call does other work."""
    counts = [Counter[tuple[str, str]](), Counter[tuple[str, str]]()]
    for of_report, report in zip(counts, (a, b), strict=True):
        for row in (row for rank in report.ranks for row in (*rank.ops, *rank.kernels)):
            of_report[row.kind, row.name] += row.count
    ratios = {each: counts[1][each] / counts[0][each] for each in counts[0].keys() & counts[1].keys()}
    middle = median(ratios.values()) if ratios else 1.0
    uneven = (each for each, ratio in ratios.items() if abs(ratio / middle - 1) > UNEVEN)
    return frozenset(name for kind, name in uneven if kind == "op")


def _spans(a: TraceReport, b: TraceReport, per: Per) -> Iterator[Change]:
    """The span alone: a GPU worked in only one of the captures."""
    if per == "step":
        yield _change("span", *(_mean(each, lambda step: step.span_us, per) for each in (a, b)))


def _classes(a: TraceReport, b: TraceReport, per: Per) -> Iterator[Change]:
    """The parts of a step or capture; idle time by its cause only if that is known of both."""
    is_open = any(map(is_waiting_unknown, (a, b)))
    is_idle_known = _is_idle_known(a) == _is_idle_known(b)
    left_out = {*(_DIVIDED if is_open else [_UNDIVIDED]), *(["span"] if per != "step" else [])}
    for name, of in _CLASSES:
        if name not in left_out and (is_idle_known or not name.startswith("idle_")):
            yield _change(name, _mean(a, of, per), _mean(b, of, per))
    if not is_idle_known:
        yield _change("idle", *(_mean(each, lambda step: step.idle_us, per) for each in (a, b)))


def _is_idle_known(report: TraceReport) -> bool:
    """Whether most idle time has a cause: launches are recorded."""
    totals = [rank.total for rank in report.ranks]
    return 2 * sum(each.idle_by_cause_us.unknown for each in totals) <= sum(each.idle_us for each in totals)


def _findings(
    diff: TraceDiff, doubts: Sequence[str], on_gpu: bool, has_callers: bool, lacks: str | None = None
) -> Iterator[Finding]:
    """How much longer a step takes, and the part that changed most: in that direction, if steps differ.

    `has_callers`: whether the tree of operators can be compared; `lacks`: the side whose traces lack their
    device's work.
    """
    doubt = "; ".join(doubts) or None
    if lacks:
        yield finding("not-measured", case="no-device-work", where=lacks)
        return
    if diff.per != "step":
        yield finding("not-measured", case="unmarked", where=without_steps(diff), doubt=doubt)
        return
    span, *parts = diff.classes
    sign = 1 if span.change_us >= 0 else -1
    is_alike = abs(span.percent or 0.0) < LEAST_PERCENT
    ends_ms: dict[str, Any] = {"a_ms": span.a_us / 1000, "b_ms": span.b_us / 1000}
    is_equal = len(set(map(format_ms, ends_ms.values()))) == 1
    yield finding(
        "changed",
        where="a step",
        percent=span.percent,
        change=None if is_alike else change_text(span.percent or 0.0),
        within_percent=LEAST_PERCENT if is_alike else None,
        doubt=doubt,
        **({"both_ms": ends_ms["b_ms"]} if is_equal else ends_ms),
    )
    if not parts:  # a GPU worked in only one of the captures
        return
    most = max(parts, key=lambda part: abs(part.change_us) if is_alike else sign * part.change_us)
    if is_alike and abs(most.change_us) < MENTION_FROM * span.a_us:
        return
    against = (each for each in parts if each.change_us * most.change_us < 0)
    opposite = "+" if most.change_us < 0 else MINUS
    offset = [
        f"{_part_name(each, on_gpu)} ({opposite}{format_ms(abs(each.change_us) / 1000)} ms)"
        for each in sorted(against, key=lambda each: -abs(each.change_us))
        if abs(each.change_us) >= OFFSETS * abs(most.change_us)
    ]
    yield finding(
        "part-changed",
        part=_part_name(most, on_gpu),
        a_ms=most.a_us / 1000,
        b_ms=most.b_us / 1000,
        offset=listed(offset) if offset else None,
        partly="" if is_alike else "partly ",
        weight=1,
    )
    if has_callers and diff.operators is None:
        yield to_do("part-changed", "parts")


PART_NAMES = {
    "exposed_comm": NOT_RECORDED["untraced"].removeprefix("in "),
    "idle": "idle time",
    "idle_data": SPENT["input"],
    "idle_host": SPENT["host"],
    "idle_one_off": SPENT["one_off"],
    **{f"idle_{cause}": f"time {IN_STEP[cause]}" for cause in GAPS_OF_IDLE},
    "idle_unknown": "idle time for an unknown reason",
}


def _part_name(part: Change, on_gpu: bool) -> str:
    if part.name == "idle_host" and not on_gpu:
        return f"time {SPENT['outside']}"
    return PART_NAMES.get(part.name) or part.name.replace("_", " ")


def without_steps(diff: TraceDiff, a: str = "A", b: str = "B") -> str:
    """The sides that mark no steps; `a` and `b` are their names."""
    return listed([name for name, steps in zip((a, b), diff.num_steps, strict=True) if not steps]) or "a rank"


def _devices(report: TraceReport) -> str:
    return listed(sorted({rank.device for rank in report.ranks}))


def _num_steps(report: TraceReport) -> int:
    return sum(len(rank.steps) for rank in report.ranks)


def _is_as_much(a: TraceReport, b: TraceReport) -> bool:
    """Whether as many ranks of both made nearly as many calls of each kernel and each operator."""
    known = [
        sides
        for kind in ("kernels", "ops")
        if all(sides := [_calls_by_name(report, kind) for report in (a, b)])
    ]
    return (
        len(a.ranks) == len(b.ranks)
        and bool(known)
        and all(
            sum(((first - other) | (other - first)).values()) <= UNEVEN * first.total()
            for first, other in known
        )
    )


def _calls_by_name(report: TraceReport, kind: Literal["kernels", "ops"]) -> Counter[str]:
    calls = Counter[str]()
    for row in (row for rank in report.ranks for row in _rows(rank, "capture", kind)):
        calls[row.name] += int(row.count)
    return calls


def _rows(rank: RankTrace, per: Per, kind: Literal["kernels", "ops"]) -> tuple[NameTotal, ...]:
    rows: tuple[NameTotal, ...] = getattr(rank.per_step if per == "step" else rank, kind)
    return rows


def _units(report: TraceReport, per: Per) -> float | None:
    """The number of steps of all ranks together; `None` where names are compared by call."""
    return max(_num_steps(report), 1) if per == "step" else None


def _mean(report: TraceReport, of: Callable[[Breakdown], float], per: Per) -> float:
    """Per usual step, per rank's trace, or per second, of all ranks together."""
    report = of_usual_steps(report) if per == "step" else report
    seconds = max(sum(rank.total.span_us for rank in report.ranks) / SECOND_US, 1 / SECOND_US)
    units = {"step": _num_steps(report), "capture": len(report.ranks), "second": seconds}
    parts = (of(each) for rank in report.ranks for each in (rank.steps if per == "step" else (rank.total,)))
    return sum(parts) / (units[per] or 1)


def _changes(
    a: TraceReport,
    b: TraceReport,
    rows: Callable[[RankTrace], Iterable[NameTotal]],
    on_gpu: bool,
    per: Per,
) -> tuple[Change, ...]:
    return _compared(_by_name(a, rows, on_gpu), _by_name(b, rows, on_gpu), _units(a, per), _units(b, per))


def _shape_changes(a: TraceReport, b: TraceReport, per: Per) -> tuple[Change, ...]:
    before, after = _by_shape(a, per), _by_shape(b, per)
    return _compared(before, after, _units(a, per), _units(b, per)) if before and after else ()


def _compared(before: Totals[str], after: Totals[str], *units: float | None) -> tuple[Change, ...]:
    """The changes by name, those first that cost most."""
    growth = {}
    for name in {**before, **after}:
        (a_us, a_count), (b_us, b_count) = (side.get(name, (0.0, 0.0)) for side in (before, after))
        change = _change(name, _in_units(a_us, a_count, units[0]), _in_units(b_us, b_count, units[1]))
        growth[name] = (change.change_us * (1 if units[0] else max(a_count, b_count)), change)
    return tuple(growth[name][1] for name in sorted(growth, key=lambda name: (-growth[name][0], name)))


def _in_units(us: float, count: float, units: float | None) -> float:
    """Per step and rank; per call, where no units are given."""
    return us / (max(count, 1) if units is None else units)


def _notes(a: TraceReport, b: TraceReport) -> Iterator[Finding]:
    """Notes on both captures; what only one has recorded would look new or gone."""
    if _has_shapes(a) != _has_shapes(b):
        yield noticed("shapes-on-one-side", side="A" if _has_shapes(a) else "B")
    for side, report in (("A", a), ("B", b)):
        details = of_level(report.findings, "detail")
        for each in details:
            left_out = PARTS_OF_STEP if each.figures.get("case") == "outlying-step" else None
            yield with_figures(each, of=f"{side}: ", left_out=left_out)


def _has_shapes(report: TraceReport) -> bool:
    return bool(report.shapes) or any(row.kind == "shapes" for row in report.operators or ())


def _by_shape(report: TraceReport, per: Per) -> Totals[str]:
    rows = report.shapes if per != "step" or report.shapes_in_steps is None else report.shapes_in_steps
    return _sums((_name(row), row.device_us, row.count) for row in rows or ())


def _name(row: ShapeTotal) -> str:
    return " ".join(filter(None, (row.name, row.shapes, row.types)))


def _sums(rows: Iterable[tuple[str, float, float]]) -> Totals[str]:
    sums: dict[str, tuple[float, float]] = {}
    for name, us, count in rows:
        old_us, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = (old_us + us, old_count + count)
    return sums


MAX_ROWS = 10_000
"""The row limit of a rank, and of a report; those with most time."""
RowName = tuple[RowKind, str]
Path = tuple[RowName, ...]
"""The places from the outermost module or operator to the one that is meant."""


def operator_changes(
    a: TraceReport, b: TraceReport, per: Per, uneven: Collection[str] = ()
) -> tuple[OperatorChange, ...] | None:
    """The tree of operators of both, without what is `uneven`; `None` unless both reports have theirs."""
    before, after = _tree(a, per), _tree(b, per)
    if before is None or after is None:
        return None
    paths = [path for path in {**before, **after} if _comparable(path, before) and _comparable(path, after)]
    paths = [path for path in paths if not any(kind == "op" and name in uneven for kind, name in path)]
    if _has_shapes(a) != _has_shapes(b):
        paths = [path for path in paths if path[-1][0] != "shapes"]
    changed = {path for path in paths if before.get(path) != after.get(path)}
    shown = {path[:end] for path in changed for end in range(1, len(path) + 1)}
    changes = {path: _operator_change(path, before, after) for path in shown}
    ordered = sorted(shown, key=lambda path: (-changes[path].change_us, path))
    return tuple(changes[path] for path in in_order(ordered))


def _tree(report: TraceReport, per: Per) -> Totals[Path] | None:
    is_whole = per != "step" or report.operators_in_steps is None
    rows = report.operators if is_whole else report.operators_in_steps
    if rows is None:
        return None
    units = _units(report, per)
    found: dict[Path, tuple[float, float]] = {}
    path: Path = ()
    for row in rows:
        path = (*path[: row.depth], (row.kind, row.name))
        found[path] = (_in_units(row.total_us, row.count, units), row.count / (units or 1))
    return found


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Each path after the one around it, in the order in which those of one place come."""
    inner: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        inner[path[:-1]].append(path)
    found: list[Path] = []
    waiting = inner[()][::-1]
    while waiting:
        found.append(waiting.pop())
        waiting += inner[found[-1]][::-1]
    return found


def _comparable(path: Path, side: Totals[Path]) -> bool:
    """Whether a side that lacks the path really does: of a tree that was cut, only the longest are known."""
    return path in side or len(side) < MAX_ROWS


def _operator_change(path: Path, before: Totals[Path], after: Totals[Path]) -> OperatorChange:
    (a_us, a_count), (b_us, b_count) = (side.get(path, (0.0, 0.0)) for side in (before, after))
    state: State = "slower" if b_us > a_us else "faster" if b_us < a_us else "same"
    if path not in before or path not in after:
        state = "new" if path in after else "gone"
    kind, name = path[-1]
    change = _change(name, a_us, b_us)
    return OperatorChange(
        **vars(change), depth=len(path) - 1, kind=kind, state=state, a_count=a_count, b_count=b_count
    )


def _by_name(
    report: TraceReport, rows: Callable[[RankTrace], Iterable[NameTotal]], on_gpu: bool
) -> Totals[str]:
    of_ranks = (row for rank in report.ranks for row in rows(rank))
    return _sums((row.name, row.device_us if on_gpu else row.host_us, row.count) for row in of_ranks)


def _change(name: str, a_us: float, b_us: float) -> Change:
    percent = 100 * (b_us / a_us - 1) if a_us else None
    return Change(name, a_us, b_us, b_us - a_us, percent)
