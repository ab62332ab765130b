"""The timeline: moving, selecting, summing up, searching, and handing a trace to Perfetto."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Download, Route, expect

from tests.browser.conftest import OpenTab
from tests.browser.pages import Tab
from tests.browser.samples.odd_runs import write_changing

LABEL_X, PLOT_X = 70, 500


def timeline(open_tab: OpenTab, **more: object) -> Tab:
    tab = open_tab("gpt", tab="timeline", variant="ddp-2-40-24", **more)
    tab.find("[data-canvas=lanes][data-drawn=true]").wait_for()
    return tab


def height_of(tab: Tab, label: str) -> int:
    """Pixels from the top of the lanes to the first row with this label, as shown next to the pointer."""
    lanes, tip = tab.find("[data-canvas=lanes]"), tab.find(".tip")
    for y in range(4, 400, 8):
        lanes.hover(position={"x": LABEL_X, "y": y})
        if tip.all_inner_texts() == [label]:
            return y
    raise AssertionError(f"no row is labelled {label!r}")


def labels_along(tab: Tab, y: int) -> set[str]:
    """The labels next to the pointer along this height."""
    lanes, tip = tab.find("[data-canvas=lanes]"), tab.find(".tip:not([hidden])")
    labels: set[str] = set()
    for x in range(150, 700, 25):
        lanes.hover(position={"x": x, "y": y})
        labels.update(tip.all_inner_texts())
    return labels


def span_ns(tab: Tab) -> int:
    state = tab.state()
    return int(state["to"]) - int(state["from"])


@pytest.fixture
def tab(open_tab: OpenTab) -> Tab:
    return timeline(open_tab)


def test_wheel_and_keys_zoom_and_pan(tab: Tab) -> None:
    lanes = tab.find("[data-canvas=lanes]")
    lanes.hover(position={"x": PLOT_X, "y": 40})
    tab.page.mouse.wheel(0, -500)
    tab.await_state("from", None)
    zoomed, before = span_ns(tab), tab.state()["from"]
    tab.page.keyboard.press("w")
    tab.page.wait_for_function("before => !location.hash.includes(before)", arg=before)
    assert span_ns(tab) < zoomed
    at = int(tab.state()["from"])
    tab.page.keyboard.press("d")
    tab.page.wait_for_function("before => !location.hash.includes(before)", arg=str(at))
    assert int(tab.state()["from"]) > at
    tab.page.keyboard.press("f")
    tab.await_state("from", "0")


@pytest.mark.slow
def test_window_survives_a_reload(open_tab: OpenTab) -> None:
    tab = timeline(open_tab, **{"from": "100000000", "to": "150000000"})
    tab.find("[data-canvas=lanes]").focus()
    tab.page.keyboard.press("a")
    tab.await_state("from", "90000000")
    tab.page.reload()
    tab.drawn("timeline")
    tab.find("[data-canvas=lanes]").focus()
    tab.page.keyboard.press("d")
    tab.await_state("from", "100000000")


@pytest.mark.slow
def test_only_what_the_window_shows_is_asked_for(tab: Tab) -> None:
    asked: list[str] = []
    tab.page.on(
        "request", lambda request: asked.append(request.url) if "timeline/window" in request.url else None
    )
    lanes = tab.find("[data-canvas=lanes]")
    lanes.hover(position={"x": PLOT_X, "y": 40})
    for _ in range(12):
        tab.page.mouse.wheel(0, -60)
    tab.await_state("from", None)
    tab.page.wait_for_function("() => performance.getEntriesByType('resource').at(-1).responseEnd > 0")
    assert 1 <= len(asked) < 12
    lengths = [[int(number) for number in re.findall(r"(?:from|to)_ns=(\d+)", url)] for url in asked]
    assert all(end - start < 2.1 * 128_000_000 for start, end in lengths)


@pytest.mark.slow
def test_a_collective_is_explained_and_followed(tab: Tab) -> None:
    tab.find("[data-canvas=lanes]").focus()
    tab.page.keyboard.press("n")
    panel = tab.find(".panel")
    expect(panel).to_contain_text("ncclDevKernel_AllReduce")
    expect(panel).to_contain_text("the same collective on both ranks, ms")
    tab.await_state("sel", None)
    first = tab.state()["sel"]
    tab.watched.shoot("timeline-selected")
    tab.find(".panel .wait").first.click()
    expect(panel).to_contain_text("Waited")
    tab.page.keyboard.press("n")
    tab.page.wait_for_function("before => !location.hash.includes(`sel=${before}`)", arg=first)
    tab.page.keyboard.press("Escape")
    expect(panel).to_contain_text("Click a block")


@pytest.mark.slow
def test_clicks_and_hovers_name_blocks(tab: Tab) -> None:
    lanes = tab.find("[data-canvas=lanes]")
    on_main = labels_along(tab, height_of(tab, "CPU main"))
    assert "forward" in {text.splitlines()[0] for text in on_main}  # a range that the program has named
    compute_y = height_of(tab, "stream 7 compute")
    lanes.hover(position={"x": PLOT_X, "y": compute_y})
    expect(tab.find(".tip")).to_contain_text(re.compile("kernel|gemm"))
    lanes.click(position={"x": PLOT_X, "y": compute_y})
    expect(tab.find(".panel h2")).to_have_text(re.compile("kernel|gemm"))
    expect(tab.find(".panel")).to_contain_text("launched by")


@pytest.mark.slow
def test_a_stretch_is_summed_up_and_adds_up(tab: Tab) -> None:
    box = tab.find("[data-canvas=ruler]").bounding_box()
    assert box is not None
    tab.page.mouse.move(box["x"] + 400, box["y"] + 30)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 800, box["y"] + 30, steps=3)
    tab.page.mouse.up()
    panel = tab.find(".panel")
    expect(panel.locator("h2")).to_have_text(re.compile(r"[\d.]+\sms chosen"))
    chosen = float(panel.locator("h2").inner_text().split()[0])
    for line in panel.locator(".small", has_text="rank ").all_inner_texts():
        parts = [float(part) for part in re.findall(r"[a-z]+ ([\d.]+)", line.split(":", 1)[1])]
        assert abs(sum(parts) - chosen) < 0.01 * chosen
    names = panel.locator("dt").all_inner_texts()
    assert {text.split(", ")[0] for text in names if "AllReduce" in text} == {"waiting", "transfer"}
    tab.watched.shoot("timeline-sums")
    tab.await_state("range", None)
    tab.page.reload()
    tab.drawn("timeline")
    expect(panel.locator("h2")).to_have_text(re.compile(rf"{chosen:g}\d*\sms chosen"))
    tab.page.keyboard.press("Escape")
    tab.page.wait_for_function("() => !location.hash.includes('range=')")


@pytest.mark.slow
def test_a_trace_that_changes_is_drawn_again(open_tab: OpenTab, samples: Path) -> None:
    tab = open_tab("changing", tab="timeline")
    assert tab.title() == "changing: 2 traced steps on 1 rank."
    write_changing(samples / "changing", num_steps=3)
    expect(tab.find("h1")).to_have_text("changing: 3 traced steps on 1 rank.")  # by looking now and then
    write_changing(samples / "changing", num_steps=4)
    tab.find("[data-canvas=lanes][data-drawn=true]").wait_for()
    tab.page.keyboard.press("f")  # by asking for another window
    expect(tab.find("h1")).to_have_text("changing: 4 traced steps on 1 rank.")


EVERY = """async () => {
    const { labelEvery } = await import(new URL('plugin/gpurun/static/shared/scale.js', location.href));
    const every = (px, count) =>
        labelEvery(Array.from({ length: count }, (_, index) => index * px), Array(count).fill(20));
    return [every(25, 60), every(15, 60), every(1.1, 1000)];
}"""
"""Every how many steps one has a name that is 20 px wide."""


@pytest.mark.slow
def test_search_goes_from_match_to_match(tab: Tab) -> None:
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("gelu")
    expect(tab.find(".matches").first).to_contain_text("found")
    tab.page.keyboard.press("Enter")
    expect(tab.find(".matches").first).to_contain_text("1 of ")
    tab.page.keyboard.press("Enter")
    expect(tab.find(".matches").first).to_contain_text("2 of ")
    expect(tab.find(".panel h2")).to_contain_text(re.compile("gelu", re.IGNORECASE))
    tab.watched.shoot("timeline-search")
    tab.await_state("q", "gelu")
    tab.find("[data-search]").press("Escape")
    tab.page.wait_for_function(
        "() => !location.hash.includes('q%3Dgelu') && !location.hash.includes('q=gelu')"
    )
    expect(tab.find("[data-search]")).to_have_value("")  # and the other blocks have their colours again
    assert tab.page.evaluate(EVERY) == [1, 2, 20]


@pytest.mark.slow
def test_two_fingers_zoom(tab: Tab) -> None:
    tab.find("[data-canvas=lanes]").evaluate("""(canvas) => {
        const box = canvas.getBoundingClientRect();
        canvas.setPointerCapture = () => {};
        const at = (type, id, x) => canvas.dispatchEvent(new PointerEvent(type, {
            pointerId: id, pointerType: 'touch', clientX: box.left + x, clientY: box.top + 30,
        }));
        at('pointerdown', 1, 400); at('pointerdown', 2, 500);
        at('pointermove', 2, 700); at('pointerup', 1, 400); at('pointerup', 2, 700);
    }""")
    tab.await_state("from", None)
    assert span_ns(tab) < 60_000_000


@pytest.mark.slow
def test_perfetto_is_asked_only_on_the_click_and_gets_the_trace(tab: Tab) -> None:
    stub = """<script>addEventListener('message', (event) => {
        if (event.data === 'PING') event.source.postMessage('PONG', event.origin);
        else document.title = event.data.perfetto.title + ' ' + event.data.perfetto.buffer.byteLength;
    });</script>"""

    def answer(route: Route) -> None:
        route.fulfill(body=stub, content_type="text/html")

    tab.page.context.route("https://ui.perfetto.dev/**", answer)
    with tab.page.context.expect_page() as opened:
        tab.find("[data-action=perfetto]").click()
    opened.value.wait_for_function("document.title.startsWith('ddp 40/24 ')")
    assert int(opened.value.title().split()[-1]) > 1000
    opened.value.close()
    tab.page.context.unroute("https://ui.perfetto.dev/**")


@pytest.mark.slow
def test_the_merged_trace_is_a_download(tab: Tab) -> None:
    with tab.page.expect_download() as download:
        tab.find("[data-action=download]").click()
    assert download.value.suggested_filename.endswith(".json.gz")
    assert download.value.path().stat().st_size > 1000


@pytest.mark.slow
def test_traces_that_broke_meanwhile_are_no_download(tab: Tab) -> None:
    broken = {"state": "broken", "problems": [{"file": "rank0.json", "byte": 7, "message": "ends early"}]}
    tab.page.route("**/trace/merged?*", lambda route: route.fulfill(json=broken))
    downloads: list[Download] = []

    def note(download: Download) -> None:
        downloads.append(download)

    tab.page.on("download", note)
    tab.find("[data-action=download]").click()
    expect(tab.find(".controls")).to_contain_text("rank0.json ends early")
    assert not downloads
    tab.page.remove_listener("download", note)
    tab.page.unroute("**/trace/merged?*")
