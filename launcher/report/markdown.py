"""The comparison as Markdown: the answer, then a table."""

from collections.abc import Sequence

from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import by_rank
from gpurun.launcher.report.facts import fact_lines, warning_lines
from gpurun.launcher.report.terminal.cells import number_text, uncertainty_text, verdict_text
from gpurun.launcher.report.terminal.curves import balanced_lines, batch_curve_lines
from gpurun.launcher.units import format_ms, format_rate

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
"""TensorBoard's Markdown knows no escape of these."""
HEADER = ("variant", "step ms", "vs baseline", "samples/s", "efficiency", "status")


def summary_markdown(comparison: Comparison) -> str:
    """Summary sentence, a table of all variants in the order of the terminal's, notes and warnings."""
    ranked, unranked = by_rank(comparison)
    rows = [_row(variant) for variant in (*ranked, *unranked)]
    answer = f"**{escape(comparison.answer)}** {escape(comparison.details)}".rstrip()
    lines = [answer, "", *_table(rows), ""]
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


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    body = [[escape(cell) for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (HEADER, ["---"] * len(HEADER), *body)]


def _verdict(variant: VariantResult) -> str:
    half = uncertainty_text(variant.vs_baseline).plain.strip()
    return verdict_text(variant.vs_baseline).plain.strip() + (f" ± {half}" if half else "")


def _row(variant: VariantResult) -> list[str]:
    status = f"{variant.status}: {variant.reason}" if variant.reason else variant.status
    return [
        variant_label(variant),
        format_ms(variant.step_ms.median, variant.step_ms.ci) if variant.step_ms else "",
        _verdict(variant),
        "" if variant.samples_per_s is None else format_rate(variant.samples_per_s),
        number_text(variant.scaling_efficiency, 2).plain,
        status,
    ]
