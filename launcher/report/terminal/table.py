"""The table that ends every run: what was measured, what is fastest, and how sure that is.

Curves are tables too: micro-benchmarks by size, throughput by batch, what devices cost in balanced splits.

Columns that don't fit are dropped, never wrapped. `plain` is for pipes: no colour, every column, ASCII bars,
one line per variant and per sentence.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from gpurun.launcher.compare.figures.ranks import slowest_rank
from gpurun.launcher.compare.figures.size_curves import (
    Balanced,
    BatchCurve,
    Curve,
    CurvePoint,
    DeviceCost,
    could_be_best,
)
from gpurun.launcher.compare.label import split_label, split_text, variant_label, varied_text, varied_texts
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.findings.finding import NEXT, screen_of
from gpurun.launcher.report.footnotes import (
    detail_lines,
    difference_texts,
    factor_text,
    measured_line,
)
from gpurun.launcher.report.metrics import Figure, figures_of, parts_ms, timed_parts, with_interval
from gpurun.launcher.report.terminal.changes import gate_table
from gpurun.launcher.report.terminal.grid import grid
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
from gpurun.launcher.report.terminal.plan import devices_text
from gpurun.launcher.rundir.records import MEASURED
from gpurun.launcher.splits import split_even, split_proportional
from gpurun.launcher.units import (
    GIB,
    Interval,
    format_count,
    format_gib,
    format_ms,
    format_number,
    format_rate,
    least_decimals,
    plural,
    size_text,
)


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
LEAST_HEADERS = (8, 4)
"""Characters to which the headers of columns of names may be cut, the second where the first isn't enough."""
REASON_LINES = 3
"""A longer reason is cut; the log has all of it."""
STATUS_STYLES = {"oom": "red", "failed": "red", "timeout": "red", "hung": "red", "skipped": "dim"}


def render_table(
    comparison: Comparison,
    width: int,
    plain: bool,
    run_path: str | None = None,
    has_colour: bool = True,
    above: tuple[str, ...] = (),
    details: bool = False,
    height: int | None = None,
) -> str:
    """The whole report for a terminal of `width` columns; `plain` is for a file or a pipe.

    `run_path` is the run directory as a person would type it, for the paths of logs and the last commands.
    `above` are messages about failures that the same reader has just read. `details` shows all that was
    found. Of a report that is longer than `height` lines, the answer comes again at the end.
    """
    page = Page(width, plain, run_path, has_colour, above)
    screen = first_screen(comparison, page)
    parts = [screen, _body(comparison, page, details), footer(comparison, page, details)]
    lines = [line for part in parts if part for line in (*part, Text())][:-1]
    is_long = height is not None and len(lines) >= height
    again = [Text(), *first_screen(comparison, page, only_answer=True)] if is_long else []
    return to_string([*lines, *again], page)


def first_screen(comparison: Comparison, page: Page, only_answer: bool = False) -> list[Text]:
    """The answer, why, and what to do next; then dangers."""
    screen, run = screen_of(comparison.findings), page.run or "RUN"
    lines = [
        (title, re.sub(r"\bRUN\b", lambda _: run, text) if title == NEXT else text)
        for title, text in screen.lines
    ]
    screen = replace(screen, lines=tuple(lines))
    if only_answer:
        screen = replace(screen, lines=screen.lines[:1], dangers=())
    return screen_lines(screen, None if page.plain else page.width)


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
    shown = names
    for least in LEAST_HEADERS:
        if total_width(shown) <= room:
            break
        shown = [
            replace(column, header=f"{column.header[: width - 1]}…", legend=column.header)
            if column is not names[0]
            and (width := max(least, *(cell.cell_len for cell in column.cells))) < len(column.header)
            else column
            for column in names
        ]
    return shown


def _in_a_cell(value: str) -> str:
    """A varied value on one line; of a long one its beginning, whether or not a word ends there."""
    line = " ".join(value.split())
    return line if len(line) <= VALUE_CHARS else f"{line[: VALUE_CHARS - 1]}…"


def _figure_columns(ranked: Sequence[VariantResult]) -> list[Column]:
    """All metrics with a value here; after the first, how it compares with the baseline."""
    has_batches = len({variant.global_batch for variant in ranked}) > 1
    metrics = [
        Column(metric.short, tuple(map(_figure_text, found)), True, metric.drop, metric.legend)
        for metric, found in figures_of(ranked).items()
    ]
    texts = [difference_texts(variant.vs_baseline) for variant in ranked]
    against = [
        Column(
            "per sample" if has_batches else "vs baseline",
            tuple(verdict for verdict, _ in texts if len(ranked) > 1),
            right=True,
            legend="the time of a sample, against the baseline's" if has_batches else "",
        ),
        Column("±", tuple(uncertainty for _, uncertainty in texts), right=True, drop=1),
        Column("speed", tuple(factor_text(v.vs_baseline) for v in ranked), right=True, drop=8),
        Column("", tuple(Text("" if v.status == "ok" else v.status, "yellow") for v in ranked)),
    ]
    return [*metrics[:1], *(column for column in against if not column.is_empty), *metrics[1:]]


