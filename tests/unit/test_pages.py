"""The pages give the rules by which a loss or a warning is shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.launcher.compare.figures.ranks import APART_OF_ABLATION, APART_OF_STEP, ExposedComm, disagreement
from gpurun.launcher.compare.variant_causes import largest_loss
from gpurun.launcher.trace.causes import MENTION_FROM
from tests.known import known
from tests.unit.compare.test_compare_explain import asleep

DOCS = Path(__file__).parents[2] / "docs"


def test_a_larger_difference_is_not_shown_where_it_may_be_chance() -> None:
    """As the page of verdicts says."""
    assert disagreement(ExposedComm(0.72, 4.01), (-5.3, 17.6), step_ms=60.8) == ()
    assert disagreement(ExposedComm(2.34, 3.76), (2.41, 13.1), step_ms=26.2) != ()
    page = (DOCS / "verdicts.md").read_text()
    assert f"more than {100 * APART_OF_ABLATION:g} % more or less" in page
    assert f"more than {100 * APART_OF_STEP:g} % of the step" in page


def test_what_goes_before_blocked_time_is_as_the_page_of_traces_says() -> None:
    page = (DOCS / "traces.md").read_text()
    assert f"another loss of at least {100 * MENTION_FROM:g} % of the step goes first" in page

    def named(wait_ms: float) -> str:
        """The loss where both ranks sleep through a step of 50 ms, but for the wait of rank 1 for rank 0."""
        ranks = asleep(0, 32, 50.0), asleep(1, 32, 50.0 - wait_ms, wait_ms)
        worked: Any = {"step_ms": 50.0, "cpu_ms": 1.1, "thread_cpu_ms": 1.1}
        return known(largest_loss(tuple(replace(rank, **worked) for rank in ranks))).text

    assert "rank 1 waits 40 % of its step (20.0 of 50.0 ms)" in named(20.0)
    assert "(46.9 to 48.9 of 50.0 ms) blocked" in named(2.0)
