"""The tab on directories of traces that gpurun did not record."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenTab
from tests.browser.pages import plain

STRIP_ENDS = """async () => {
    const { stripScale } = await import(new URL('plugin/gpurun/static/where/strip.js', location.href));
    const holds = (...steps) => stripScale([{ step_ms: steps }]).scale.high >= Math.max(...steps);
    return [holds(166, 174.5, 175, 179.7, 182, 187.9), holds(166, 174.5, 175, 179.7, 182, 900)];
}"""
"""Whether the axis holds a step that is a bit longer than the others, and one that is far longer."""


@pytest.mark.slow
def test_anybodys_traces_need_no_run(open_tab: OpenTab) -> None:
    tab = open_tab("traced")
    expect(tab.find("[role=tab]")).to_have_text(
        ["Where time goes", "Timeline", "Operators", "Tables", "Devices"]
    )
    expect(tab.find(".where .bar.tall")).to_have_count(2)
    # Steps of 43.4 and 63.4 ms; both count, as they do for `gpurun trace`.
    assert tab.title() == (
        "A step takes 53.4 ms on rank 0, the longest of all; 90 % of it is compute. Every rank spends 6 % to "
        "8 % of its step (3.12 to 4.08 of 53.4 ms) waiting for the CPU, of which mostly nothing is recorded: "
        "record the profiler's with_stack=True."
    )
    assert tab.find(".where .total").all_inner_texts() == ["53.4", "53.4"]
    expect(tab.find(".strip canvas")).to_have_attribute(
        "aria-label", "traced: 2 steps, median 53.4 ms, slowest 63.4 ms"
    )
    tab.go("timeline")
    tab.settled()
    tab.go("operators")
    expect(tab.find(".operators tbody").first).to_contain_text("aten::gelu")
    expect(tab.find("main")).to_contain_text("rank 0, for which the others wait most")
    tab.go("devices")
    expect(tab.find("h1")).to_contain_text("2 ranks traced on")
    expect(tab.find(".traced tbody tr").nth(1)).to_contain_text("rank1.pt.trace.json.gz")
    tab.watched.shoot("traced-devices")
    assert tab.page.evaluate(STRIP_ENDS) == [True, False]
    apart = open_tab("apart", tab="timeline")
    assert apart.title() == "apart: 2 traces without a common moment."
    expect(apart.find("main")).to_contain_text("each rank from its own start")
    linked = open_tab("linked")
    assert linked.title() == "No trace of linked is opened."
    expect(linked.find("main")).to_contain_text("It is a link that leads out of the log directory")


@pytest.mark.slow
def test_traces_without_step_markers_speak_of_the_whole_trace(open_tab: OpenTab, samples: Path) -> None:
    tab = open_tab("unmarked")
    expect(tab.find("main")).to_contain_text("Each bar is the whole trace of a rank.")
    assert tab.find(".who").all_inner_texts() == ["rank 0", "rank 1"]
    expect(tab.find(".said")).to_have_text("GPU")
    tab.go("timeline")
    assert tab.title() == "unmarked: no step markers on 2 ranks."
    tab.go("operators")
    expect(tab.find("main")).to_contain_text("over the whole trace, which has no step markers")
    heads = [plain(" ".join(text.split())) for text in tab.find(".operators th").all_inner_texts()]
    assert (heads[1], heads[3]) == ("calls in the trace", "share of trace, %")
    expect(tab.find(".operators .total td").first).to_have_text("trace")
    tab.watched.shoot("unmarked-operators")
    tab.go("devices")
    expect(tab.find(".traced th").nth(2)).to_have_text("whole trace, ms")
    expect(tab.find("p.sub")).to_contain_text("No step markers: times are of the whole trace")
    tab.watched.shoot("unmarked-devices")
    tab.go("tables")
    expect(tab.find(".problems")).to_contain_text(
        "rank0.pt.trace.json.gz: doesn't state its rank, like 1 other"
    )
    assert str(samples) not in tab.find("main").inner_text()
    many = open_tab("unmarked-ranks", width=420)
    assert many.widths() == (420, 420), "the page must not scroll sideways"
    expect(many.find("main")).to_contain_text("Each row is the exposed wait of a rank in the whole trace")
    expect(many.find(".heat .step-axis")).to_have_text("whole trace")
    many.find(".heat canvas").first.hover(position={"x": 100, "y": 3})
    expect(many.find(".tip")).to_contain_text("whole trace: waits")


@pytest.mark.slow
def test_anybodys_broken_traces_speak_of_no_run(open_tab: OpenTab, samples: Path) -> None:
    tab = open_tab("damaged")
    line = tab.find(".problems div").first.inner_text()
    assert len(re.findall(r"\bbyte\b", line)) == 1, line
    (samples / "damaged" / "rank1.pt.trace.json.gz").write_bytes(b"")
    tab = open_tab("damaged", tab="timeline")
    assert tab.title() == "The traces of damaged can’t be read."
    assert "Splits" not in tab.find("main").inner_text()
    tab.watched.shoot("damaged")
