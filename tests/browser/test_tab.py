"""The GPURUN tab in a real TensorBoard, by a real browser. Every page is held to: no error on the console,
no request to another origin (`pages.watched_page`)."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from gpurun.launcher.rundir.claim import read
from gpurun.launcher.rundir.files import RunDir, write_json
from tests.browser.conftest import OpenTab
from tests.browser.pages import ENTRY, VIEWS, Tab, plain, watched_page
from tests.browser.samples.odd_runs import advance
from tests.browser.samples.sample_runs import FASTEST, write_steps
from tests.whole import first

LOOKS = first(1, [(1280, False), (1280, True), (768, True)])


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_every_view_opens_by_a_click(open_tab: OpenTab, width: int, dark: bool) -> None:
    tab = open_tab("gpt", width=width, dark=dark, variant="ddp-2-40-24")
    for view, name in VIEWS.items():
        tab.go(view)
        assert tab.find("[role=tab][aria-selected=true]").inner_text() == name
        assert len(tab.title()) > 10
        assert tab.widths() == (width, width), "the page must not scroll sideways"
        tab.settled()
        tab.watched.shoot(f"{view}-{width}-{'dark' if dark else 'light'}")


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    return open_tab("gpt")


def test_splits_rank_variants_with_verdicts(tab: Tab) -> None:
    assert tab.title() == FASTEST
    rows = tab.find(".splits tbody tr")
    first = rows.nth(0)
    assert first.get_attribute("data-variant") == "ddp-2-34-30"
    assert "−4.9" in first.inner_text()
    assert "faster" in first.inner_text()
    assert "48.2" in first.inner_text()
    assert tab.find(".facts").inner_text().startswith("Noise: the same split measured twice differs by 0.2")
    reasons = plain(tab.find(".below").inner_text())
    assert "146.1 GiB" in reasons
    assert "unsteady: step time drifted" in reasons


@pytest.mark.slow
def test_code_in_a_sentence_has_no_backticks_and_a_figure_keeps_its_unit(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", tab="search")
    expect(tab.find("p.sub code")).to_have_text("compare")
    assert "`" not in tab.find("main").inner_text()
    tab.go("splits")
    assert "4.9\u00a0%" in tab.find("h1").inner_text()


ROUNDS = """async (strategies) => {
    const { subSentence } = await import(new URL('plugin/gpurun/static/splits/words.js', location.href));
    const variants = strategies.map((strategy) => ({ strategy }));
    return subSentence({ answer: {}, variants, leader: { result: { launches: 8 } } });
}"""


@pytest.mark.slow
def test_what_all_variants_share_is_no_choice(open_tab: OpenTab) -> None:
    tab = open_tab("one")
    expect(tab.find(".chip")).to_have_count(0)
    said = [tab.page.evaluate(ROUNDS, strategies) for strategies in (["ddp", "fsdp"], ["program"] * 3)]
    assert said == ["8 launches of each strategy, interleaved.", "8 launches of each variant, interleaved."]


@pytest.mark.slow
def test_columns_sort(tab: Tab) -> None:
    tab.find("[data-key='sort:peak_gib']").click()
    expect(tab.find("th.c-peak_gib")).to_have_attribute("aria-sort", "ascending")
    tab.find("[data-key='sort:peak_gib']").click()
    expect(tab.find("th.c-peak_gib")).to_have_attribute("aria-sort", "descending")
    assert tab.find(".splits tr[data-variant]").first.get_attribute("data-variant") == "ddp-2-48-16"


@pytest.mark.slow
def test_keys_walk_the_rows_and_open_one(tab: Tab) -> None:
    tab.find(".splits tr[data-variant]").first.focus()
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("Enter")
    tab.drawn("where")
    tab.await_state("variant", "ddp-2-33-31")
    expect(tab.find(".block.chosen .title")).to_have_text("ddp 33/31")


@pytest.mark.slow
def test_parts_of_a_bar_add_up_to_its_step(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", tab="where")
    block = tab.find("section[data-variant=ddp-2-48-16]")
    parts = block.locator(".bar").nth(1).locator("[data-value]")
    values = parts.evaluate_all("all => all.map((one) => Number(one.dataset.value))")
    assert sum(values) == pytest.approx(64.3, abs=0.3)
    assert block.locator(".total").all_inner_texts() == ["64.3", "64.3"]
    said = "64.3 ms a step as timed. Rank 1 waits 32 % of its step (20.8 of 64.3 ms)"
    expect(block.locator(".said")).to_contain_text(said)
    expect(block.locator("canvas")).to_have_attribute("aria-label", re.compile("224 steps, estimate 64.3 ms"))


@pytest.mark.slow
def test_operators_sort_search_and_differ(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", tab="operators", variant="ddp-2-48-16", against="ddp-2-32-32")
    assert tab.title().startswith("ddp 48/16 takes 13.6 ms")
    expect(tab.find("main")).to_contain_text("As timed, a step takes 64.3 ms against 50.7 ms.")
    rows = tab.find(".operators tbody").first.locator("tr")
    expect(rows).to_have_count(7)  # five operators, compute and copies that none of them launched
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("gelu")
    expect(rows).to_have_count(1)
    expect(rows.first).to_contain_text("aten::gelu")
    tab.page.keyboard.press("Escape")
    tab.find("[data-key='kind:kernels']").click()
    expect(tab.find(".operators")).to_contain_text("flash_fwd_kernel")
    tab.find("[data-key='kind:modules']").click()
    expect(tab.find(".operators")).to_contain_text("compute outside of modules")
    # Compute, copies, collectives; input and idle.
    expect(tab.find(".operators .name-cell")).to_have_count(4)


@pytest.mark.slow
def test_one_variant_has_its_figures_but_no_ranking(open_tab: OpenTab) -> None:
    tab = open_tab("one")
    assert tab.title() == "ddp 32/32: 50.7 ± 0.2 ms per step."
    heads = ["variant", "step ms", "", "samples/s", "peak GiB", "slowest rank, 0 to 51 ms"]
    assert [plain(text) for text in tab.find(".splits th").all_inner_texts()] == heads
    cells = tab.find(".splits tbody tr").locator("td:visible").all_inner_texts()
    assert [plain(text) for text in cells[:5]] == ["ddp 32/32", "50.7", "± 0.2", "1,262", "75.70"]
    expect(tab.find("pre")).to_contain_text("compare:")
    tab.watched.shoot("one-variant")


@pytest.mark.slow
def test_a_bar_of_the_ranking_is_as_long_as_the_timed_step_and_says_so(open_tab: OpenTab) -> None:
    tab = open_tab("hostile", tab="splits")  # a traced step of 50 ms, timed ones of 60
    widths = "all => all.map((one) => parseFloat(one.style.width))"
    shares = tab.find(".splits .bar span").evaluate_all(widths)
    assert sum(shares) == pytest.approx(100)
    expect(tab.find("th.c-bar")).to_have_text("slowest rank, 0 to 60\u00a0ms")
    expect(tab.find("p.note .c-bar")).to_contain_text("as timed, in the proportions of its traced step")
    tab.find(".splits tr[data-variant]").first.hover()
    said = "rank 0, a traced step of 50.0 ms (the bar is as long as a timed one): compute 40.0 ms, "
    expect(tab.find(".tip")).to_contain_text(said)


@pytest.mark.slow
def test_five_hundred_variants_keep_the_page_small(open_tab: OpenTab) -> None:
    tab = open_tab("many", height=900)
    assert tab.find("tr").count() < 120
    expect(tab.find("[role=status]").first).to_have_text(re.compile(r"rows 1 to \d+ of 484 selected"))
    tab.watched.shoot("many-1280-light")
    tab.find("tbody tr[tabindex='0']").first.focus()
    for _ in range(80):
        tab.page.keyboard.press("ArrowDown")
    assert tab.page.evaluate("document.activeElement.dataset.variant"), "still a row, though drawn again"
    tab.find(".splits").evaluate("() => scrollTo(0, 0)")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("seed=393", delay=150)
    expect(tab.find(".splits tr[data-variant]")).to_have_count(1)
    tab.page.keyboard.press("Escape")
    brush = tab.find(".histogram")
    brush.focus()
    for _ in range(3):
        brush.press("ArrowLeft")
    tab.await_state("brush", None)
    expect(tab.find(".histogram .count")).to_contain_text("selected")
    tab.watched.shoot("many-brushed")


TRACED_PARTS = """async (rank) => {
    const phases = await import(new URL('plugin/gpurun/static/shared/phases.js', location.href));
    return Object.fromEntries(phases.tracedParts(rank).map(({ name, ms }) => [name, ms]));
}"""


def test_the_parts_of_a_step_add_up_to_it(open_tab: OpenTab) -> None:
    """Waiting for data is a part of the idle time, and isn't drawn twice."""
    figures = {"compute_ms": 20.0, "exposed_wait_ms": 4.0, "idle_ms": 12.0, "input_ms": 9.0}
    tab = open_tab("gpt")
    parts = tab.page.evaluate(TRACED_PARTS, {"span_ms": 36.0, **figures})
    assert (parts["input"], parts["idle"], sum(parts.values())) == (9.0, 3.0, 36.0)


