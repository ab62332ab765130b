"""Charts of what a run has found besides its ranking: costs of devices, throughput by batch, a search."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenTab
from tests.browser.pages import Tab
from tests.browser.samples.sample_runs import MARKUP
from tests.whole import first

pytestmark = pytest.mark.slow

LOOKS = first(1, [(1280, False), (1280, True), (800, False), (800, True)])
CLIPPED = """all => all.filter((one) => one.scrollWidth > one.clientWidth ||
    one.scrollHeight > one.clientHeight).map((one) => one.textContent)"""
"""Which of these don't show all that they hold."""
OUTSIDE = """all => all.filter((one) => {
    const [box, page] = [one.getBoundingClientRect(), document.querySelector('main').getBoundingClientRect()];
    return box.left < page.left || box.right > page.right;
}).map((one) => one.textContent)"""
"""Which of these stick out of the page."""
ROW = """rows => rows.map((row) => [...row.children].map((cell) => cell.innerText))"""

NEAR = 0.02
"""How far places in a chart may be off, as a share of its width."""


def drawn(tab: Tab) -> Tab:
    """The tab, once its charts have been drawn to their width."""
    tab.settled()
    for chart in tab.find("svg.line-chart").all():
        chart.locator("path").first.wait_for()
    return tab


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_balanced_split_shows_what_its_devices_cost(open_tab: OpenTab, width: int, dark: bool) -> None:
    tab = drawn(open_tab("balanced", width=width, height=1400, dark=dark))
    expect(tab.find(".costs h2")).to_have_text("Cost per device, and the best split by these costs")
    panel = tab.find("[data-balanced=ddp-2-52-12]")
    expect(panel.locator("h3")).to_have_text("ddp balanced 52/12")
    table = panel.get_by_role("table", name="what each device costs")
    expect(table.get_by_role("columnheader")).to_have_text(
        ["device", "per step, ms", "per sample, ms", "curve", "samples"]
    )
    assert table.locator("tbody tr").evaluate_all(ROW) == [
        ["cpu:0", "4.86 (2.95 to 5.41)", "1.00 (0.99 to 1.06)", "straight", "52"],
        ["cpu:1", "26.75 (26.59 to 26.94)", "2.53 (2.49 to 2.57)", "straight", "12"],
    ]
    expect(panel).to_contain_text("Predicted step: 57.7 ms (T* = 57.1 ms, the minimum over all splits")
    expect(panel).to_contain_text("Measured: 58.6 ms; T*/T = 0.97.")
    expect(panel).to_contain_text("even (32/32) would take 108 ms; in proportion to speed (46/18), 72.8 ms.")
    expect(panel).to_contain_text("These are the samples of ddp 32/32 too: both were measured.")
    chart = panel.get_by_role("img", name="Samples chosen: cpu:0 52, cpu:1 12. T* is 57.1 ms.")
    expect(chart.locator("circle.chosen")).to_have_count(2)
    expect(chart.locator("circle:not(.chosen)")).to_have_count(8)
    assert sorted(chart.locator("text.name").all_text_contents()) == [
        "12",
        "52",
        "T* 57.1\u00a0ms",
        "cpu:0",
        "cpu:1",
    ]
    assert tab.widths() == (width, width), "the page must not scroll sideways"
    end, bottom = tab.find(".costs").evaluate(
        "costs => [costs.getBoundingClientRect().bottom, document.body.scrollHeight]"
    )
    assert bottom - max(end, 1400) < 60, "nothing hidden makes the page longer"
    assert tab.find(".costs text, .costs td, .costs p").evaluate_all(OUTSIDE) == []
    tab.watched.shoot(f"balanced-{width}-{'dark' if dark else 'light'}")


def test_curves_end_where_they_meet_the_line_of_the_best(open_tab: OpenTab) -> None:
    chart = drawn(open_tab("balanced")).find("[data-balanced=ddp-2-52-12] svg.line-chart")
    best = float(chart.locator(".best-line").get_attribute("y1") or 0)
    for ring in chart.locator("circle.chosen").all():
        assert float(ring.get_attribute("cy") or 0) == pytest.approx(best, abs=1.5)


