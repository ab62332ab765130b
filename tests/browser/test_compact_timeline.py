"""The timeline of many ranks: a row a rank, what it is coloured and sorted by, and the way to all lanes."""

from contextlib import suppress
from typing import Any

import pytest
from playwright.sync_api import TimeoutError, expect

from tests.browser.conftest import OpenTab
from tests.browser.pages import Tab

ROW_PX = 12
MERGED = """async (body, steps) => {
  const loaded = performance.getEntriesByType("resource").map((each) => each.name);
  const layout = await import(loaded.find((name) => name.endsWith("timeline/layout.js")));
  return [layout.mergedSteps(steps), layout.meanStepMs(layout.mergedSteps(steps))];
}"""
"""What the page makes of the steps of all ranks, and how long it says that they take."""


IDLE = """async () => {
  const loaded = performance.getEntriesByType("resource").map((each) => each.name);
  const { idleIn } = await import(loaded.find((name) => name.endsWith("timeline/compact.js")));
  const lane = { lane: 3, band: { activeNs: [10, 90] } };
  const lanes = [null, { from: 0, to: 50, lanes: new Set([3]) }, { from: 0, to: 50, lanes: new Set([4]) }];
  return lanes.map((each) => idleIn(lane, each));
}"""
"""Where a row is idle before anything is loaded, when half of it is, and when other rows are."""


def mesh(open_tab: OpenTab, **more: Any) -> Tab:
    tab = open_tab("mesh", tab="timeline", **more)
    tab.find("[data-canvas=lanes][data-drawn=true]").wait_for()
    tab.settled()
    return tab


def tip_of_row(tab: Tab, row: int, with_text: str = "") -> str:
    tip = tab.find(".tip:not([hidden])", has_text=with_text)
    for attempt in range(60):  # a view that is drawn again meanwhile hides it until the pointer moves
        tab.find("[data-canvas=lanes]").hover(position={"x": 40 + attempt % 2, "y": ROW_PX * row + 5})
        with suppress(TimeoutError):
            return tip.inner_text(timeout=1000)
    raise AssertionError(f"row {row} has no tip with {with_text!r}")


def legend(tab: Tab) -> list[str]:
    return tab.find(".legend li").all_inner_texts()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (800, False), (800, True)])
def test_many_ranks_have_a_row_each(open_tab: OpenTab, dark: bool, width: int) -> None:
    tab = mesh(open_tab, dark=dark, width=width, height=1100)
    assert tip_of_row(tab, 5).startswith("rank 5")
    assert legend(tab) == [
        "compute",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "send/recv",
        "wait",
        "idle",
    ]
    content, window = tab.widths()
    assert content <= window
    tab.watched.shoot(f"timeline-64-{width}-{'dark' if dark else 'light'}")


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_slowest_rank(open_tab: OpenTab) -> None:
    """Stages of a pipeline begin and end it at different times."""
    spans = [(0, 1, 0, 30), (1, 1, 10, 45), (0, 2, 40, 80), (1, 2, 50, 85)]
    steps = [dict(zip(("rank", "step", "start_ns", "end_ns"), span, strict=True)) for span in spans]
    found, mean_ms = mesh(open_tab, height=1100).find("body").evaluate(MERGED, steps)
    assert [(step["step"], step["longest_ns"], step["shown_end_ns"]) for step in found] == [
        (1, 35, 40),
        (2, 40, 85),
    ]
    assert mean_ms == pytest.approx(37.5e-6)


@pytest.mark.slow
def test_what_is_not_loaded_yet_is_not_called_idle(open_tab: OpenTab) -> None:
    found = mesh(open_tab, height=1100).find("body").evaluate(IDLE)
    assert found == [None, {"from": 10, "to": 50}, None]


@pytest.mark.slow
def test_rows_are_sorted_and_coloured_as_asked_for(open_tab: OpenTab) -> None:
    tab = mesh(open_tab, height=1100)
    order = tab.find("[aria-label=order]")
    assert order.locator("option").all_inner_texts() == [
        "by rank", "by wait", "by pipeline stage", "by data group", "by tensor group",
    ]  # fmt: skip
    order.select_option(label="by wait")
    tab.await_state("order", "wait")
    tab.settled()
    waits = [
        float(tip_of_row(tab, row, "per step").split("per step ")[1].split()[0]) for row in range(0, 64, 9)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[-1]
    tab.watched.shoot("timeline-64-wait")
    order.select_option(label="by data group")
    tab.await_state("order", "group-data")
    tab.settled()
    assert [tip_of_row(tab, row).split()[1] for row in range(9)] == [
        "0",
        "4",
        "8",
        "12",
        "16",
        "20",
        "24",
        "28",
        "1",
    ]
    tab.find("[aria-label=colour]").select_option(label="colours by parallelism")
    tab.await_state("colours", "parallelism")
    expect(tab.find(".legend li")).to_have_text(["compute", "data", "tensor", "pipeline", "wait", "idle"])
    tab.settled()
    tab.watched.shoot("timeline-64-group")
    tab.page.reload()
    tab.drawn("timeline")
    assert order.input_value() == "group-data"


@pytest.mark.slow
def test_a_row_leads_to_collectives_and_to_all_lanes(open_tab: OpenTab) -> None:
    tab = mesh(open_tab, height=1100)
    tab.find("[data-canvas=lanes]").focus()
    tab.page.keyboard.press("n")
    panel = tab.find(".panel")
    expect(panel).to_contain_text("ncclDevKernel")
    tab.settled()
    tab.watched.shoot("timeline-64-selected")
    tab.page.keyboard.press("Escape")
    expect(panel).to_contain_text("Click a block")
    tab.find("[data-canvas=lanes]").click(position={"x": 40, "y": ROW_PX * 7 + 5})
    tab.await_state("rank", "7")
    tab.settled()
    assert "rank 7" in tab.find(".tip").inner_text() or tab.find("button", has_text="All 64 ranks").count()
    tab.find("button", has_text="All 64 ranks").click()
    tab.find("[data-key='rows:lanes']").click()
    tab.await_state("rows", "lanes")
    tab.find("[data-key='rows:compact']").click()
    tab.await_state("rows", "compact")
