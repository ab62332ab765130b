"""The tab's operators: rows, rest and overlap add up to the step, and the rest is never less than nothing."""

from types import SimpleNamespace

import pytest

from launcher.tensorboard_plugin.operators import KINDS, operators_answer
from launcher.trace.analyse import analyse_paths
from tests.unit.trace_files import kernel, launch, span, step, write

SIDE_BY_SIDE = {
    "streams": [launch(0, 1, 1), launch(2, 1, 2), kernel("a", 5, 80, 1), kernel("b", 5, 90, 2, stream=8)],
    "threads": [span("cpu_op", "aten::a", 5, 80), span("cpu_op", "aten::b", 5, 90, tid=2)],
    "outside": [launch(150, 1, 1), kernel("a", 155, 300, 1)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("events", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
def test_the_rest_is_never_negative(tmp_path, events, kind) -> None:
    report = analyse_paths([write(tmp_path / "rank0.json", [step(1, 0, 100), *events])])
    answer = operators_answer(SimpleNamespace(ranks=report.ranks), None, kind)
    rows_ms = sum(row["self_ms"] for row in answer["rows"])
    assert answer["rest_ms"] >= report.ranks[0].steps[0].idle_us / 1000
    assert answer["overlap_ms"] >= 0
    assert rows_ms + answer["rest_ms"] - answer["overlap_ms"] == pytest.approx(answer["step_ms"])
