"""A timeline in a real Chromium: time to its first picture, of zooms and pans, and the size of the heap."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession, Page, ViewportSize, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
TAB = "data/plugin_entry.html?name=gpurun#tab=timeline"
SIZE = ViewportSize(width=1280, height=800)
MOVES = "f" + "w" * 16 + "d" * 6 + "a" * 6 + "s" * 8 + "d" * 6 + "w" * 8 + "f"
"""Keys of the timeline: all of it, closer, to both sides, out, on, closer, all of it again."""
BYTES_PER_MB = 1e6
WATCH = """
new MutationObserver(() => {
    if (!window.pictureMs && document.querySelector('[data-canvas=lanes][data-drawn=true]'))
        requestAnimationFrame(() => { window.pictureMs ??= performance.now(); });
}).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ['data-drawn']});
"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
WINDOWS = """() => performance.getEntriesByType('resource')
    .filter((entry) => entry.name.includes('timeline/window')).map((entry) => entry.duration)"""


@dataclass(frozen=True)
class Browsing:
    """A browser's times and memory for one indexed trace."""

    paint_ms: float
    """From the start of loading the tab to the first text (first contentful paint)."""
    picture_ms: float
    """To the frame that has all lanes and the overview."""
    move_ms: float
    """Median of a zoom's or pan's request, as the page measures it; cached windows aren't requested."""
    num_asked: int
    heap_mb: float
    """JavaScript heap and array buffers after all moves, after garbage collection."""
    peak_heap_mb: float
    """The largest seen between moves, garbage included."""


def browse(url: str) -> Browsing:
    """Opens the timeline of the only run at `url`, and zooms and pans in it."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport=SIZE)
        page.add_init_script(WATCH)
        page.goto(url + TAB)
        page.wait_for_function("() => window.pictureMs")
        session = page.context.new_cdp_session(page)
        figures = _moved(page, session)
        chromium.close()
    return figures


def _moved(page: Page, session: CDPSession) -> Browsing:
    before = len(page.evaluate(WINDOWS))
    page.locator("[data-canvas=lanes]").focus()
    heaps = []
    for key in MOVES:
        page.keyboard.press(key)
        page.wait_for_timeout(150)
        heaps.append(_heap_mb(session))
    page.wait_for_load_state("networkidle")
    asked = page.evaluate(WINDOWS)[before:]
    session.send("HeapProfiler.collectGarbage")
    return Browsing(
        paint_ms=page.evaluate(PAINT),
        picture_ms=page.evaluate("() => window.pictureMs"),
        move_ms=statistics.median(asked),
        num_asked=len(asked),
        heap_mb=_heap_mb(session),
        peak_heap_mb=max(heaps),
    )


def _heap_mb(session: CDPSession) -> float:
    usage: dict[str, Any] = session.send("Runtime.getHeapUsage")
    return float(usage["usedSize"] + usage.get("backingStorageSize", 0)) / BYTES_PER_MB