def _figure_text(figure: Figure | None) -> Text:
    if figure is None:
        return Text("")
    return Text.assemble(figure.text, (f" {figure.uncertainty}" if figure.uncertainty else "", "dim"))


SHOWN_FROM = ((160, math.inf), (120, 8), (100, 3), (0, 1))
"""The highest `drop` of a column, by the width from which on it is shown, whatever other cells hold."""


def _fitting(names: list[Column], figures: list[Column], width: int, bars: bool) -> list[Column]:
    """The figures that leave room for a bar, as far as it is worth more than they are."""
    room = width + GAP - total_width(names)
    most = next(drop for least, drop in SHOWN_FROM if width >= least)
    figures = [column for column in figures if column.drop <= most]
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


_OUT_OF_MEMORY = re.compile(r"^(.*?ran out of memory)\b.*?tried to allocate ([\d.]+) (\w+)", re.I | re.S)
"""The beginning of the message of an allocator, which goes on for lines; the log has it all."""


def _first_words(variant: VariantResult) -> str:
    """The reason on one line; of an allocator's message how much it lacked."""
    found = _OUT_OF_MEMORY.search(variant.reason or "")
    if found and found[3] == "bytes":
        lacked = format_gib(float(found[2]) / GIB, 1)
        return f"{found[1]}: tried to allocate {lacked}"
    text = f"{found[1]}: tried to allocate {found[2]} {found[3]}" if found else variant.reason or ""
    return " ".join(text.split())


def footer(comparison: Comparison, page: Page, details: bool = False) -> list[Text]:
    """How it was measured, and what else there is, a line for each; or all of it."""
    found = [Text(text) for text in detail_lines(comparison, with_codes=details)]
    tables = [*balanced_lines(comparison.variants), *batch_curve_lines(comparison.batch_curves)]
    if details:
        return [*map(Text, tables), *([Text()] if tables and found else []), *found]
    measured = measured_line(comparison)
    so_far = "" if comparison.complete else "So far "
    lines = [Text(f"{so_far}{measured}", "dim")] if measured else []
    num = len(screen_of(comparison.findings).details)
    return lines if page.run is None else [*lines, *_more_lines(page.run, num, comparison, page)]


def _more_lines(run: str, num_details: int, comparison: Comparison, page: Page) -> list[Text]:
    """The commands that show more of the same run. Without figures there is nothing to view, but logs."""
    has_figures = any(variant.step_ms or variant.probe for variant in comparison.variants)
    num = plural(num_details, "detail") if num_details else "details"
    more = [f"{num}: gpurun report {run} --details"] if has_figures else []
    more.append(f"picture: gpurun view {run}" if has_figures else f"logs: gpurun logs {run}")
    line = "; ".join(more)
    return [Text(text, "dim") for text in ([line] if page.plain or len(line) <= page.width else more)]


CURVE_FIGURES: tuple[tuple[str, Callable[[CurvePoint], float | None], int], ...] = (
    ("GB/s", lambda point: point.gb_per_s, 2),
    ("bus GB/s", lambda point: point.bus_gb_per_s, 2),
    ("GFLOP/s", lambda point: point.gflop_per_s, 1),
    ("% of best", lambda point: point.ceiling_percent, 0),
    ("% of peak", lambda point: point.peak_percent, 1),
)
"""Header, value and decimals of the columns after the time; those without a value are left out."""


@dataclass(frozen=True)
class CurveTable:
    """A curve of a micro-benchmark as every report shows it."""

    name: str
    """`all-reduce`; of several variants `2 devices, all-reduce`."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """A size each, in the order of the curve's points."""


def curve_tables(variant: VariantResult, is_alone: bool) -> list[CurveTable]:
    """All curves of a variant; none where it isn't a micro-benchmark.

    Args:
        variant: of a comparison.
        is_alone: whether it is the only one, so that its devices need no name.
    """
    place = "" if is_alone else f"{variant_label(variant)}, "
    return [_curve_table(curve, place) for curve in (variant.probe.curves if variant.probe else ())]


