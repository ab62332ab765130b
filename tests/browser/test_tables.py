"""The tables of `gpurun trace --show` in the tab: sorted, searched, opened, by rank and step."""

import re

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import OpenTab
from tests.whole import first

LOOKS = first(1, [(1280, False), (768, True)])
KINDS = ("kernels", "shapes", "operators", "collectives", "copies", "launches", "critical-path")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_every_table_fits_and_has_its_figures(open_tab: OpenTab, width: int, dark: bool) -> None:
    tab = open_tab("gpt", tab="tables", variant="ddp-2-48-16", against="none", width=width, dark=dark)
    assert tab.title().startswith("ddp 48/16: 2 ranks on GPU, 12 steps; times in ms")
    for kind in KINDS:
        tab.find(f"[data-key='table:{kind}']").click()
        tab.find(f"[data-key='table:{kind}'][aria-pressed=true]").wait_for()
        tab.drawn("tables")
        assert tab.widths() == (width, width), "the page must not scroll sideways"
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
        assert tab.find(".requested td.right").evaluate_all(cut) == []
        tab.watched.shoot(f"tables-{kind}-{width}-{'dark' if dark else 'light'}")
    expect(tab.find("main")).to_contain_text("Gains don't add up")
    expect(tab.find(".requested .total").first).to_contain_text("all, 12 steps")


@pytest.mark.slow
def test_columns_sort_names_are_found_and_the_address_keeps_it(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", tab="tables", variant="ddp-2-48-16")
    rows = tab.find(".requested tbody tr")
    tab.find("[data-key='table:1']").click()
    head = tab.find(".requested th").nth(2)
    expect(head).to_have_attribute("aria-sort", "descending")
    counts = [
        int(re.sub(r"\D", "", text)) for text in tab.find(".requested td:nth-child(3)").all_inner_texts()
    ]
    assert counts == sorted(counts, reverse=True)
    tab.await_state("tablesort", "1~down")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("flash_fwd")
    expect(rows).to_have_count(1)
    tab.page.keyboard.press("Escape")
    tab.find("[data-key='rank']").select_option(label="rank 1")
    tab.await_state("tablerank", "1")
    tab.drawn("tables")
    alone = [
        int(re.sub(r"\D", "", text)) for text in tab.find(".requested td:nth-child(3)").all_inner_texts()
    ]
    assert 2 * sum(alone) == sum(counts), "one of two ranks that launch equally much"


@pytest.mark.slow
def test_a_tree_opens_row_by_row_and_shows_what_changed(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", tab="tables", table="operators", variant="ddp-2-48-16", against="ddp-2-32-32")
    expect(tab.find("h1")).to_have_text("ddp 48/16: ms per step and rank")
    heads = tab.find(".requested th").all_inner_texts()
    assert [head.removesuffix(" ↓").removesuffix(" ↑") for head in heads][1:] == [
        "ddp 32/32",
        "ddp 48/16",
        "change",
        "%",
    ]
    before = tab.find(".requested tbody tr").count()
    opened = tab.find(".requested tr[aria-expanded=true]")
    if opened.count():
        opened.first.click()
        assert tab.find(".requested tbody tr").count() < before
    tab.find("[data-key='against']").select_option(label="nothing")
    tab.await_state("against", "none")
    tab.drawn("tables")
    expect(tab.find("main")).to_contain_text("self ms: what it launches, or computes, itself")


@pytest.mark.slow
def test_a_table_that_is_being_made_or_cannot_be_says_so(open_tab: OpenTab) -> None:
    tab = open_tab("gpt")
    failed = {"file": "ddp-2-48-16", "byte": None, "message": "the tables can't be made: killed"}
    answers: list[dict[str, object]] = [
        {"state": "building", "problems": []},
        {"state": "broken", "problems": [failed]},
    ]
    tab.page.route("**/tables?*", lambda route: _answer(route, answers))
    tab.find("[data-tab=tables]").click()
    expect(tab.find("[data-state=building]")).to_contain_text("for this table")
    expect(tab.find("[data-state=broken]")).to_contain_text("The tables can't be made: killed.")
    tab.page.unroute("**/tables?*")
    broken = open_tab("broken", tab="tables", variant="ddp-2-40-24")
    assert broken.title() == "The trace of ddp 40/24, rank 0, can’t be read."
    empty = open_tab("traced", tab="tables", table="shapes")
    expect(empty.find("main")).to_contain_text("the traces have no shapes")


@pytest.mark.slow
def test_a_program_that_ended_before_its_trace_says_so(open_tab: OpenTab) -> None:
    why = "The program ended before step 34, and steps 31 to 33 are traced."

    def too_short(route: Route) -> None:
        answer = route.fetch().json()
        for variant in answer["variants"]:
            variant |= {"traces": [], "untraced": why, "slowest_rank": None}
        for variant in answer["comparison"]["variants"]:
            variant["ranks"] = []
        route.fulfill(json=answer)

    page = open_tab("gpt").page
    page.route("**/run?*", too_short)
    for asked, title in (
        ({"variant": "dp-2-32-32"}, "dp 32/32 has no trace."),
        ({}, "Nothing was traced in this run."),
    ):
        tab = open_tab("gpt", tab="timeline", **asked)
        for view in ("timeline", "operators", "tables") if asked else ("where", "timeline"):
            tab.go(view)
            assert tab.title() == title
            expect(tab.find("[data-state=none]")).to_have_text(f"{title}{why}")
    page.unroute("**/run?*")


def _answer(route: Route, answers: list[dict[str, object]]) -> None:
    if answers:
        route.fulfill(json=answers.pop(0))
    else:
        route.continue_()