@pytest.mark.slow
def test_a_run_that_could_not_be_loaded_is_loaded_when_tried_again(tab: Tab) -> None:
    tab.watched.blank()
    tab.page.route("**/run?*", lambda route: route.abort())
    tab.page.goto(f"{tab.url}{ENTRY}#run=gpt")
    expect(tab.find("[data-state=failed]")).to_contain_text("This view could not be loaded.")
    tab.page.unroute("**/run?*")
    tab.find("button", has_text="Try again").click()
    tab.drawn("splits")
    tab.watched.faults.clear()  # the browser's own message about the request


SHADE_BOUNDS = """async (waits) => {
    const heat = await import(new URL('plugin/gpurun/static/where/heat.js', location.href));
    return heat.shadeBounds(waits).map((bound) => Number(bound.toFixed(6)));
}"""

STEP_AXIS = """async (steps) => {
    const { drawHeat } = await import(new URL('plugin/gpurun/static/where/heat.js', location.href));
    const rank = (rank) => ({
        rank, device: `cuda:${rank}`, typical: { exposed_wait_ms: rank },
        steps: steps.slice(rank === 8).map((step) => ({ step, exposed_wait_ms: rank })),
    });
    const host = document.body.appendChild(document.createElement('div'));
    drawHeat(host, {}, { label: 'ddp', ranks: [] }, [...Array(9).keys()].map(rank));
    const names = [...host.querySelectorAll('.step-axis span')].map((one) => one.textContent);
    host.remove();
    return names;
}"""
WAITS = """async (ranks) => {
    const { ranksByWait } = await import(new URL('plugin/gpurun/static/where/heat.js', location.href));
    const step = ([step, exposed_wait_ms]) => ({ step, exposed_wait_ms });
    const rank = (steps, rank) => (
        { rank, device: '', typical: { exposed_wait_ms: -rank }, steps: steps.map(step) });
    return ranksByWait({ ranks: [] }, ranks.map(rank)).map((row) => [row.steps, row.waits.map(String)]);
}"""
TRACED_STEPS = """async (ranks) => {
    const { tracedSteps } = await import(new URL('plugin/gpurun/static/where/strip.js', location.href));
    const step = ([step, span_ms]) => ({ step, span_ms });
    return tracedSteps(ranks.map((steps) => ({ steps: steps.map(step) })));
}"""