def test_what_was_not_measured_says_so_and_a_full_device_too(open_tab: OpenTab) -> None:
    panel = drawn(open_tab("balanced")).find("[data-balanced=ddp-2-53-11]")
    expect(panel).to_contain_text("overhead). Not measured.")
    expect(panel.locator("tbody tr", has_text="cpu:1").first).to_have_text(
        "cpu:1––interpolated, memory for 1211"
    )
    expect(panel.locator("svg path").nth(1)).to_have_attribute("d", re.compile("^M[^L]+(L[^L]+){2}$"))


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_throughput_over_the_batch_has_its_knee_marked(open_tab: OpenTab, width: int, dark: bool) -> None:
    tab = drawn(open_tab("batches", width=width, height=1400, dark=dark))
    chart = tab.find(".batches svg")
    expect(chart).to_have_attribute(
        "aria-label",
        re.compile("ddp even on 2: .* at a global batch of .*; knee at 512.*balanced on 2.*; no knee"),
    )
    expect(chart.locator("circle.chosen")).to_have_count(1)
    expect(chart.locator("text.knee")).to_have_text("knee: 512")
    expect(chart).to_contain_text("global batch, logarithmic")
    x = [float(circle.get_attribute("cx") or 0) for circle in chart.locator("circle.solid").all()]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.01), "8, 32 and 128 lie equally far apart"
    expect(tab.find(".batches figcaption")).to_contain_text("ddp balanced on 2: no knee")
    table = tab.find(".batches").get_by_role("table", name="ddp even on 2")
    expect(table.get_by_role("row", name=re.compile("512.*knee"))).to_have_count(1)
    assert tab.find(".batches text").evaluate_all(OUTSIDE) == []
    tab.watched.shoot(f"batches-{width}-{'dark' if dark else 'light'}")


def test_variants_of_several_batches_are_compared_by_the_sample(open_tab: OpenTab) -> None:
    tab = open_tab("batches")
    assert "baseline ddp 4/4 precision=fp32 global_batch=8" in tab.title()
    expect(tab.find("th.c-forest")).to_have_text(
        "time per sample against ddp 4/4 precision=fp32 global_batch=8, %"
    )
    expect(tab.find(".axis-row .note")).to_contain_text("Differences are of the time per sample")


def test_narrow_pages_show_whole_verdicts_and_names(open_tab: OpenTab) -> None:
    tab = open_tab("batches", width=800)
    assert tab.widths() == (800, 800)
    assert tab.find(".splits td.c-verdict").evaluate_all(CLIPPED) == []
    names = tab.find(".splits tr[data-variant] .label")
    assert names.evaluate_all(CLIPPED) == []
    expect(names).to_have_count(10)
    row = tab.find(".splits tr.best")
    heights = row.evaluate(
        "row => [row.offsetHeight, row.querySelector('.band').getBoundingClientRect().height]"
    )
    assert heights[0] == pytest.approx(heights[1], abs=1), "the plot has no gaps between its rows"


OVERLAPPING = """all => all.filter((one, index) => all.slice(index + 1).some((other) => {
    const [a, b] = [one.getBoundingClientRect(), other.getBoundingClientRect()];
    return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
})).map((one) => one.textContent)"""
"""Which of these are above another one of them."""


@pytest.mark.parametrize("width", [420, 640, 800, 1400])
@pytest.mark.parametrize("run", ["gpt", "batches", "one", "live"])
def test_nothing_overlaps_or_is_cut_at_any_width(open_tab: OpenTab, run: str, width: int) -> None:
    """The first row of the page, and of each variant its name, difference, verdict and step time."""
    tab = open_tab(run, width=width)
    assert tab.widths() == (width, width), "the page must not scroll sideways"
    heads = tab.find(".top select, .top .tabs button")
    cells = tab.find(".splits :is(td, th):is(.c-variant, .c-diff, .c-verdict, .c-ms, .c-unit):visible")
    for shown in (heads, cells):
        assert shown.evaluate_all(OVERLAPPING) == []
        assert shown.evaluate_all(OUTSIDE.replace("main", "body")) == []
    for column in ("diff", "verdict", "ms", "unit"):
        assert tab.find(f".splits td.c-{column}:visible").evaluate_all(CLIPPED) == []
    tab.watched.shoot(f"{run}-{width}")


