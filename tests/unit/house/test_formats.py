"""Percentages and thousands are written one way."""

import ast

from tests.unit.house.source import ROOT, modules, page


def test_percentages_have_one_format() -> None:
    """`22 %`, as `format_percent` writes them; Python's own `%` format would leave the space out."""
    assert not (found := formatted_with("%")), "\n".join(found)


def test_thousands_have_one_format() -> None:
    """`1,520`, by `format_number` and those that use it; the page's are by `number`, which does the same."""
    assert {place.partition(":")[0] for place in formatted_with(",")} == {"launcher/units.py"}
    script = (ROOT / "launcher/tensorboard_plugin/static/shared/format.js").read_text()
    assert "replace(/\\B(?=(\\d{3})+$)/g, ',')" in script
    others = [path for path in page() if "toLocaleString" in (ROOT / path).read_text()]
    assert not others, "grouped by the browser's language, not by `number`"


def formatted_with(sign: str) -> list[str]:
    """Where a value is formatted with the sign; not in workloads, which can't import the formatter."""
    return [
        f"{module.path}:{node.lineno}"
        for module in modules().values()
        if module.package != "workloads"
        for node in module.nodes
        if isinstance(node, ast.FormattedValue) and node.format_spec and sign in ast.unparse(node.format_spec)
    ]