def _curve_table(curve: Curve, place: str) -> CurveTable:
    columns = [(curve.series, [size_text(point.size, curve.unit) for point in curve.points])]
    columns.append(("time", [_curve_time(point) for point in curve.points]))
    for header, value, decimals in CURVE_FIGURES:
        values = [value(point) for point in curve.points]
        cells = ["" if v is None else format_number(v, least_decimals(v, decimals)) for v in values]
        columns += [(header, cells)] if any(cells) else []
    headers, cells_of = zip(*columns, strict=True)
    return CurveTable(f"{place}{curve.series}", headers, tuple(zip(*cells_of, strict=True)))


def is_of_curves(comparison: Comparison) -> bool:
    """Whether it is of a micro-benchmark, whose variants aren't ranked."""
    return any(variant.probe for variant in comparison.variants)


def curve_lines(comparison: Comparison) -> list[Text]:
    """Every curve of every variant; a variant without curves says why."""
    lines: list[Text] = []
    for variant in comparison.variants:
        lines += [Text()] if lines else []
        lines.append(Text(_benchmark_title(variant), "bold"))
        for table in curve_tables(variant, is_alone=True):
            header, *rows = grid(table.header, table.rows, right=range(len(table.header)))
            lines += [Text(header, "dim"), *map(Text, rows)]
        if variant.status not in MEASURED:
            lines.append(Text(f"{variant.status}: {variant.reason or 'no figures'}"))
    return lines


def _benchmark_title(variant: VariantResult) -> str:
    devices = devices_text(variant.devices)
    varied = {key: value for key, value in variant.varied.items() if key not in ("precision", "workload")}
    return " ".join((f"{variant.workload} on {devices}, {variant.precision}", *varied_texts(varied)))


def _curve_time(point: CurvePoint) -> str:
    """The median with its interval, in µs or ms."""
    scale, unit = (1e3, "ms") if point.time_us >= 1e4 else (1.0, "µs")
    decimals = 1 if point.time_us / scale < 1e3 else 0
    interval = point.ci_us and (point.ci_us[0] / scale, point.ci_us[1] / scale)
    return f"{with_interval(point.time_us / scale, interval, decimals)} {unit}"


NO_LINE = "–"
"""In place of α and β where the curve isn't α + β·b."""


def balanced_lines(variants: Sequence[VariantResult]) -> list[str]:
    """A paragraph per balanced variant, and what their symbols are."""
    lines = [
        line for variant in variants if variant.balanced for line in _balanced_lines_of(variant, variants)
    ]
    found = [variant.balanced for variant in variants if variant.balanced]
    legend = "T*: compute time of the slowest device by these costs."
    if any(balanced.optimum_over_measured is not None for balanced in found):
        legend += " T: the measured step."
    if any(device.straight and device.alpha_ci for balanced in found for device in balanced.devices):
        legend += " Ranges are 95 % intervals over rounds."
    return [*lines, f"  {legend}"] if lines else []


def _balanced_lines_of(variant: VariantResult, variants: Sequence[VariantResult]) -> list[str]:
    found = variant.balanced
    assert found is not None
    rows = [
        _device_row(device, samples) for device, samples in zip(found.devices, variant.split, strict=True)
    ]
    faster = [other for other in variants if other.id in found.beaten_by]
    header = ("device", "per step, ms", "per sample, ms", "curve", "samples")
    lines = [f"{variant_label(variant)}: cost per device, and the best split by these costs"]
    lines += [f"  {line}" for line in grid(header, rows, right=(4,))]
    lines += [f"  {_split_prediction(found, bool(faster))}"]
    also = [] if faster else _splits_as_good(found, variant)
    lines += [f"  {line}" for line in (*also, *_other_splits(found, sum(variant.split)))]
    if faster:
        quicker = ", ".join(
            f"{variant_label(other)} {format_ms(other.step_ms.estimate)} ms"
            for other in faster
            if other.step_ms
        )
        lines.append(f"  Measured faster than that: {quicker}.")
    if found.same_as:
        names = {other.id: variant_label(other) for other in variants}
        same = ", ".join(names.get(name, name) for name in found.same_as)
        lines.append(f"  These are the samples of {same} too: both were measured.")
    return lines


def _device_row(device: DeviceCost, samples: int) -> tuple[str, ...]:
    curve = "straight" if device.straight else "interpolated"
    if device.max_samples is not None:
        curve += f", memory for {device.max_samples}"
    alpha = f"{_cost_ms(device.alpha_ms)}{_cost_interval(device.alpha_ci)}"
    beta = f"{_cost_ms(device.beta_ms)}{_cost_interval(device.beta_ci)}"
    costs = (alpha, beta) if device.straight else (NO_LINE, NO_LINE)
    return (device.device, *costs, curve, str(samples))


