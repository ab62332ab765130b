"""What `gpurun tune` has found: time over memory, what each value does, what was tried and left out."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenTab
from tests.browser.sample_runs import MARKUP

NEAR = 0.02
"""How far places in a chart may be off, as a share of its width."""


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
    effect = tab.find("[data-effect='bucket_mb=5'] td")
    expect(effect).to_have_text(["bucket_mb", "5", "25", "", "−9.8", "−11.0 to −8.6"])
    expect(tab.find("[data-effect='strategy=fsdp'] .slower")).to_have_text("+24.0")
    assert tab.widths() == (width, width), "the page must not scroll sideways"
    tab.watched.shoot(f"search-{width}-{'dark' if dark else 'light'}")


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


def test_a_search_that_goes_on_says_so_and_another_run_is_none(open_tab: OpenTab) -> None:
    tab = open_tab("searching", tab="search")
    expect(tab.find("h1")).to_contain_text("The search is not over: 8 of 10 different combinations")
    expect(tab.find(".points-chart")).to_contain_text("memory unknown")
    expect(tab.find(".points-chart .on-front, .front")).to_have_count(0)
    tab = open_tab("gpt", tab="search")
    expect(tab.find("[data-state=none]")).to_contain_text("This run is not a search.")
    tab = open_tab("gpt")
    expect(tab.find("[data-tab=search]")).to_have_count(0)