@pytest.mark.slow
def test_steps_have_the_numbers_that_the_trace_has(tab: Tab) -> None:
    numbers = [4, 5, 6, 14, 15, 16]
    assert tab.page.evaluate(STEP_AXIS, numbers) == [f"step {number}" for number in numbers]
    ranks = [[(4, 10), (5, 30), (6, 10)], [(5, 20), (6, 40), (7, 12)]]
    assert tab.page.evaluate(TRACED_STEPS, ranks) == {
        "number": [4, 5, 6, 7],
        "round": [0, 0, 0, 0],
        "step_ms": [10, 30, 40, 12],
    }
    assert tab.page.evaluate(WAITS, [*ranks, []]) == [
        [[4, 5, 6, 7], ["10", "30", "10", "NaN"]],
        [[4, 5, 6, 7], ["NaN", "20", "40", "12"]],
        [[], ["-2"]],
    ]


@pytest.mark.slow
def test_sixty_four_ranks_show_the_one_all_wait_for(open_tab: OpenTab) -> None:
    tab = open_tab("ranks", tab="where", height=900)
    expect(tab.find("h1")).to_contain_text("63 ranks wait for rank 37 (cuda:5)")
    tab.settled()
    tab.watched.shoot("ranks-1280-light")
    alike = [0.0, *(0.31 + 0.07 * rank / 62 for rank in range(63))]
    assert tab.page.evaluate(SHADE_BOUNDS, alike) == [0.32, 0.34, 0.36, 0.38]
    assert tab.page.evaluate(SHADE_BOUNDS, [0.0, 0.1, 1.0, 2.0, 4.0]) == [0.5, 1.0, 2.0, 3.0]
    tab.find(".heat canvas").first.click(position={"x": 300, "y": 20})
    tab.drawn("timeline")
    tab.await_state("rank", None)
    assert tab.state()["rank"].endswith("~37")
    expect(tab.find("button", has_text="All 64 ranks")).to_be_visible()
    tab.find("button", has_text="All 64 ranks").click()
    tab.drawn("timeline")
    tab.settled()
    tab.watched.shoot("ranks-timeline")
    tab.go("operators")
    head = tab.find(".operators thead")
    expect(head).to_contain_text(re.compile("rank 36.*rank 37.*rank 38.*rank 39"))  # around the slowest
    tab.find("[aria-label='ranks in columns']").select_option(label="ranks 60 to 63 of 64")
    expect(head).to_contain_text("rank 63")
    tab.watched.shoot("ranks-operators")
    tab = open_tab("timed", tab="where")  # without traces it isn't known who waits
    expect(tab.find(".where .bar.tall")).to_have_count(9)
    expect(tab.find(".heat")).to_have_count(0)
    tab.watched.shoot("timed-ranks")


