"""One TensorBoard over all sample runs and one Chromium, for all tests of this directory."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.report.tensorboard import write_tensorboard
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.tensorboard_plugin.view import open_view
from tests.browser.pages import Tab, Watched, watched_page
from tests.browser.samples.odd_runs import (
    write_all_failed,
    write_apart,
    write_broken,
    write_changing,
    write_curves,
    write_damaged,
    write_hostile,
    write_linked,
    write_live,
    write_one,
    write_timed,
    write_traced,
    write_unmarked,
)
from tests.browser.samples.sample_runs import (
    write_balanced,
    write_batches,
    write_gpt_splits,
    write_improvement,
    write_many,
    write_ranks,
    write_search,
    write_tuned,
)
from tests.browser.samples.sample_traces import write_mesh
from tools.system_packages import without

LIGHT = ["--disable-gpu", "--disable-extensions", "--disable-background-networking"]
"""A browser without what no test here looks at."""
SAMPLES: dict[str, Callable[[Path], object]] = {
    "gpt": write_gpt_splits,
    "balanced": write_balanced,
    "batches": write_batches,
    "many": write_many,
    "search": write_search,
    "tuned": write_tuned,
    "improved": write_improvement,
    "searching": partial(write_search, is_over=False),
    "ranks": write_ranks,
    "mesh": write_mesh,
    "all-failed": write_all_failed,
    "hostile": write_hostile,
    "broken": write_broken,
    "changing": write_changing,
    "one": write_one,
    "curves": write_curves,
    "timed": write_timed,
    "live": write_live,
    "traced": write_traced,
    "linked": write_linked,
    "unmarked": write_unmarked,
    "unmarked-ranks": partial(write_unmarked, count=9),
    "apart": write_apart,
    "damaged": write_damaged,
}


@pytest.fixture(scope="package")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log directory with one run of each kind; each is named after its kind."""
    directory = tmp_path_factory.mktemp("logdir")
    for name, write in SAMPLES.items():
        write(directory / name)
    run = RunDir(directory / "gpt")
    write_tensorboard(read_json(run.comparison, Comparison), run)
    return directory


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if reason := without("chromium"):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("TMPDIR", os.environ["XDG_CACHE_HOME"])  # which a killed session removes, too
        playwright = stack.enter_context(sync_playwright())
        # Without its sandbox: CI runs as root in a container. It only sees pages of our own.
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", *LIGHT]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def board(samples: Path) -> Iterator[str]:
    """Address of a TensorBoard over the samples."""
    with open_view(samples) as server:
        yield server.url


@pytest.fixture(scope="package")
def pages(browser: Browser, board: str) -> Iterator["Pages"]:
    """One page per size and theme for all tests: a fresh one would load everything again."""
    with ExitStack() as stack:
        yield Pages(browser, board, stack)


@pytest.fixture
def open_tab(pages: "Pages") -> Iterator["Pages"]:
    """Opens the tab on a run; what went wrong on its pages fails the test at the end."""
    pages.opened.clear()
    yield pages
    for watched in pages.opened:
        watched.check()


OpenTab = Callable[..., Tab]


class Pages:
    """`open_tab("gpt", tab="where", dark=True)`."""

    def __init__(self, browser: Browser, board: str, stack: ExitStack) -> None:
        self._browser, self._board, self._stack = browser, board, stack
        self._pages: dict[tuple[bool, int, int], Watched] = {}
        self.opened: list[Watched] = []

    def page(self, *, dark: bool = False, width: int = 1280, height: int = 800) -> Watched:
        """The page of this size and theme, with nothing on it."""
        key = (dark, width, height)
        if key not in self._pages:
            opened = watched_page(
                self._browser, self._board.rstrip("/"), dark=dark, width=width, height=height
            )
            self._pages[key] = self._stack.enter_context(opened)
        watched = self._pages[key]
        watched.blank()
        self.opened.append(watched)
        return watched

    def __call__(self, run: str, *, framed: bool = False, **more: Any) -> Tab:
        looks = {key: more.pop(key) for key in ("dark", "width", "height") if key in more}
        return Tab(self.page(**looks), self._board, framed).open(run=run, **more)


@pytest.fixture(scope="package")
def empty_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a TensorBoard over a directory in which nothing has run yet."""
    with open_view(tmp_path_factory.mktemp("empty")) as server:
        yield server.url