def test_the_axis_reaches_every_difference_that_most_have(open_tab: OpenTab) -> None:
    """Also the only one, however large it is; a few that are far away are arrows."""
    ends = """async () => {
        const { forestAxis } = await import(
            new URL('plugin/gpurun/static/splits/forest.js', location.href));
        return [[530], [-80, 5000], [1, 2, 530], [9, 23]].map((all) => {
            const { scale, step } = forestAxis(
                all.map((percent) => ({ percent, ci: null, verdict: 'slower' })));
            return [scale.high >= Math.max(...all), (scale.high - scale.low) / step <= 8];
        });
    }"""
    assert open_tab("batches").page.evaluate(ends) == [
        [True, True],
        [False, True],
        [False, True],
        [True, True],
    ]


def test_an_option_is_not_broken_at_its_hyphens(open_tab: OpenTab) -> None:
    """In the head of a narrow column there is room for a word or two."""
    broken = """async () => {
        const { wholeWords } = await import(new URL('plugin/gpurun/static/shared/dom.js', location.href));
        const head = document.body.appendChild(document.createElement('div'));
        head.style.width = '120px';
        head.append(...wholeWords('against --learning-rate 0.1, %'));
        const heights = [...head.querySelectorAll('.whole')].map((one) => one.getClientRects().length +
            one.offsetHeight / parseFloat(getComputedStyle(one).lineHeight));
        head.remove();
        return heights;
    }"""
    assert open_tab("batches").page.evaluate(broken) == [2, 2, 2, 2]


def test_an_arrow_is_inside_of_the_plot(open_tab: OpenTab) -> None:
    """Next to it there are names and figures."""
    plot = """async () => {
        const { forestAxis, forestRow } = await import(
            new URL('plugin/gpurun/static/splits/forest.js', location.href));
        const all = [-95, -3, -2, 2, 3, 950].map((percent) => ({ percent, ci: null, verdict: 'slower' }));
        const axis = forestAxis(all);
        return [all[0], all[5]].map((far) => {
            const row = document.body.appendChild(forestRow(far, axis));
            const [outer, ...inner] = [row, row.querySelector('.head'), row.querySelector('text')].map(
                (one) => one.getBoundingClientRect());
            row.remove();
            return inner.every((one) => one.left >= outer.left - 1 && one.right <= outer.right + 1);
        });
    }"""
    assert open_tab("batches").page.evaluate(plot) == [True, True]


@pytest.mark.parametrize(
    ("width", "named"), [(1280, ""), (1000, "peak GiB, "), (420, "samples/s, eff., peak GiB, ")]
)
def test_figures_without_a_column_are_where_the_note_says(open_tab: OpenTab, width: int, named: str) -> None:
    note = open_tab("gpt", width=width).find("p.note").inner_text()
    assert note.endswith(f"Hover over a row for {named}exposed %.")


def test_names_that_differ_at_their_end_are_whole_on_a_narrow_page(open_tab: OpenTab) -> None:
    names = open_tab("batches", width=420).find(".splits tr[data-variant] .label")
    assert names.evaluate_all(CLIPPED) == []
    assert (
        names.evaluate_all("all => all.filter((one) => one.scrollHeight > one.clientHeight + 1).length") == 0
    )


