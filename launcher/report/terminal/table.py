"""The table that ends every run: what was measured, what is fastest, and how sure that is.

Columns that don't fit are dropped, never wrapped. `plain` is for pipes: no colour, every column, ASCII bars,
one line per variant and per sentence.
"""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from gpurun.launcher.compare.figures.ranks import slowest_rank
from gpurun.launcher.compare.label import split_label, varied_text
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.findings.finding import NEXT, Screen, screen_of
from gpurun.launcher.jobfile.values import node_bounds
from gpurun.launcher.report.footnotes import (
    detail_lines,
    factor_text,
    measured_line,
    uncertainty_text,
    verdict_text,
)
from gpurun.launcher.report.metrics import Figure, figures_of, parts_ms, timed_parts
from gpurun.launcher.report.terminal.changes import gate_table
from gpurun.launcher.report.terminal.curves import (
    balanced_lines,
    batch_curve_lines,
    curve_lines,
    is_of_curves,
)
from gpurun.launcher.report.terminal.layout import (
    GAP,
    Column,
    Page,
    fit,
    header_line,
    row_line,
    screen_lines,
    to_string,
    total_width,
)
from gpurun.launcher.units import plural


@dataclass(frozen=True)
class BarPart:
    """A piece of a bar. Glyphs separate the parts where there is no colour."""

    label: str
    ms: float
    glyph: str
    ascii_glyph: str
    style: str

    def glyph_in(self, plain: bool) -> str:
        return self.ascii_glyph if plain else self.glyph


TRACED = {
    "compute": ("▇", "=", "blue"),
    "transfer": ("▒", "#", "yellow"),
    "wait": ("░", "-", "red"),
    "copy": ("▪", "+", "cyan"),
    "input": ("◦", "o", "magenta"),
    "other_steps": ("▫", "*", "green"),
    "idle": ("·", ".", "bright_black"),
}
"""Glyph, glyph without box drawing, and colour of the parts of a traced step (`PARTS`)."""

TIMED = {
    "input": TRACED["input"],
    "h2d": TRACED["copy"],
    "forward": ("╱", "/", "blue"),
    "backward": ("╲", "\\", "yellow"),
    "optimizer": ("┼", "x", "green"),
    "between_phases": TRACED["idle"],
}
"""Glyph, glyph without box drawing, and colour of the parts of a timed step (`PHASES`)."""


def parts_of(variants: Sequence[VariantResult]) -> list[tuple[BarPart, ...]]:
    """A bar for each variant, of its slowest rank; all of one kind, so that a glyph means one thing.

    What the trace shows where every variant that was timed has one, else the phases.
    """
    traced = [_traced_parts(variant) for variant in variants]
    timed = [phase_parts(variant) for variant in variants]
    has_all = all(parts or not phases for parts, phases in zip(traced, timed, strict=True))
    return traced if has_all else timed


def phase_parts(variant: VariantResult) -> tuple[BarPart, ...]:
    """The phases of the variant's slowest rank, as long as its step; empty where none was measured."""
    rank, step = slowest_rank(variant.ranks), variant.step_ms
    parts = timed_parts(rank, step.estimate if step else None) if rank else {}
    least_ms = 1e-6 * sum(parts.values())
    return tuple(
        BarPart(name.replace("_", " "), ms, *TIMED[name]) for name, ms in parts.items() if ms > least_ms
    )


def _traced_parts(variant: VariantResult) -> tuple[BarPart, ...]:
    """The traced step of the slowest rank, in proportion to the variant's step.

    A traced step is slower than a timed one, and there are only a few: its shares are what is to be seen.
    """
    rank = slowest_rank(variant.ranks)
    if rank is None or not rank.span_ms or variant.step_ms is None:
        return ()
    scale = variant.step_ms.estimate / rank.span_ms
    parts = (BarPart(name, scale * ms, *TRACED[name]) for name, ms in parts_ms(rank).items())
    return tuple(part for part in parts if part.ms > 0)


def draw_bar(parts: Iterable[BarPart], cells: int, full_ms: float, plain: bool) -> Text:
    """The bar, `cells` wide for `full_ms`. Rounds the edges, not the parts, so lengths stay comparable."""
    bar, end_ms, drawn = Text(), 0.0, 0
    for part in parts:
        end_ms += part.ms
        edge = min(cells, round(cells * end_ms / full_ms)) if full_ms > 0 else 0
        bar.append(part.glyph_in(plain) * (edge - drawn), part.style)
        drawn = edge
    return bar


