"""A gate's answer for other programs: JUnit XML for test reports, Markdown for a pull request."""

from xml.sax.saxutils import escape, quoteattr

from gpurun.launcher.compare.gate import NOT_SLOWER, SLOWER, Gate, GateRow, percent_text
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.report import markdown
from gpurun.launcher.report.footnotes import warning_lines
from gpurun.launcher.report.terminal.changes import BOUNDS, GATE_HEADER, gate_cells

MARKS = {SLOWER: "❌", NOT_SLOWER: "✅"}
"""Before the headline; undecided: `❔`."""


def gate_markdown(comparison: Comparison, gate: Gate, versions: str) -> str:
    """The answer, a table of the variants, warnings.

    Args:
        versions: what was compared: `a: main (1a2b3c4d5e)   b: working copy`.
    """
    cells = [GATE_HEADER, ("---",) * len(GATE_HEADER), *map(gate_cells, gate.rows)]
    rows = ["| " + " | ".join(markdown.escape(cell) for cell in row) + " |" for row in cells]
    rows[1] = rows[1].replace("\\", "")
    warnings = [f"- ⚠ {markdown.escape(line)}" for line in warning_lines(comparison.variants)]
    answer = f"{MARKS.get(gate.outcome, '❔')} **{markdown.escape(gate.headline)}**"
    details = [markdown.escape(line) for line in gate.details]
    parts = [
        answer,
        " ".join(details),
        "\n".join(warnings),
        "\n".join(rows),
        markdown.escape(versions),
        BOUNDS,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def junit_xml(comparison: Comparison, gate: Gate, versions: str) -> str:
    """A test case per variant: a failure if it is slower, an error if that is undecided."""
    failures = len(gate.of(SLOWER))
    errors = len(gate.rows) - failures - len(gate.of(NOT_SLOWER))
    cases = "\n".join(_test_case(comparison.name, gate, row) for row in gate.rows)
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<testsuites tests="{len(gate.rows)}" failures="{failures}" errors="{errors}">\n'
        f'<testsuite name={quoteattr(comparison.name)} tests="{len(gate.rows)}" failures="{failures}" '
        f'errors="{errors}">\n'
        f"{cases}\n"
        f"<system-out>{escape(f'{versions}; {gate.summary}')}</system-out>\n"
        "</testsuite>\n</testsuites>\n"
    )


def _test_case(suite: str, gate: Gate, row: GateRow) -> str:
    head = f"<testcase classname={quoteattr(suite)} name={quoteattr(row.label)}"
    if row.outcome == NOT_SLOWER:
        return f"{head}/>"
    kind = "failure" if row.outcome == SLOWER else "error"
    figures = ", ".join(
        f"{name} {cell}" for name, cell in zip(GATE_HEADER[1:], gate_cells(row)[1:], strict=True) if cell
    )
    message = f"{row.outcome}: more than {percent_text(gate)} than {gate.before}?"
    text = escape(f"{row.why}; {figures}" if row.why else figures)
    return f"{head}><{kind} message={quoteattr(message)}>{text}</{kind}></testcase>"
