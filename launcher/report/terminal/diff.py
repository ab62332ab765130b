"""What `gpurun diff` shows: every variant in both runs, and what else differs between them."""

import textwrap

from gpurun.launcher.compare.diff import Diff, VariantDiff
from gpurun.launcher.report.terminal.cells import uncertainty_text, verdict_text
from gpurun.launcher.report.terminal.grid import cut, grid
from gpurun.launcher.units import format_ms


def render_diff(diff: Diff, width: int) -> str:
    """Plain text at most `width` wide: a table, then reasons to doubt it."""
    header = ("variant", "a: step ms", "b: step ms", "b against a", "±")
    rows = [_row(one) for one in diff.variants]
    lines = [f"a: {diff.name_a}   b: {diff.name_b}"]
    if rows:
        lines += ["", *(cut(line, width) for line in grid(header, rows, right=(1, 2, 4))), ""]
        lines += [
            line for one in diff.variants if one.note for line in _item(f"{one.label}: {one.note}", width)
        ]
    for unlike in diff.not_comparable:
        lines += _item(f"{unlike.label}: not comparable, for it does other work: {unlike.reason}", width)
    lines += _only(diff.only_in_a, "a", width) + _only(diff.only_in_b, "b", width)
    if diff.marks:
        lines += ["Differs between the runs:"] + [cut(f"  {mark}", width) for mark in diff.marks]
    if diff.ci_level is not None:
        lines += _item(f"Verdicts, and ±, are at the {100 * diff.ci_level:.1f} % level.", width)
    if not rows:
        lines.append("No variant does the same work in both runs, so nothing can be compared.")
    return "\n".join(lines)


def _row(one: VariantDiff) -> tuple[str, ...]:
    return (
        one.label,
        "" if one.a_ms is None else format_ms(one.a_ms),
        "" if one.b_ms is None else format_ms(one.b_ms),
        verdict_text(one.difference).plain,
        uncertainty_text(one.difference).plain,
    )


def _only(ids: tuple[str, ...], run: str, width: int) -> list[str]:
    return _item(f"Only in {run}: {', '.join(ids)}", width) if ids else []


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)