def bar_legend(bars: Iterable[Sequence[BarPart]], drawn: Sequence[Text], plain: bool) -> Text:
    """Every label that is to be seen in the bars, once, with its glyph in its colour."""
    seen = {glyph for bar in drawn for glyph in bar.plain}
    first = {part.label: part for parts in bars for part in parts if part.glyph_in(plain) in seen}
    order = [name.replace("_", " ") for name in TIMED] + list(TRACED)
    parts = sorted(first.values(), key=lambda part: order.index(part.label) if part.label in order else 0)
    items = (Text.assemble(f"{part.label} ", (part.glyph_in(plain), part.style)) for part in parts)
    return Text("  ").join(items)


BAR_HEADER = "slowest rank"
BAR_CELLS = (len(BAR_HEADER), 40)
"""Least and most width of a bar; a narrower one wouldn't make its column narrower."""
VALUE_CHARS = 32
LEAST_HEADER = 8
"""Characters to which the header of a column of names may be cut."""
REASON_LINES = 3
"""A longer reason is cut; the log has all of it."""
STATUS_STYLES = {"oom": "red", "failed": "red", "timeout": "red", "hung": "red", "skipped": "dim"}


def render_table(
    comparison: Comparison,
    width: int,
    plain: bool,
    run_path: str | None = None,
    has_colour: bool = True,
    in_progress: str | None = None,
    above: tuple[str, ...] = (),
    details: bool = False,
    height: int | None = None,
) -> str:
    """The whole report for a terminal of `width` columns; `plain` is for a file or a pipe.

    `run_path` is the run directory as a person would type it, for the paths of logs and the last commands.
    `in_progress` says that a command works on the run now. `above` are messages about failures that the same
    reader has just read. `details` shows all that was found. Of a report that is longer than `height` lines,
    the answer comes again at the end.
    """
    page = Page(width, plain, run_path, in_progress, has_colour, above)
    screen = first_screen(comparison, page)
    parts = [screen, _body(comparison, page, details), footer(comparison, page, details)]
    lines = [line for part in parts if part for line in (*part, Text())][:-1]
    is_long = height is not None and len(lines) >= height
    again = [Text(), *first_screen(comparison, page, only_answer=True)] if is_long else []
    return to_string([*lines, *again], page)


def first_screen(comparison: Comparison, page: Page, only_answer: bool = False) -> list[Text]:
    """The answer, why, and what to do next; then dangers."""
    screen = report_screen(comparison, page.run, page.in_progress)
    if only_answer:
        screen = replace(screen, lines=screen.lines[:1], dangers=())
    return screen_lines(screen, None if page.plain else page.width)


def report_screen(comparison: Comparison, run: str | None, in_progress: str | None = None) -> Screen:
    """The first screen; of a run that isn't complete the next step is to go on with it.

    Args:
        comparison: of the run.
        run: its directory as a person would type it.
        in_progress: what a command that works on the run now does.
    """
    screen = screen_of(comparison.findings)
    if comparison.complete:
        lines = ((title, _with_path(text, run) if title == NEXT else text) for title, text in screen.lines)
        return replace(screen, lines=tuple(lines))
    said = (in_progress or incomplete_text(comparison, run)).removesuffix(".")
    lines = (line for line in screen.lines if line[0] != NEXT)
    return replace(screen, lines=(*lines, (NEXT, said)))


def _with_path(text: str, run: str | None) -> str:
    """The text with the run's path in its commands, where that is known."""
    return re.sub(r"\bRUN\b", lambda _: run or "RUN", text)


def _body(comparison: Comparison, page: Page, details: bool) -> list[Text]:
    """The table with its legend; of a gate its own, and the variants' with the details."""
    if is_of_curves(comparison):
        return curve_lines(comparison)
    if comparison.gate is None:
        return _variants(comparison, page)
    gate = [Text(line) for line in gate_table(comparison.gate, page.line_width)]
    return [*gate, Text(), *_variants(comparison, page)] if details or not gate else gate


def _variants(comparison: Comparison, page: Page) -> list[Text]:
    """The table of all variants with its legend."""
    width, plain = page.width, page.plain
    ranked, unranked = by_rank(comparison)
    names = _name_columns([*ranked, *unranked])
    figures = _figure_columns(ranked)
    bars = parts_of(ranked)
    if not plain:
        names = _shortened(
            names, width + GAP - total_width([column for column in figures if not column.drop])
        )
        figures = _fitting(names, figures, width, any(bars))
    drawn = _bar_column(bars, width - total_width(names + figures), plain)
    lines = _ranked_lines(ranked, [*names, *figures, *drawn], comparison.fastest)
    before = None
    for row, variant in enumerate(unranked, start=len(ranked)):
        shown = replace(variant, reason=AS_ABOVE, log=None) if _ended_alike(variant, before) else variant
        if variant.log and any(variant.log in text for text in page.above):
            is_alone = len(comparison.variants) == 1
            shown = replace(shown, reason=SEE_ABOVE if is_alone else shown.reason, log=None)
        lines += _unranked_lines(shown, row_line(names, row), names, figures, page)
        before = variant
    if drawn:
        lines.append(Text.assemble(("Bars: ", "dim"), bar_legend(bars, drawn[0].cells, plain)))
    if cut := [column.legend for column in names if column.legend]:
        lines.append(Text(f"Columns of settings: {', '.join(cut)}", "dim"))
    return lines + [Text(f"{column.header}: {column.legend}", "dim") for column in figures if column.legend]