def test_an_inconclusive_difference_says_the_comparisons_reason(open_tab: OpenTab) -> None:
    spoken = """async () => {
        const { spokenDifference } = await import(
            new URL('plugin/gpurun/static/splits/forest.js', location.href));
        const row = { percent: -43.3, ci: null, verdict: 'inconclusive' };
        const open = { ...row, ci: [-60, 8], why: 'one of 7 rounds took 169 ms' };
        return [{ ...row, why: '6 rounds are too few' }, open, row].map(spokenDifference);
    }"""
    assert open_tab("batches").page.evaluate(spoken) == [
        "\u221243.3 %, 6 rounds are too few: inconclusive",
        "\u221243.3 %, interval \u221260.0 to +8.0 %, one of 7 rounds took 169 ms: inconclusive",
        "\u221243.3 %: inconclusive",
    ]


def test_a_run_without_either_shows_nothing_of_it(open_tab: OpenTab) -> None:
    tab = open_tab("gpt")
    expect(tab.find(".costs, .batches")).to_have_count(0)
    expect(tab.find("th.c-forest")).to_have_text("step time against ddp 32/32, %")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (800, True)])
def test_a_search_shows_time_over_memory_and_effects(open_tab: OpenTab, width: int, dark: bool) -> None:
    tab = open_tab("search", tab="search", width=width, height=1400 if dark else 800, dark=dark)
    expect(tab.find("h1")).to_contain_text("Fastest: ddp 33/31")
    expect(tab.find("h1 + .sub")).to_contain_text("The search tried 8 of 10 different combinations")
    points = tab.find(".points-chart .point")
    expect(points).to_have_count(7)
    expect(tab.find(".legend li")).to_have_text(
        [
            "tried",
            "compared at the end",
            "the job’s own setting",
            "none is both as fast and as small",
            "takes more memory than the job allows",
        ]
    )
    expect(tab.find(".points-chart .point.on-front")).to_have_count(4)
    expect(tab.find(".points-chart .point.own")).to_have_attribute(
        "aria-label",
        "ddp bucket_mb=25\n20.0 ms by 1 trial\n2.00 GiB at the peak\nthe job’s own setting\n"
        "compared at the end",
    )
    expect(tab.find(".points-chart .point.too-large")).to_have_attribute("data-tried", "ddp-bucket_mb-100")
    expect(tab.find(".failed-marks")).to_contain_text("1 without a time:")
    effect = tab.find("[data-effect='bucket_mb=25'] td")
    shown = ["bucket_mb", "25", "5", "", "+11.1", "+9.0 to +13.2", "+9.8", "+8.6 to +11.0"]
    expect(effect).to_have_text(shown)
    expect(tab.find("[data-effect='strategy=fsdp'] .slower")).to_have_text("+33.3")
    expect(tab.find("[data-effect='split=3:1'] td")).to_contain_text(["not measured", "+12.0"])
    assert tab.widths() == (width, width), "the page must not scroll sideways"
    tab.watched.shoot(f"search-{width}-{'dark' if dark else 'light'}")


COVERED = """() => {
    const boxes = (of) => [...document.querySelectorAll(`.points-chart ${of}`)].map(
        (one) => [one.textContent, one.getBoundingClientRect()]);
    const frame = document.querySelector('.points-chart').getBoundingClientRect();
    const others = [...boxes('.shape'), ...boxes('text.name')];
    return boxes('text.name').filter(([name, a]) => a.left < frame.left || a.right > frame.right
        || others.some(([other, b]) => other !== name
            && a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top < a.bottom - 2)
    ).map(([name]) => name);
}"""
"""Names that are on a point or on another name, or end outside of the chart."""


@pytest.mark.parametrize("width", [420, 800, 1280])
def test_names_of_points_are_on_no_point_and_those_of_combinations_are_whole(
    open_tab: OpenTab, width: int
) -> None:
    tab = open_tab("tuned", tab="search", width=width)
    expect(tab.find(".points-chart text.name")).to_have_count(2)
    assert tab.page.evaluate(COVERED) == []
    assert tab.find(".tried td:visible").evaluate_all(CLIPPED) == []
    tab.find("summary").click()
    assert tab.find(".left-out td").evaluate_all(CLIPPED) == []
    tab.watched.shoot(f"tuned-{width}")