@pytest.mark.slow
def test_a_micro_benchmark_shows_its_curves(open_tab: OpenTab) -> None:
    tab = open_tab("curves", width=420)
    assert tab.widths() == (420, 420), "the page must not scroll sideways"
    expect(tab.find("[role=tab]")).to_have_text(["Splits"])  # there are no steps to divide
    expect(tab.find(".batch-chart")).to_have_attribute(
        "aria-label",
        re.compile(r"2 devices, all-reduce: 20\.0 \(6\.0 to 44\.1\) µs for 1 KiB, .*\. 4 devices", re.S),
    )
    assert tab.find(".batch-chart .name").all_text_contents() == [
        "4 devices, all-reduce",
        "2 devices, all-reduce",
    ]
    tables = tab.find(".sizes table")
    expect(tables).to_have_count(2)
    expect(tables.nth(1).locator("caption")).to_have_text("4 devices, all-reduce")
    expect(tables.nth(0).locator("tbody tr")).to_have_count(8)
    expect(tab.find(".grid.below tbody tr")).to_have_count(0)
    tab.watched.shoot("curves-420")


@pytest.mark.slow
def test_broken_trace_disables_only_its_own_views(open_tab: OpenTab) -> None:
    tab = open_tab("broken", tab="timeline", variant="ddp-2-40-24")
    tab.find("[data-state=broken]").wait_for()
    assert tab.title() == "The trace of ddp 40/24, rank 0, can’t be read."
    assert "rank0.pt.trace.json.gz" in tab.find("main").inner_text()
    tab.watched.shoot("broken")
    tab.find("button", has_text="Read again").click()
    tab.find("[data-state=broken]").wait_for()
    tab.go("splits")
    expect(tab.find(".splits tr[data-variant]")).to_have_count(2)


