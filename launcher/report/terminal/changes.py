"""The output of `gpurun diff`: of two runs, every variant and other changes; of two captures, what grew."""

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from gpurun.launcher.compare.diff import Diff, NamedVariant, VariantDiff
from gpurun.launcher.compare.model import IN_RUN_A, Gate, GateRow
from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.findings.trace_cases import OF_ALL_STEPS
from gpurun.launcher.plan.model import Metric
from gpurun.launcher.report.footnotes import confidence_text, difference_texts
from gpurun.launcher.report.tables_on_request import Cell, ShownRow, ShownTable, TableContent
from gpurun.launcher.report.terminal.grid import cut, fitted
from gpurun.launcher.report.terminal.layout import clean, detail_lines, plain, screen_lines, table_of, text_of
from gpurun.launcher.report.terminal.trace import INDENT, MAX_NAMES, MAX_ROWS, notes_in
from gpurun.launcher.stats.estimates import ALPHA
from gpurun.launcher.trace.diff import Change, OperatorChange, TraceDiff, without_steps
from gpurun.launcher.units import (
    TWICE,
    format_count,
    format_factor,
    format_ms,
    format_number,
    plural,
    us_in_ms,
)

CHANGE = ("change", "%")
OPERATOR_TREE = "modules and operators by caller, that changed"
NO_OPERATOR_CHANGED = "No module or operator takes another time."
LEAST_US = 0.5
"""A shorter time, or a smaller change, is none in the digits that are shown."""
MAX_PERCENT = 1000
"""Percent from which on a growth reads better as a factor."""


def render_diff(diff: Diff, width: int, details: bool = True) -> str:
    """Plain text at most `width` wide: the answer, a table, then reasons to doubt it."""
    header = ("variant", "A: step ms", "B: step ms", "B against A", "±")
    rows = [
        (
            variant.label,
            *("" if ms is None else format_ms(ms) for ms in (variant.a_ms, variant.b_ms)),
            *(text.plain for text in difference_texts(variant.difference)),
        )
        for variant in diff.variants
    ]
    screen = screen_of(diff.findings)
    lines = [*(line.plain for line in screen_lines(screen, width)), ""]
    lines += [f"A: {diff.name_a}   B: {diff.name_b}"]
    more: list[str] = []
    if diff.gate is not None and diff.gate.rows:
        lines += ["", *gate_table(diff.gate, width), ""]
    elif rows:
        lines += ["", *fitted(header, rows, (1, 2, 4), width), ""]
        more += _notes(diff.variants)
    for unlike in diff.not_comparable:
        lines += _item(f"{unlike.label}: not comparable, since the work differs: {unlike.reason}", width)
    lines += _only(diff.only_in_a, "A", width) + _only(diff.only_in_b, "B", width)
    if diff.marks:
        lines += ["Differs between the runs:"] + [cut(f"  {mark}", width) for mark in diff.marks]
    if (
        diff.ci_level is not None
        and diff.gate is None
        and any(variant.difference.ci for variant in diff.variants)
    ):
        more.append(confidence_text(1 - ALPHA, diff.ci_level))
    more += [each.sentence for each in screen.details]
    said = [text for _, text in screen.lines]
    for each in detail_lines([each for each in more if each not in said], details):
        lines += _item(each, width) or [""]
    return "\n".join(lines)


GATE_TIMES: Mapping[Metric, str] = {"wall": "step ms", "cpu": "CPU ms"}


def gate_header(gate: Gate) -> tuple[str, ...]:
    """The columns of `gate_cells`."""
    time = GATE_TIMES[gate.metric]
    return ("variant", f"A: {time}", f"B: {time}", "B against A", "at least", "at most", "outcome")


def gate_table(gate: Gate, width: int) -> list[str]:
    """Lines of a table of all variants, with what the differences are at the least and at the most."""
    rows = [gate_cells(row) for row in gate.rows]
    note = bounds_note(gate)
    lines = fitted(gate_header(gate), rows, (1, 2, 3, 4, 5), width)
    return [*lines, *([""] if note else []), *(cut(line, width) for line in note)]


def bounds_note(gate: Gate) -> list[str]:
    """The origin of A, where no line above has it, and the meaning of the bounds, if the table has any."""
    origin = f"A is {gate.before}." if gate.before != IN_RUN_A else ""
    bounds = "At least, at most: one-sided 95 % bounds."
    said = " ".join(filter(None, (origin, bounds if any(row.ci for row in gate.rows) else "")))
    return [said] if said else []


def gate_cells(row: GateRow) -> tuple[str, ...]:
    """A variant's row, in the columns of `gate_header`."""
    times = ("" if ms is None else format_ms(ms) for ms in (row.a_ms, row.b_ms))
    is_factor = row.percent is not None and row.percent >= TWICE
    ends = row.ci or (None, None)
    shown = [
        ""
        if p is None
        else format_factor(p, row.ci)
        if is_factor
        else f"{format_number(p, 1, signed=True)} %"
        for p in (row.percent, *ends)
    ]
    return (row.label, *times, *shown, row.outcome)


def _notes(variants: Sequence[VariantDiff]) -> list[str]:
    """The notes on variants; once, and without names, where one holds for all of several."""
    notes = {variant.note for variant in variants}
    if len(variants) > 1 and len(notes) == 1:
        return [note for note in notes if note]
    return [f"{variant.label}: {variant.note}" for variant in variants if variant.note]