def test_points_are_where_their_figures_say_and_rows_and_keys_find_them(open_tab: OpenTab) -> None:
    tab = open_tab("search", tab="search")

    def place(variant: str) -> tuple[float, float]:
        reach = tab.find(f".points-chart .point[data-tried='{variant}'] .reach")
        return float(reach.get_attribute("cx") or 0), float(reach.get_attribute("cy") or 0)

    (x1, y1), (x2, y2), (x3, y3) = map(place, ("ddp-bucket_mb-5", "fsdp-reshard-false", "fsdp-reshard-true"))
    assert (x1 - x2) / (x2 - x3) == pytest.approx((2.1 - 1.4) / (1.4 - 1.0), rel=NEAR)
    assert (y1 - y2) / (y2 - y3) == pytest.approx((18 - 24) / (24 - 26), rel=NEAR)
    rows = tab.find(".tried tbody tr")
    assert rows.evaluate_all("rows => rows.map((row) => row.dataset.tried)") == [
        *("ddp-bucket_mb-5", "ddp-bucket_mb-1", "ddp-bucket_mb-25", "ddp-bucket_mb-50"),
        *("fsdp-reshard-false", "fsdp-reshard-true", "ddp-bucket_mb-100", "fsdp-split-3:1"),
    ]
    expect(rows.last).to_contain_text(f"failed: rank 1 raised ValueError: {MARKUP}")
    rows.nth(1).hover()
    expect(tab.find(".points-chart .point.on")).to_have_attribute("data-tried", "ddp-bucket_mb-1")
    tab.find(".points-chart .point").first.focus()
    tab.page.keyboard.press("ArrowRight")
    expect(tab.find(".points-chart .point:focus")).to_have_attribute("data-tried", "ddp-bucket_mb-1")
    expect(tab.find(".tip")).to_contain_text("1.90 GiB at the peak")
    rows.first.focus()
    tab.page.keyboard.press("ArrowDown")
    expect(tab.find(".points-chart .point.on")).to_have_attribute("data-tried", "ddp-bucket_mb-1")
    tab.find("summary").click()
    expect(tab.find(".left-out td")).to_have_text(
        ["strategy=single bucket_mb=[1,5]", "not tried: by the model 40.2 % slower than the best that was"]
    )


@pytest.mark.parametrize("width", [420, 1280])
def test_a_search_for_remedies_shows_the_answer_each_verdict_and_the_change(
    open_tab: OpenTab, width: int
) -> None:
    tab = open_tab("improved/3-together-1", tab="search", width=width)
    expect(tab.find("h1")).to_have_text(
        "27 % less time per step than train.py as it is (25 to 29): 1 of 1 remedy kept"
    )
    expect(tab.find("h1 + .sub")).to_have_text("Why: ranks waited 44 % of a step for data")
    rows = tab.find("[data-remedy]")
    texts = [
        "DataLoader(num_workers=2)",
        "\N{MINUS SIGN}27.0",
        "kept",
        *(["train.py:41"] if width > 420 else []),
    ]
    expect(rows.nth(0).locator("td:visible:not(.muted):not(.c-forest)")).to_have_text(texts)
    expect(rows.nth(1)).to_contain_text("not tried")
    expect(tab.find("pre.diff")).to_contain_text("+DataLoader(data, num_workers=2)")
    assert tab.widths() == (width, width), "the page must not scroll sideways"
    tab.watched.shoot(f"remedies-{width}")


def test_a_search_that_goes_on_says_so_and_another_run_is_none(open_tab: OpenTab) -> None:
    tab = open_tab("searching", tab="search")
    expect(tab.find("h1")).to_contain_text("The search is not over: 8 of 10 different combinations")
    expect(tab.find(".points-chart")).to_contain_text("memory unknown")
    expect(tab.find(".points-chart .on-front, .front")).to_have_count(0)
    tab = open_tab("gpt", tab="search")
    expect(tab.find("[data-state=none]")).to_contain_text("This run is not a search.")
    tab = open_tab("gpt")
    expect(tab.find("[data-tab=search]")).to_have_count(0)