@pytest.mark.slow
def test_one_failure_of_all_is_said_once_without_an_axis(open_tab: OpenTab) -> None:
    tab = open_tab("all-failed")
    expect(tab.find("tr.unranked")).to_have_count(3)
    assert [text.count("no data") for text in tab.find("tr.unranked").all_inner_texts()] == [1, 0, 0]
    assert tab.find(".axis-row").count() == 0


def test_names_with_markup_stay_text(open_tab: OpenTab) -> None:
    tab = open_tab("hostile")
    title = tab.page.title()
    for view in VIEWS:
        tab.go(view)
        assert tab.find("img").count() == 0
        if view == "splits":
            expect(tab.find("tr[data-status=failed]")).to_contain_text("log: launches/01/log/rank1.log")
        if view == "where":
            expect(tab.find(".problems")).to_contain_text("differ a lot from the timed steps")
            expect(tab.find("h1")).to_contain_text("of 50.0 ms (in traced steps; timed ones take 60.0 ms)")
        if view == "timeline":
            expect(tab.find(".problems")).to_contain_text("differ a lot from the timed steps")
            expect(tab.find("main")).to_contain_text("here, the timed ones 60.0 ms")
    tab.go("operators")
    expect(tab.find(".operators")).to_contain_text("<img src=x onerror=")
    tab.watched.shoot("hostile")
    assert tab.page.title() == title


@pytest.mark.slow
def test_empty_log_directory_says_what_to_do(browser: Browser, empty_board: str) -> None:
    with watched_page(browser, empty_board.rstrip("/")) as watched:
        tab = Tab(watched, empty_board, framed=True)
        tab.page.goto(empty_board)  # nothing else is active there: TensorBoard comes to it by itself
        tab.drawn()
        assert tab.title() == "No runs here yet."
        expect(tab.find("pre")).to_contain_text("gpurun examples/quickstart.yaml")
        watched.shoot("empty")


@pytest.mark.slow
def test_devices_of_a_live_run_follow_it(open_tab: OpenTab, samples: Path) -> None:
    tab = open_tab("live", tab="splits")
    assert tab.title() == "Nothing can be ranked yet."
    expect(tab.find(".running")).to_contain_text("running: ddp 48/16, round 6 of 10")
    expect(tab.find("tr[data-variant=ddp-2-48-16]")).to_contain_text("ddp 48/16")
    tab.watched.shoot("splits-live")
    tab.go("timeline")
    assert tab.title() == "This run is not traced yet."
    tab.go("devices")
    expect(tab.find(".running")).to_contain_text("running: ddp 48/16, round 6 of 10")
    expect(tab.find(".line-chart .solid").first).to_be_visible()
    drawn = tab.find(".line-chart path.solid").first.get_attribute("d")
    run = RunDir(samples / "live")
    write_steps(run, "ddp-2-48-16", 0, 52.0, 60, seed=7)
    advance(run, 9)
    expect(tab.find(".running")).to_contain_text("round 9 of 10")
    expect(tab.find(".line-chart path.solid").first).not_to_have_attribute("d", drawn or "")
    tab.watched.shoot("devices-live")
    killed = read(run)
    assert killed is not None
    write_json(run.running, replace(killed, start_ticks=1))
    expect(tab.find(".problems")).to_contain_text("This run stopped before it was done")
    tab.go("splits")
    expect(tab.find("h1")).to_have_text("No variant has been measured yet, so none is fastest.")


@pytest.mark.slow
def test_ranks_of_unknown_batch_are_shown_without_one(open_tab: OpenTab) -> None:
    """A program's batches are its own matter: its ranks have none in the comparison."""

    def without_batches(route: Route) -> None:
        answer = route.fetch().json()
        for variant in answer["comparison"]["variants"]:
            for rank in variant["ranks"]:
                rank["local_batch"] = None
        route.fulfill(json=answer)

    page = open_tab("gpt").page
    page.route("**/run?*", without_batches)
    tab = open_tab("gpt", tab="devices")
    expect(tab.find(".devices tbody td:first-child p").first).to_have_text("rank 0")
    tab.go("where")
    expect(tab.find(".who").first).to_have_text(re.compile(r"^rank \d \u00b7 cuda:\d$"))
    page.unroute("**/run?*")