def _name_columns(variants: Sequence[VariantResult]) -> list[Column]:
    """Strategy and split, then a column per varied key."""
    keys = dict.fromkeys(key for variant in variants for key in variant.varied)
    if len(variants) > 1:  # what all have says nothing about their times
        keys = {key: None for key in keys if len({str(variant.varied.get(key)) for variant in variants}) > 1}
    columns = [
        Column("variant", tuple(Text(variant.strategy) for variant in variants)),
        Column("split", tuple(Text(split_label(variant)) for variant in variants)),
    ]
    for key in keys:
        values = (varied_text(key, v.varied[key]) if key in v.varied else "" for v in variants)
        columns.append(Column(key, tuple(Text(_in_a_cell(value)) for value in values)))
    return [column for column in columns if not column.is_empty]


def _shortened(names: list[Column], room: int) -> list[Column]:
    """The columns of names with headers as short as their cells, where they need more than `room`."""
    if total_width(names) <= room:
        return names
    return [
        replace(column, header=f"{column.header[: width - 1]}…", legend=column.header)
        if (width := max(LEAST_HEADER, *(cell.cell_len for cell in column.cells))) < len(column.header)
        else column
        for column in names
    ]


def _in_a_cell(value: str) -> str:
    """A varied value on one line; of a long one its beginning, whether or not a word ends there."""
    line = " ".join(value.split())
    return line if len(line) <= VALUE_CHARS else f"{line[: VALUE_CHARS - 1]}…"


def _figure_columns(ranked: Sequence[VariantResult]) -> list[Column]:
    """All metrics with a value here; after the first, how it compares with the baseline."""
    metrics = [
        Column(metric.short, tuple(map(_figure_text, found)), True, metric.drop, metric.legend)
        for metric, found in figures_of(ranked).items()
    ]
    against = [
        Column(
            "vs baseline",
            tuple(verdict_text(v.vs_baseline) for v in ranked if len(ranked) > 1),
            right=True,
            legend="by the time per sample" if len({v.global_batch for v in ranked}) > 1 else "",
        ),
        Column("±", tuple(uncertainty_text(v.vs_baseline) for v in ranked), right=True, drop=1),
        Column("speed", tuple(factor_text(v.vs_baseline) for v in ranked), right=True, drop=8),
        Column("", tuple(Text("" if v.status == "ok" else v.status, "yellow") for v in ranked)),
    ]
    return [*metrics[:1], *(column for column in against if not column.is_empty), *metrics[1:]]


def _figure_text(figure: Figure | None) -> Text:
    if figure is None:
        return Text("")
    return Text.assemble(figure.text, (f" {figure.uncertainty}" if figure.uncertainty else "", "dim"))


def _fitting(names: list[Column], figures: list[Column], width: int, bars: bool) -> list[Column]:
    """The figures that leave room for a bar, as far as it is worth more than they are."""
    room = width + GAP - total_width(names)
    if bars:
        figures = fit(figures, room - GAP - BAR_CELLS[0], least_drop=3)
    return fit(figures, room)


def _bar_column(bars: Sequence[Sequence[BarPart]], room: int, plain: bool) -> list[Column]:
    """The bars, all on one scale from 0 ms; none where the room is short or nothing was measured."""
    full_ms = max((sum(part.ms for part in parts) for parts in bars), default=0.0)
    if full_ms == 0 or (room < BAR_CELLS[0] and not plain):
        return []
    cells = min(max(room, BAR_CELLS[0]), BAR_CELLS[1])
    return [Column(BAR_HEADER, tuple(draw_bar(parts, cells, full_ms, plain) for parts in bars))]


def _ranked_lines(ranked: Sequence[VariantResult], columns: list[Column], fastest: str | None) -> list[Text]:
    lines = [header_line(columns)] if ranked else []
    for row, variant in enumerate(ranked):
        line = row_line(columns, row)
        if variant.id == fastest:
            line.stylize("bold")
        lines.append(line)
    return lines


SEE_ABOVE = "see above"
AS_ABOVE = "as above"
"""The text for a variant that one failure ended together with the one before."""


