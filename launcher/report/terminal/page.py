"""Where a report is shown, and how lines of coloured text become a string for it."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

NEVER_WRAPPED = 1_000_000


@dataclass(frozen=True)
class Page:
    """What the renderers of a terminal report must know about where it goes."""

    width: int
    plain: bool
    """Goes into a pipe: no colour, no wrapping."""
    run: str | None = None
    """The run directory as a person would type it."""

    def in_run(self, path: str) -> str:
        """A path of the run directory as a person would type it."""
        return path if self.run is None else f"{self.run}/{path}"


def to_string(lines: Iterable[Text], page: Page) -> str:
    """ANSI text, or without any escape where `page` is plain; long sentences wrap at words."""
    console = Console(
        width=NEVER_WRAPPED if page.plain else page.width,
        color_system=None if page.plain else "standard",
        force_terminal=not page.plain,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=page.plain)
    return "\n".join(text.rstrip() for text in capture.get().splitlines())
