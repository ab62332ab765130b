"""The comparison as Markdown: the answer, then a table."""

from collections.abc import Sequence

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.report.footnotes import fact_lines, warning_lines
from gpurun.launcher.report.metrics import figures_of
from gpurun.launcher.report.terminal.cells import uncertainty_text, verdict_text
from gpurun.launcher.report.terminal.curves import balanced_lines, batch_curve_lines

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
"""TensorBoard's Markdown knows no escape of these."""


def summary_markdown(comparison: Comparison) -> str:
    """Summary sentence, a table of all variants in the order of the terminal's, notes and warnings."""
    ranked, unranked = by_rank(comparison)
    answer = f"**{escape(comparison.headline)}** {escape(comparison.details)}".rstrip()
    lines = [answer, "", *_table([*ranked, *unranked]), ""]
    lines += [f"- {escape(line)}" for line in (*fact_lines(comparison), *warning_lines(comparison.variants))]
    found = [*balanced_lines(comparison.variants), *batch_curve_lines(comparison.batch_curves)]
    return "\n".join([*lines, *_indented(found)])


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
    columns.insert(1, ("vs baseline", [_verdict(result) for result in results]))
    columns = [("variant", [variant_label(result) for result in results]), *columns]
    columns.append(("status", [_status(result) for result in results]))
    header, cells = zip(*columns, strict=True)
    rows = [[escape(cell) for cell in row] for row in zip(*cells, strict=True)]
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def _verdict(variant: VariantResult) -> str:
    half = uncertainty_text(variant.vs_baseline).plain.strip()
    return verdict_text(variant.vs_baseline).plain.strip() + (f" ± {half}" if half else "")


def _status(result: VariantResult) -> str:
    return f"{result.status}: {result.reason}" if result.reason else result.status
