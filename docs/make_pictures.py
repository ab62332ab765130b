"""Makes docs/images/*.png from the recorded runs in docs/runs: `make pictures`.

Opens the tab over a copy of them in a headless Chromium, and keeps a picture of each view. `make docs` has
compared them with this gpurun.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from gpurun.launcher.tensorboard_plugin.view import open_view

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "runs"
IMAGES = ROOT / "docs" / "images"
CHROMIUM = "/usr/bin/chromium"
ENTRY = "data/plugin_entry.html?name=gpurun"
"""The tab's own document, without TensorBoard's frame around it."""
WIDTH = 1200
MARGIN = 20
PATIENCE_MS = 60_000

PICTURES = {
    "splits": {"run": "gpt-splits", "tab": "splits"},
    "where": {"run": "gpt-splits", "tab": "where"},
    "timeline": {"run": "gpt-splits", "tab": "timeline", "variant": "ddp-2-3-1"},
    "operators": {
        "run": "gpt-splits",
        "tab": "operators",
        "variant": "ddp-2-3-1",
        "against": "ddp-2-even",
    },
    "balanced": {"run": "balanced", "tab": "splits"},
    "search": {"run": "tune", "tab": "search"},
}
"""What the address of each picture holds."""
HEIGHTS = {"operators": 620, "search": 920, "timeline": 700}
"""In pixels, of views that fill the window or go on with long tables; others are cut where they end."""


def main() -> None:
    if not Path(CHROMIUM).exists():
        sys.exit(f"the pictures need Chromium as {CHROMIUM}: install the package `chromium`")
    wanted = sys.argv[1:] or list(PICTURES)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        shutil.copytree(RUNS, Path(directory) / "runs")
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        with open_view(Path(directory) / "runs") as server:
            for name in wanted:
                path = IMAGES / f"{name}.png"
                path.write_bytes(picture(chromium, f"{server.url}{ENTRY}#{urlencode(PICTURES[name])}", name))
                print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size >> 10} KiB")
        chromium.close()


def picture(chromium: Browser, url: str, name: str) -> bytes:
    """The view at `url` as PNG, twice as many pixels as it is wide."""
    context = chromium.new_context(
        viewport={"width": WIDTH, "height": HEIGHTS.get(name, 800)},
        device_scale_factor=2,
        color_scheme="light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    wait_until_drawn(page)
    page.set_viewport_size({"width": WIDTH, "height": HEIGHTS.get(name) or bottom_of(page)})
    wait_until_drawn(page)
    height = min(HEIGHTS.get(name, bottom_of(page)), bottom_of(page))
    shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
    image = Image.open(io.BytesIO(shot))
    context.close()
    small = io.BytesIO()
    # A third of the bytes; this method keeps rare colours, which a legend is made of.
    image = image.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(small, "PNG", optimize=True)
    return small.getvalue()


def bottom_of(page: Page) -> int:
    """Where the view ends, with a margin, in pixels."""
    script = "document.querySelector('main').lastElementChild.getBoundingClientRect().bottom"
    return round(page.evaluate(script)) + MARGIN


def wait_until_drawn(page: Page) -> None:
    """Until the view, its canvases and fonts are on the screen."""
    page.locator("main[data-ready=true]").wait_for()
    if page.locator(".strip").count():
        page.locator(".strip canvas").first.wait_for()
    if page.locator("[data-canvas=lanes]").count():
        page.locator("[data-canvas=lanes][data-drawn=true]").wait_for()
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
