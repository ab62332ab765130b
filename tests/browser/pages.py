"""A real TensorBoard and a real Chromium, and what a test asks of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode, urlsplit

from playwright.sync_api import Browser, ConsoleMessage, FrameLocator, Locator, Page, Request, expect

SCREENSHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
PATIENCE_MS = 60_000
"""Nothing here is a measurement: a busy machine may take its time."""
expect.set_options(timeout=PATIENCE_MS)
HARMLESS = ("Three.js", "is deprecated. Please use app-layout", "favicon.ico")
"""What TensorBoard says on its console, and what a browser asks for next to any page."""


VIEWS = {
    "splits": "Splits",
    "where": "Where time goes",
    "timeline": "Timeline",
    "operators": "Operators",
    "tables": "Tables",
    "devices": "Devices",
}
ENTRY = "data/plugin_entry.html?name=gpurun"
STATE = """new URLSearchParams(location.hash.startsWith('#gpurun')
    ? decodeURIComponent(location.hash.split('&gpurun=')[1] ?? '') : location.hash.slice(1))"""
"""What the address holds, in JavaScript."""


def plain(text: str) -> str:
    """A text of the page with ordinary spaces where a line may not break: between a figure and its unit."""
    return text.replace("\u00a0", " ")


@dataclass
class Watched:
    """A page, and everything on it that should not have happened."""

    page: Page
    origin: str | None
    """What every address that may be asked begins with; `None`: nothing may be."""
    faults: list[str] = field(default_factory=list)

    def on_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        is_own = self.origin is not None and request.url.startswith(self.origin)
        is_own |= address.path.startswith("/font-roboto/")  # for which TensorBoard forgets its prefix
        if address.scheme not in ("data", "blob", "file") and not is_own:
            self.faults.append(f"request to {request.url}")

    def on_console(self, message: ConsoleMessage) -> None:
        text = f"{message.text} ({message.location.get('url')})"
        if message.type in ("error", "warning") and not any(each in text for each in HARMLESS):
            self.faults.append(f"console: {text}")

    def blank(self) -> None:
        """Leaves what is shown, so that the next address is loaded again, and forgets what went wrong."""
        self.page.goto("about:blank")
        self.faults.clear()

    def check(self) -> None:
        """Fails if anything happened that should not have."""
        self.page.evaluate("0")  # messages that the page has sent by now come first
        assert not self.faults, "\n".join(self.faults)

    def shoot(self, name: str) -> None:
        """Keeps a picture for people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        # Written by us: playwright would leave a thread behind.
        (SCREENSHOTS / f"{name}.png").write_bytes(self.page.screenshot())


@contextmanager
def watched_page(
    browser: Browser, origin: str | None, *, dark: bool = False, width: int = 1280, height: int = 800
) -> Iterator[Watched]:
    """A fresh page whose console, errors and requests are held against it when the block is left."""
    theme: Literal["dark", "light"] = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    try:
        watched = Watched(context.new_page(), origin)
        page = watched.page
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", watched.on_request)
        page.on("pageerror", lambda error: watched.faults.append(f"error: {error}"))
        page.on("console", watched.on_console)
        yield watched
        watched.check()
    finally:
        context.close()


@dataclass(frozen=True)
class Tab:
    """The GPURUN tab: in TensorBoard's own page, or its frame's document alone, which loads faster."""

    watched: Watched
    url: str
    framed: bool = False

    @property
    def page(self) -> Page:
        return self.watched.page

    @property
    def frame(self) -> FrameLocator | Page:
        return self.page.frame_locator("iframe") if self.framed else self.page

    def open(self, **state: str) -> "Tab":
        """Goes to the tab with this state in the address, and waits until it is drawn."""
        inner = urlencode(state)
        place = f"#gpurun&gpurun={quote(inner, safe='')}" if self.framed else f"{ENTRY}#{inner}"
        self.page.goto(self.url + place)
        self.drawn()
        return self

    def drawn(self, view: str | None = None) -> None:
        """Waits until the view in front (`view`, if given) has been drawn."""
        where = f'[data-view="{view}"]' if view else ""
        self.frame.locator(f"main{where}[data-ready=true], [data-state=empty]").first.wait_for(
            timeout=PATIENCE_MS
        )

    def go(self, view: str) -> None:
        """Clicks on one of the tab's own tabs."""
        self.frame.locator(f"[data-tab={view}]").click()
        self.drawn(view)

    def find(self, selector: str, *, has_text: str | None = None) -> Locator:
        return self.frame.locator(selector, has_text=has_text)

    def widths(self) -> tuple[int, int]:
        """Of the page's content, and of the window."""
        widths: list[int] = self.find("body").evaluate("body => [body.scrollWidth, innerWidth]")
        return widths[0], widths[1]

    def settled(self) -> None:
        """Waits for what is drawn after the view itself: every step's dots, and the timeline's blocks."""
        if self.find(".strip").count():
            self.find(".strip canvas").first.wait_for()
        if self.find("[data-canvas=lanes]").count():
            self.find("[data-canvas=lanes][data-drawn=true]").wait_for()
        self.find("body").evaluate(
            "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"
        )

    def title(self) -> str:
        return plain(self.frame.locator("h1").inner_text())

    def state(self) -> dict[str, str]:
        """What the address holds now."""
        script = f"() => JSON.stringify(Object.fromEntries({STATE}))"
        found: dict[str, str] = json.loads(self.page.evaluate(script))
        return found

    def await_state(self, key: str, value: str | None) -> None:
        """Waits until the address says so: it is written a moment after the page changes."""
        self.page.wait_for_function(
            f"([key, value]) => value === null ? {STATE}.has(key) : {STATE}.get(key) === value",
            arg=[key, value],
        )