def _only(variants: Sequence[NamedVariant], run: str, width: int) -> list[str]:
    labels = ", ".join(variant.label for variant in variants)
    return _item(f"Only in {run}: {labels}", width) if variants else []


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)


def shown_changes(diff: TraceDiff, a: str, b: str) -> tuple[TableContent, str]:
    """The tree of operators that changed, and what its figures are; `a` and `b` are names of the sides."""
    if not diff.operators:
        return TableContent((), (_no_change(diff),)), _per(diff, a, b)
    rows = tuple(ShownRow(_change_cells(each), each.name, each.depth) for each in diff.operators)
    return TableContent((ShownTable((a, b, *CHANGE), OPERATOR_TREE, rows),), ()), _per(diff, a, b)


def _no_change(diff: TraceDiff) -> str:
    """Why there is no tree."""
    return NO_OPERATOR_CHANGED if diff.operators is not None else "their operators can't be compared"


def _change_cells(each: Change) -> tuple[Cell, ...]:
    return (
        Cell(us_in_ms(each.a_us), each.a_us),
        Cell(us_in_ms(each.b_us), each.b_us),
        Cell(format_number(each.change_us / 1000, 3, signed=True), each.change_us),
        Cell(change_text(each), each.percent),
    )


def render_operator_changes(diff: TraceDiff, width: int, details: bool = True) -> str:
    """The tree of operators that changed, as text, `width` columns wide."""
    rows = _most_changed(diff.operators or ())
    more = len(diff.operators or ()) - len(rows)
    tree = _changes(OPERATOR_TREE, rows) if rows else _no_change(diff)
    return _rendered(diff, [tree, *([f"… and {more} more; --json has all"] if more else [])], width, details)


def _rendered(diff: TraceDiff, tables: Sequence[RenderableType], width: int, details: bool) -> str:
    """The answer, what is compared, the tables, and what may be said of them."""
    parts = [*screen_lines(screen_of(diff.findings), width), "", _of_what(diff), "", *tables]
    parts += detail_lines(notes_in(diff.findings), details)
    return text_of(Group(*map(plain, parts)), width)


def _most_changed(rows: Sequence[OperatorChange]) -> list[OperatorChange]:
    """The rows that changed most, with those around them, in their order."""
    kept: set[int] = set()
    for place in sorted(range(len(rows)), key=lambda i: -abs(rows[i].change_us)):
        if len(kept) >= MAX_ROWS:
            break
        depth = rows[place].depth + 1
        for i in range(place, -1, -1):
            if rows[i].depth < depth:
                kept.add(i)
                depth = rows[i].depth
    return [rows[i] for i in sorted(kept)]


def _of_what(diff: TraceDiff) -> str:
    a, b = (
        f"{plural(num, 'rank')}{f' on {device}' if device else ''}"
        for num, device in zip(diff.num_ranks, diff.devices, strict=True)
    )
    return f"A: {a}, B: {b}; {_per(diff)}"


def render_trace_diff(diff: TraceDiff, width: int, details: bool = True) -> str:
    """The changes as text, `width` columns wide."""
    classes = [each for each in diff.classes if each.a_us or each.b_us]
    tables: list[RenderableType] = [_changes("", classes)] if classes else []
    for title, changes in (
        ("kernels", diff.kernels),
        ("operators", diff.ops),
        ("operators by shape", diff.shapes),
    ):
        if any(abs(each.change_us) >= LEAST_US for each in changes):
            some = (each for each in changes if max(each.a_us, each.b_us) >= LEAST_US)
            moved = sorted(some, key=lambda change: -abs(change.change_us))[:MAX_NAMES]
            tables += [""] if tables else []
            tables.append(_changes(title, sorted(moved, key=lambda change: -change.change_us)))
    return _rendered(diff, tables, width, details)


def _per(diff: TraceDiff, a: str = "A", b: str = "B") -> str:
    if diff.per == "step":
        return f"ms per step and rank{OF_ALL_STEPS if any(diff.outlying) else ''}"
    where = without_steps(diff, a, b)
    unmarked = f"no steps are marked in {where} (by profiler.step())"
    unit = "in all" if diff.per == "capture" else "per second"
    return f"{unmarked}, so ms {unit} of each rank's trace, and ms per call of kernels and operators"


def _changes(title: str, changes: Sequence[Change]) -> Table:
    table = table_of(("A", "B", *CHANGE), expand=True)
    table.add_column(title, no_wrap=True, overflow="ellipsis", ratio=1)
    for each in changes:
        name = clean(each.name.replace("_", " ") if not title else each.name)
        name = INDENT * each.depth + name if isinstance(each, OperatorChange) else name
        table.add_row(*(cell.text for cell in _change_cells(each)), name)
    return table


def change_text(each: Change) -> str:
    """`new`, `gone`, or by how many percent it grew."""
    if each.percent is None:
        return "new" if each.b_us else "-"
    if not each.b_us:
        return "gone"
    if each.percent < MAX_PERCENT:
        return format_number(each.percent, 1, signed=True)
    return f"× {format_count(each.b_us / each.a_us)}"