NAMES_CUT = """all => all.filter((one) =>
    one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight + 1
).map((one) => one.innerText)"""
ROOM_LEFT = """() => {
    const select = document.querySelector('.run-picker select');
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = getComputedStyle(select).font;
    const isCut = pen.measureText(select.selectedOptions[0].text).width > select.clientWidth;
    return isCut ? innerWidth - document.querySelector('.tabs').getBoundingClientRect().right : 0;
}"""
"""Next to the tabs, in px, where the run's name is cut."""


@pytest.mark.slow
def test_a_narrow_page_keeps_names_and_intervals(open_tab: OpenTab) -> None:
    tab = open_tab("gpt", width=420, variant="ddp-2-48-16")
    first = tab.find(".splits tr[data-variant]").first.locator(".below-figure")
    assert [plain(text) for text in first.all_inner_texts()] == ["± 0.8", "± 0.3"]
    assert tab.find(".bar:visible, .legend:visible").count() == 0
    for view in VIEWS:
        tab.go(view)
        assert tab.widths() == (420, 420), "the page must not scroll sideways"
        tab.settled()
        tab.watched.shoot(f"{view}-420-light")
        if view == "operators":
            names = tab.find(".operators tbody").first.locator(".name-cell > span:last-child")
            assert names.evaluate_all(NAMES_CUT) == []


@pytest.mark.slow
def test_a_long_table_has_no_room_for_columns_that_a_narrow_page_drops(open_tab: OpenTab) -> None:
    table = open_tab("many", width=420).find(".splits")
    ends = "table => [table, ...table.querySelectorAll('th')].map((one) => one.getBoundingClientRect().right)"
    end, *columns = table.evaluate(ends)
    assert max(columns) == pytest.approx(end, abs=1)


@pytest.mark.slow
def test_names_next_to_bars_are_whole(open_tab: OpenTab) -> None:
    for width in (420, 800):
        tab = open_tab("many", tab="where", width=width)
        texts = tab.find(".where :is(.title, .said, .who):visible")
        assert texts.count() > 30
        assert texts.evaluate_all(NAMES_CUT) == []
        tab.watched.shoot(f"where-names-{width}")


@pytest.mark.slow
def test_dots_of_steps_have_the_axis_below_them(open_tab: OpenTab) -> None:
    for width, own in ((1280, 0), (800, 8)):
        tab = open_tab("gpt", tab="where", width=width)
        tab.settled()
        tab.watched.shoot(f"where-{width}-light")
        expect(tab.find(".own-axis:visible")).to_have_count(own)
        assert tab.find(".strip-axis").is_visible() == (own == 0)
    tops = tab.find(".where > .axis:visible, .bars").evaluate_all(
        "all => all.map((one) => [one.getBoundingClientRect().top, one.className])"
    )
    assert min(tops)[1] == "axis", "the axis of the bars is above them"


@pytest.mark.slow
def test_a_runs_name_is_whole_where_there_is_room(open_tab: OpenTab) -> None:
    tab = open_tab("hostile", width=800)
    assert tab.page.evaluate(ROOM_LEFT) <= 17, "no more than the margin"


@pytest.mark.slow
def test_an_index_that_is_being_made_shows_how_far_it_is(tab: Tab) -> None:
    halfway = {"state": "indexing", "done_bytes": 324e6, "total_bytes": 512e6, "seconds_left": 6.1}
    answers = [halfway, {**halfway, "done_bytes": 480e6, "seconds_left": 1.0}]

    def answer(route: Route) -> None:
        if answers:
            route.fulfill(json={**answers.pop(0), "problems": []})
        else:
            route.continue_()

    tab.page.route("**/timeline/meta?*", answer)
    tab.find("[data-tab=timeline]").click()
    state = tab.find("[data-state=indexing]")
    expect(state).to_contain_text("324 MB of 512 MB, about 6 s left")
    expect(state.locator("[role=progressbar]")).to_have_attribute("aria-valuenow", "63")
    expect(state).to_contain_text("480 MB of 512 MB")
    tab.drawn("timeline")
    tab.settled()
    tab.page.unroute("**/timeline/meta?*")