def _split_prediction(found: Balanced, was_beaten: bool) -> str:
    """`Predicted step: 57.1 ms (T* = 55.8 ms + 1.30 ms overhead). Measured: 57.5 ms; T*/T = 0.97.`"""
    text = (
        f"Predicted step: {format_ms(found.predicted_ms)} ms (T* = {format_ms(found.optimum_ms)} ms"
        f"{_split_claim(found, was_beaten)} + {format_ms(found.overhead_ms)} ms overhead)."
    )
    if found.measured_ms is None or found.optimum_over_measured is None:
        return f"{text} Not measured."
    return f"{text} Measured: {format_ms(found.measured_ms)} ms; T*/T = {found.optimum_over_measured:.2f}."


def _split_claim(found: Balanced, was_beaten: bool) -> str:
    """The claim about T*, as far as the curves show it."""
    if was_beaten:
        return ""
    if all(device.straight for device in found.devices):
        return ", the minimum over all splits,"
    return ", the minimum by interpolation,"


def _splits_as_good(found: Balanced, variant: VariantResult) -> list[str]:
    """Splits that these costs don't separate from the best one."""
    ranges = could_be_best(found.devices, variant.split)
    parts = [
        f"{low} to {high} samples to {device.device}"
        for device, (low, high) in zip(found.devices, ranges, strict=False)
        if low < high
    ]
    given = ", ".join(parts)
    return [f"Within the error of these costs, the best split may also give {given}."] if given else []


def _other_splits(found: Balanced, batch: int) -> list[str]:
    """The results that one would have got without measuring."""
    even, proportional = ("even", found.even), ("in proportion to speed", found.proportional)
    parts = [
        (f"{name} ({split_text(cost.split)})", f"{format_ms(cost.step_ms)} ms")
        for name, cost in (even, proportional)
        if cost is not None
    ]
    said = [" would take ".join(parts[0]), *map(", ".join, parts[1:])] if parts else []
    flat = [device.device for device in found.devices if device.straight and device.beta_ms == 0]
    lines = [f"By the same costs, {'; '.join(said)}."] if said else []
    lines += filter(
        None, (_split_misfit(name, found, batch) for name, cost in (even, proportional) if not cost)
    )
    if flat:
        lines.append(f"There is no split in proportion to speed: samples take no time on {', '.join(flat)}.")
    return lines


def _split_misfit(name: str, found: Balanced, batch: int) -> str:
    """`Even (62/61) does not fit cpu:1.`; empty where nothing is too large."""
    betas = [device.beta_ms if device.straight else 0.0 for device in found.devices]
    split: tuple[int, ...] = ()
    if name == "even":
        split = split_even(batch, len(found.devices))
    elif min(betas) > 0:
        split = split_proportional(batch, [1 / beta for beta in betas])
    full = [
        device.device
        for device, samples in zip(found.devices, split, strict=False)  # even may have fewer chunks
        if device.max_samples is not None and samples > device.max_samples
    ]
    return f"{name.capitalize()} ({split_text(split)}) does not fit {', '.join(full)}." if full else ""


def _cost_ms(ms: float) -> str:
    """Three significant digits; a sample may take microseconds."""
    return format_number(ms, 4) if 0 < abs(ms) < 0.1 else format_number(ms, 3 if abs(ms) < 1 else 2)


def _cost_interval(ci: Interval | None) -> str:
    return f" ({_cost_ms(ci[0])} to {_cost_ms(ci[1])})" if ci else ""


CURVE_CELLS = 40
KNEE = "Knee: the smallest batch within 10 % of the highest throughput."
NO_KNEE = "No knee: only the largest batch is within 10 % of the best."


def batch_curve_lines(curves: Sequence[BatchCurve]) -> list[str]:
    """A small picture per curve."""
    return [line for curve in curves for line in _batch_curve_picture(curve)]


def _batch_curve_picture(curve: BatchCurve) -> list[str]:
    best = max(point.samples_per_s for point in curve.points)
    rows = [
        (
            format_count(point.global_batch),
            format_rate(point.samples_per_s),
            "#" * round(CURVE_CELLS * point.samples_per_s / best) if best else "",
            "knee" if point.global_batch == curve.knee else "",
        )
        for point in curve.points
    ]
    lines = [f"Throughput of {curve.label} over its global batch:"]
    lines += [f"  {line}" for line in grid(("batch", "samples/s", "", ""), rows, right=(0, 1))]
    return [*lines, f"  {NO_KNEE if curve.knee is None else KNEE}"]
