"""TensorBoard's own page around the tab, loaded once: theme, address, and its own views of the same run.

The tests go on with one page, in this order: TensorBoard takes seconds to load.
"""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.pages import VIEWS, Tab, watched_page

OWN_PAGES = {
    "scalars": "step_ms",
    "hparams": "step (ms)",
    "custom_scalars": "Which variant is fastest?",
    "text": "ddp 34/30",
}
"""What each of TensorBoard's own pages shows of a run."""


@pytest.fixture(scope="module")
def framed(browser: Browser, board: str) -> Iterator[Tab]:
    """The tab in TensorBoard's page."""
    with watched_page(browser, board.rstrip("/")) as watched:
        yield Tab(watched, board, framed=True).open(run="gpt")


@pytest.mark.slow
def test_every_view_opens_in_the_frame(framed: Tab) -> None:
    for view, name in VIEWS.items():
        framed.go(view)
        assert framed.find("[role=tab][aria-selected=true]").inner_text() == name
    framed.go("splits")
    framed.watched.shoot("framed")
    framed.watched.check()


@pytest.mark.slow
def test_filters_leave_only_what_was_chosen_and_survive_a_reload(framed: Tab) -> None:
    framed.find("[data-key='strategy:ddp']").click()
    expect(framed.find(".splits tr[data-variant]")).to_have_count(2)
    framed.await_state("strategy", "dp~single")
    framed.page.reload()
    framed.drawn("splits")
    expect(framed.find("[data-key='strategy:ddp']")).to_have_attribute("aria-pressed", "false")
    expect(framed.find(".splits tr[data-variant]")).to_have_count(2)
    framed.watched.check()


@pytest.mark.slow
def test_theme_follows_tensorboard_at_once(framed: Tab) -> None:
    assert framed.find("html").get_attribute("data-theme") == "light"
    for name, colour in (("Dark", "rgb(48, 48, 48)"), ("Light", "rgb(255, 255, 255)")):
        framed.page.locator("app-header-dark-mode-toggle button").click()
        framed.page.get_by_role("menuitem", name=name).click()
        expect(framed.find("html")).to_have_attribute("data-theme", name.lower())
        assert framed.find("body").evaluate("body => getComputedStyle(body).backgroundColor") == colour
    framed.watched.check()


@pytest.mark.slow
def test_own_pages_show_the_run(framed: Tab) -> None:
    for name, shown in OWN_PAGES.items():
        framed.page.evaluate("name => { location.hash = name; }", name)
        # The pages that aren't in front stay in the document, hidden.
        framed.page.get_by_text(shown).locator("visible=true").first.wait_for()
        framed.watched.shoot(f"plain-{name}")
    framed.watched.check()
