"""The comparison as Markdown: the answer, then a table. A gate's also as JUnit XML, for test reports."""

from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape as xml_escape
from xml.sax.saxutils import quoteattr

from gpurun.launcher.compare.gate import NOT_SLOWER, SLOWER, percent_text
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, Gate, GateRow, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.findings.finding import Screen, of_level, screen_of
from gpurun.launcher.report.footnotes import detail_lines, difference_texts
from gpurun.launcher.report.metrics import figures_of
from gpurun.launcher.report.terminal.changes import bounds_note, gate_cells, gate_header
from gpurun.launcher.report.terminal.table import (
    balanced_lines,
    batch_curve_lines,
    curve_lines,
    is_of_curves,
)

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
"""TensorBoard's Markdown knows no escape of these."""


NEW_LINE = "  \n"
"""Within a paragraph."""


def summary_markdown(comparison: Comparison) -> str:
    """Summary sentence, a table of all variants in the order of the terminal's, notes and warnings."""
    ranked, unranked = by_rank(comparison)
    screen = screen_of(comparison.findings, len(comparison.findings))
    answer = NEW_LINE.join((f"**{escape(comparison.headline)}**", *map(escape, lines_after(screen))))
    first = [f"**! {escape(text)}**\n" for text in screen.dangers]
    curves = [line.plain for line in curve_lines(comparison)] if is_of_curves(comparison) else []
    table = _indented(curves) if curves else _table([*ranked, *unranked])
    lines = [answer, "", *first, *table, ""]
    lines += [f"- {escape(line)}" for line in detail_lines(comparison)]
    found = [*balanced_lines(comparison.variants), *batch_curve_lines(comparison.batch_curves)]
    return "\n".join([*lines, *_indented(found)])


def lines_after(screen: Screen) -> list[str]:
    """`Why: …` and `Next: …`, after the answer."""
    return [f"{title}: {text}." for title, text in screen.lines[1:]]


def _indented(lines: Sequence[str]) -> list[str]:
    """Lines whose columns must stay beneath each other."""
    return ["", *(f"    {line}" for line in lines)] if lines else []


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line, also inside a table."""
    flat = " ".join(text.split())
    return "".join(_ENTITIES.get(char, f"\\{char}" if char in "\\`*_{}[]#|" else char) for char in flat)


def _table(results: Sequence[VariantResult]) -> list[str]:
    """The metrics that have a value here, with the comparison after the first."""
    figures = figures_of(results)
    columns = [(metric.short, [str(each or "") for each in found]) for metric, found in figures.items()]
    if len(results) > 1:
        columns.insert(1, ("vs baseline", [verdict_with_interval(result) for result in results]))
    columns = [("variant", [variant_label(result) for result in results]), *columns]
    columns.append(("status", [status_text(result) for result in results]))
    header, cells = zip(*columns, strict=True)
    return _piped(header, zip(*cells, strict=True))


def _piped(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    escaped = ([escape(cell) for cell in row] for row in rows)
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *escaped)]


def verdict_with_interval(variant: VariantResult) -> str:
    """`13.8 % slower ± 0.8`."""
    verdict, half = (text.plain for text in difference_texts(variant.vs_baseline))
    interval = f" ({half})" if " to " in half else f" ± {half}"
    return verdict + (interval if half else "")


def status_text(result: VariantResult) -> str:
    """How it ended, and why."""
    return f"{result.status}: {result.reason}" if result.reason else result.status


MARKS = {SLOWER: "❌", NOT_SLOWER: "✅"}
"""The mark before the headline; undecided: `❔`."""


def gate_markdown(comparison: Comparison, gate: Gate, versions: str) -> str:
    """The answer, a table of the variants, warnings.

    Args:
        versions: what was compared: `A: main (1a2b3c4d5e)   B: working copy`.
    """
    answer, *others = (each for each in comparison.findings if each.level not in ("danger", "detail"))
    said = [each.sentence for each in others]
    parts = [
        f"{MARKS.get(gate.outcome, '❔')} **{escape(answer.sentence)}**",
        escape(" ".join(said)),
        *(f"⚠ **{escape(each.text)}**" for each in of_level(comparison.findings, "danger")),
        "\n".join(_piped(gate_header(gate), map(gate_cells, gate.rows))),
        escape(versions),
        *bounds_note(gate),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def junit_xml(comparison: Comparison, gate: Gate, versions: str) -> str:
    """A test case per variant: a failure if it is slower, an error if that is undecided."""
    failures = len(gate.of(SLOWER))
    errors = len(gate.rows) - failures - len(gate.of(NOT_SLOWER))
    screen = screen_of(comparison.findings, len(comparison.findings))
    said = " ".join((comparison.headline, *lines_after(screen), *(f"{text}." for text in screen.dangers)))
    cases = "\n".join(_test_case(comparison.name, gate, row) for row in gate.rows)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites tests="{len(gate.rows)}" failures="{failures}" errors="{errors}">\n'
        f'<testsuite name={quoteattr(comparison.name)} tests="{len(gate.rows)}" failures="{failures}" '
        f'errors="{errors}">\n'
        f"{cases}\n"
        f"<system-out>{xml_escape(f'{versions}; {said}')}</system-out>\n"
        "</testsuite>\n</testsuites>\n"
    )


def _test_case(suite: str, gate: Gate, row: GateRow) -> str:
    head = f"<testcase classname={quoteattr(suite)} name={quoteattr(row.label)}"
    if row.outcome == NOT_SLOWER:
        return f"{head}/>"
    kind = "failure" if row.outcome == SLOWER else "error"
    figures = ", ".join(
        f"{name} {cell}"
        for name, cell in zip(gate_header(gate)[1:], gate_cells(row)[1:], strict=True)
        if cell
    )
    message = f"slower than {gate.before} by more than {percent_text(gate)}?"
    message = message.rstrip("?") if row.outcome == SLOWER else f"{row.outcome}: {message}"
    text = xml_escape(f"{row.why}; {figures}" if row.why else figures)
    return f"{head}><{kind} message={quoteattr(message)}>{text}</{kind}></testcase>"
