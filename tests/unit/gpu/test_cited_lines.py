"""Where a test names a line of torch that it stands for, that line is there in the pinned torch.

Of C++ a build has the headers only: lines of `.cpp` files can't be looked up.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[2]
PACKAGES = Path(torch.__file__).parents[1]
CITED = re.compile(
    r"\b(?P<file>(?:torch|c10)/[\w/]+\.(?:py|h|hpp)):(?P<line>\d+)[:,] `(?:\w+\.)*(?P<name>\w+)"
)
UNCITED = re.compile(r"(?:torch|c10)/[\w/]+\.(?:py|h|hpp), `")


def texts() -> Iterator[tuple[Path, str]]:
    """The tests, with every comment in one line."""
    for path in sorted((TESTS / "unit").rglob("*.py")):
        yield path, re.sub(r"\s*\n\s*(# )?", " ", path.read_text(encoding="utf-8"))


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="lines are those of torch 2.13")
def test_cited_lines_have_the_name_that_is_cited() -> None:
    found = [(path.name, cited) for path, text in texts() for cited in CITED.finditer(text)]
    assert len(found) > 25
    assert not [(name, cited[0]) for name, cited in found if cited["name"] not in line(cited)]


def line(cited: re.Match[str]) -> str:
    """The line of a file, or of a header."""
    place = PACKAGES if cited["file"].endswith(".py") else PACKAGES / "torch/include"
    lines = (place / cited["file"]).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[int(cited["line"]) - 1 :][:1])


def test_what_can_be_looked_up_is_cited_with_its_line() -> None:
    own = Path(__file__)
    assert not [
        (path.name, found[0]) for path, text in texts() if path != own for found in UNCITED.finditer(text)
    ]
