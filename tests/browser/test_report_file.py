"""`gpurun report RUN --format html`: one file that opens from disk and asks for nothing."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.tensorboard_plugin.html import render_html
from tests.browser.conftest import OpenTab
from tests.browser.pages import watched_page
from tests.browser.samples.odd_runs import write_hostile
from tests.browser.samples.sample_runs import (
    FASTEST,
    write_balanced,
    write_batches,
    write_gpt_splits,
    write_search,
)

MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(write_gpt_splits(tmp_path_factory.mktemp("report") / "gpt", traced=[(40, 24)]))


def written(run: RunDir) -> Path:
    path = run.path / "report.html"
    path.write_text(render_html(read_json(run.comparison, Comparison), run), encoding="utf-8")
    return path


@pytest.mark.slow
def test_three_views_open_from_disk(browser: Browser, report: Path) -> None:
    assert report.stat().st_size < MOST_BYTES
    for dark in (False, True):
        with watched_page(browser, None, dark=dark) as watched:
            page = watched.page
            page.goto(report.as_uri())
            page.locator("main[data-ready=true]").wait_for()
            assert page.locator("[role=tab]").all_inner_texts() == ["Splits", "Where time goes", "Timeline"]
            assert page.locator("h1").inner_text() == FASTEST.replace(" %", "\u00a0%")
            for view in ("splits", "where", "timeline"):
                page.locator(f"[data-tab={view}]").click()
                page.locator(f"main[data-view={view}][data-ready=true]").wait_for()
                page.evaluate(
                    "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
                )
                watched.shoot(f"report-{view}-{'dark' if dark else 'light'}")


MARKUP = (
    "<script>window.ran = 1</script>",
    "<script src='data:text/javascript,window.ran = 1'></script>",
    "<script type=module>import 'data:text/javascript,window.ran = 1'</script>",
    "<script src='blob:null/0'></script>",
    "<img src=x onerror='window.ran = 1'>",
)


def test_no_script_runs_that_gets_into_it_as_markup(browser: Browser, report: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged.html"
    forged.write_text(report.read_text(encoding="utf-8").replace("</html>", "".join(MARKUP) + "</html>"))
    page = browser.new_page()
    page.goto(forged.as_uri())
    page.locator("main[data-ready=true]").wait_for()
    assert page.evaluate("window.ran") is None
    page.close()


@pytest.mark.slow
def test_its_timeline_zooms_selects_and_searches(browser: Browser, report: Path) -> None:
    with watched_page(browser, None) as watched:
        page = watched.page
        page.goto(f"{report.as_uri()}#tab=timeline&variant=ddp-2-40-24")
        page.locator("main[data-ready=true]").wait_for()
        page.locator("[data-canvas=lanes]").focus()
        page.keyboard.press("w")
        page.wait_for_url(re.compile("from="))
        page.keyboard.press("n")
        expect(page.locator(".panel")).to_contain_text("the same collective on both ranks, ms")
        page.keyboard.press("/")
        page.keyboard.type("gelu")
        page.keyboard.press("Enter")  # before the search has been answered, or even asked for
        expect(page.locator(".matches").first).to_contain_text("1 of ")


NEIGHBOURS = """async (groups) => {
    const { FileSource } = await import(new URL('plugin/gpurun/static/report.js', location.href));
    const lane = { lane: 0, row: [], id: [], start_ns: [], end_ns: [], name: [], class: [] };
    const links = groups.map((group, id) => {
        for (const key of ['row', 'name', 'class']) lane[key].push(0);
        for (const key of ['id', 'start_ns']) lane[key].push(id);
        lane.end_ns.push(id + 1);
        return { collective: id, kind: '', group, label: '', parts: [[0, 0, 0, id, id, id, id + 1]] };
    });
    const meta = { classes: ['transfer'], steps: [], ranks: [{ rank: 0, lanes: [{ lane: 0, label: '' }] }] };
    const window = { names: [''], labels: [''], lanes: [lane], links };
    const source = new FileSource({ timelines: { one: { meta, window } } });
    return Promise.all(groups.map(async (_, id) => {
        const { collective } = await source.get('timeline/event', { variant: 'one', id });
        return [collective.group, collective.previous, collective.next];
    }));
}"""


@pytest.mark.slow
def test_its_collectives_lead_to_those_of_their_group(open_tab: OpenTab) -> None:
    found = open_tab("one").page.evaluate(NEIGHBOURS, ["tp", "dp", "tp", None, "dp"])
    assert found == [["tp", None, 2], ["dp", None, 4], ["tp", 0, None], [None, None, None], ["dp", 1, None]]


@pytest.mark.slow
def test_it_has_cost_curves_throughput_over_the_batch_and_a_search(browser: Browser, tmp_path: Path) -> None:
    balanced, batches = written(write_balanced(tmp_path / "a")), written(write_batches(tmp_path / "b"))
    search = written(write_search(tmp_path / "c"))
    with watched_page(browser, None) as watched:
        watched.page.goto(balanced.as_uri())
        expect(watched.page.locator(".cost circle.chosen")).to_have_count(4)
        expect(watched.page.locator(".costs")).to_contain_text("Measured: 58.6 ms; T*/T = 0.97.")
        watched.page.goto(batches.as_uri())
        expect(watched.page.locator(".batches text.knee")).to_have_text("knee: 512")
        watched.page.goto(f"{search.as_uri()}#tab=search")
        expect(watched.page.locator(".points-chart .point")).to_have_count(7)


@pytest.mark.slow
def test_names_with_markup_stay_text_in_the_file(browser: Browser, tmp_path: Path) -> None:
    path = written(write_hostile(tmp_path / "hostile"))
    with watched_page(browser, None) as watched:
        watched.page.goto(path.as_uri())
        watched.page.locator("main[data-ready=true]").wait_for()
        assert watched.page.locator("img").count() == 0
        assert watched.page.title() != "hacked"
