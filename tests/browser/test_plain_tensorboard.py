"""TensorBoard's own pages over a run's event files: for those who prefer them. The pictures are looked at."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from launcher.compare.model import Comparison
from launcher.report.tensorboard import write_tensorboard
from launcher.run.view import open_view
from launcher.rundir import read_json
from tests.browser.pages import watched_page
from tests.browser.sample_runs import write_gpt_splits

PAGES = {
    "scalars": "step_ms",
    "hparams": "step (ms)",
    "custom_scalars": "Which split is fastest?",
    "text": "ddp 34/30",
}
"""What each page shows of a run."""


@pytest.fixture(scope="module")
def plain_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run = write_gpt_splits(tmp_path_factory.mktemp("plain") / "gpt", traced=[])
    write_tensorboard(read_json(run.comparison, Comparison), run)
    with open_view(Path(run.path)) as server:
        yield server.url


def test_own_pages_show_the_run(browser: Browser, plain_board: str) -> None:
    with watched_page(browser, plain_board.rstrip("/")) as watched:
        for page, shown in PAGES.items():
            watched.page.goto("about:blank")
            watched.page.goto(f"{plain_board}#{page}")
            # The pages that aren't in front stay in the document, hidden.
            watched.page.get_by_text(shown).locator("visible=true").first.wait_for()
            watched.shoot(f"plain-{page}")