def _ended_alike(variant: VariantResult, above: VariantResult | None) -> bool:
    """Whether one reason with one log explains both, and there is nothing else to say."""
    if above is None or variant.log is None or variant.step_ms or above.step_ms:
        return False
    return (variant.status, variant.reason, variant.log) == (above.status, above.reason, above.log)


def _unranked_lines(
    variant: VariantResult, prefix: Text, names: list[Column], figures: list[Column], page: Page
) -> list[Text]:
    """Status and reason in place of the figures, the log beneath."""
    status_width = max(len("unsteady") + GAP, total_width(figures[:1]))  # as wide as the longest status
    indent = total_width(names) + status_width
    prefix.pad_right(total_width(names) - prefix.cell_len)
    reason = _reason_lines(variant, indent, page)
    status = Text(variant.status.ljust(status_width), STATUS_STYLES.get(variant.status, ""))
    lines = [Text.assemble(prefix, status, reason[0])]
    lines += [Text(" " * indent + more) for more in reason[1:]]
    if variant.log:
        log = f"log: {page.in_run(variant.log)}"
        lines.append(Text(" " * (indent if indent + len(log) <= page.width else GAP) + log, "dim"))
    return lines


def _reason_lines(variant: VariantResult, indent: int, page: Page) -> list[str]:
    ran = "no figures" if variant.wall_s is None else f"no steps; ran for {variant.wall_s:.1f} s"
    reason = _first_words(variant) or ran
    if variant.step_ms:
        reason = f"{reason}; before that, its steps took about {variant.step_ms.estimate:.3g} ms"
    if page.plain:
        return [reason]
    room = max(page.width - indent, 20)
    return textwrap.wrap(reason, room, max_lines=REASON_LINES, placeholder=" …")


_OUT_OF_MEMORY = re.compile(r"^(.*?ran out of memory)\b.*?(tried to allocate [\d.]+ \w+)", re.I | re.S)
"""The beginning of the message of an allocator, which goes on for lines; the log has it all."""


def _first_words(variant: VariantResult) -> str:
    """The reason on one line; of an allocator's message how much it lacked."""
    found = _OUT_OF_MEMORY.search(variant.reason or "")
    return " ".join((f"{found[1]}: {found[2]}" if found else variant.reason or "").split())


def footer(comparison: Comparison, page: Page, details: bool = False) -> list[Text]:
    """How it was measured, and what else there is, a line for each; or all of it."""
    found = [Text(text) for text in detail_lines(comparison, with_codes=details)]
    tables = [*balanced_lines(comparison.variants), *batch_curve_lines(comparison.batch_curves)]
    if details:
        return [*map(Text, tables), *([Text()] if tables and found else []), *found]
    measured = measured_line(comparison)
    so_far = "" if comparison.complete else "So far "
    lines = [Text(f"{so_far}{measured}", "dim")] if measured else []
    num = len(found) + bool(tables)
    return lines if page.run is None else [*lines, *_more_lines(page.run, num, comparison, page)]


def incomplete_text(comparison: Comparison, run: str | None) -> str:
    """The advice for a run that was stopped; the versions of a gate are gone with it."""
    if comparison.gate is not None:
        return "this gate is not complete: start it again."
    command = "gpurun tune" if comparison.search else "gpurun"
    resume = f"--resume {run or 'RUN'}"
    advice = f"{command} {resume} measures what is missing"
    if node_bounds(comparison.job.get("nodes") or 1)[1] > 1:
        from gpurun.launcher.schedulers import how_to_requeue  # few runs need it

        requeued = how_to_requeue((run or "").rstrip("/").rpartition("/")[2])
        ways = [*([requeued] if requeued else []), f"start all nodes as before, node 0 with {resume}"]
        advice = f"to measure what is missing, {', or '.join(ways)}"
    return f"this run is not complete: {advice}."


def _more_lines(run: str, num_details: int, comparison: Comparison, page: Page) -> list[Text]:
    """The commands that show more of the same run. Without figures there is nothing to view, but logs."""
    has_figures = any(variant.step_ms or variant.probe for variant in comparison.variants)
    code = " and the code to train with it" if _is_uneven(comparison) else ""
    more = [f"{plural(num_details, 'detail')}{code}: gpurun report {run} --details"] if num_details else []
    more.append(f"picture: gpurun view {run}" if has_figures else f"logs: gpurun logs {run}")
    line = "; ".join(more)
    return [Text(text, "dim") for text in ([line] if page.plain or len(line) <= page.width else more)]


def _is_uneven(comparison: Comparison) -> bool:
    """Whether the fastest variant has a split that a training script needs lines for."""
    fastest = next((variant for variant in comparison.variants if variant.id == comparison.fastest), None)
    return fastest is not None and len(set(fastest.split)) > 1
