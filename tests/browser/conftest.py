"""One TensorBoard over all sample runs and one Chromium, for all tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from launcher.run.view import open_view
from tests.browser.pages import CHROMIUM, Tab, Watched, watched_page
from tests.browser.sample_runs import (
    write_broken,
    write_gpt_splits,
    write_hostile,
    write_many,
    write_one,
    write_ranks,
)

SAMPLES = {
    "gpt": write_gpt_splits,
    "many": write_many,
    "ranks": write_ranks,
    "hostile": write_hostile,
    "broken": write_broken,
    "one": write_one,
}


@pytest.fixture(scope="package")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log directory with one run of each kind; each is named after its kind."""
    folder = tmp_path_factory.mktemp("logdir")
    for name, write in SAMPLES.items():
        write(folder / name)
    return folder


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Without its sandbox: CI runs as root in a container. It only sees pages of our own.
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def board(samples: Path) -> Iterator[str]:
    """Address of a TensorBoard over the samples."""
    with open_view(samples) as server:
        yield server.url


@pytest.fixture
def open_tab(browser: Browser, board: str) -> Iterator["OpenTab"]:
    """Opens the tab on a run; what went wrong on its page fails the test at the end."""
    with ExitStack() as stack:
        yield OpenTab(browser, board, stack)


class OpenTab:
    """`open_tab("gpt", tab="where", dark=True)`."""

    def __init__(self, browser: Browser, board: str, stack: ExitStack) -> None:
        self._browser, self._board, self._stack = browser, board, stack

    def __call__(
        self,
        run: str,
        *,
        dark: bool = False,
        width: int = 1280,
        height: int = 800,
        framed: bool = False,
        **state: str,
    ) -> Tab:
        origin = self._board.rstrip("/")
        page: Watched = self._stack.enter_context(
            watched_page(self._browser, origin, dark=dark, width=width, height=height)
        )
        return Tab(page, self._board, framed).open(run=run, **state)


@pytest.fixture(scope="package")
def empty_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a TensorBoard over a folder in which nothing has run yet."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "events.out.tfevents.0.none").touch()
    with open_view(folder) as server:
        yield server.url
