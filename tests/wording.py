"""What messages say, word for word: a snapshot per test file, so that another wording changes no test."""

import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import ndiff
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

E = TypeVar("E", bound=BaseException)
TESTS = Path(__file__).parent
Sections = dict[str, list[str]]
"""The texts of each test, by its name."""


@dataclass
class WordingFile:
    """The file below `tests/snapshots/wording` of one test file."""

    module: ModuleType
    update: bool
    expected: Sections = field(default_factory=dict)
    seen: Sections = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.expected = read_sections(self.path.read_text(encoding="utf-8"))
        gone = self.expected.keys() - self._kept(self.expected).keys()
        assert self.update or not gone, f"{self.path}: {gone} are no tests of words; --update removes them"

    @property
    def path(self) -> Path:
        file = Path(self.module.__file__ or "").relative_to(TESTS)
        return TESTS / "snapshots/wording" / file.with_suffix(".txt")

    def write(self) -> None:
        """Replaces the sections of the tests that ran, and removes those of tests that are gone."""
        ran = {function(test) for test in self.seen}
        old = {test: texts for test, texts in self.expected.items() if function(test) not in ran}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(written(self._kept(old | self.seen)), encoding="utf-8")

    def _kept(self, sections: Sections) -> Sections:
        """Those of tests that ask for `wording`, in their order in the module."""
        asks = [name for name, test in vars(self.module).items() if "wording" in parameters(test)]
        kept = [(test, texts) for test, texts in sections.items() if texts and function(test) in asks]
        return dict(sorted(kept, key=lambda section: asks.index(function(section[0]))))


def parameters(of: object) -> Collection[str]:
    return inspect.signature(of).parameters if inspect.isfunction(of) else ()


def function(test: str) -> str:
    """The name of a test without its parameters."""
    return test.partition("[")[0]


def written(sections: Sections) -> str:
    """A test's name, then its texts: `> ` begins each, two spaces its further lines."""
    return "\n".join(
        f"{test}\n" + "".join(re.sub(r"\n(?=[^\n])", "\n  ", f"> {text}") + "\n" for text in texts)
        for test, texts in sections.items()
    )


def read_sections(text: str) -> Sections:
    """What `written` wrote."""
    parts = re.split(r"^(?=[^> \n])", text, flags=re.MULTILINE)
    sections = (part.removesuffix("\n").split("\n> ") for part in parts if part)
    return {test: [text.replace("\n  ", "\n").rstrip("\n") for text in texts] for test, *texts in sections}


@dataclass
class Wording:
    """Compares texts with the section of one test, in their order; its temporary directory is `TMP` there."""

    file: WordingFile
    test: str
    directory: Path | None

    def __post_init__(self) -> None:
        self.file.seen[self.test] = []

    def __call__(self, *texts: object, hide: str = "") -> None:
        """Takes texts and collections of texts; `hide` matches what differs from run to run."""
        for text in texts:
            if isinstance(text, set | frozenset):
                self(*sorted(map(str, text)), hide=hide)
            elif isinstance(text, list | tuple):
                self(*text, hide=hide)
            else:
                self._compare(re.sub(hide, "…", str(text)) if hide else str(text))

    def _compare(self, text: str) -> None:
        text = text.replace(str(self.directory), "TMP") if self.directory else text
        text = text.replace("\r", "\\r").rstrip("\n")
        seen = self.file.seen[self.test]
        seen.append(text)
        if not self.file.update:
            expected = self.file.expected.get(self.test, [])[len(seen) - 1 : len(seen)]
            assert [text] == expected, self._difference("\n".join(expected), text)

    def _difference(self, expected: str, text: str) -> str:
        lines = ndiff(expected.split("\n"), text.split("\n"))
        return "\n".join((f"pytest --update rewrites {self.file.path.name}", *lines))

    @property
    def is_complete(self) -> bool:
        return len(self.file.seen[self.test]) == len(self.file.expected.get(self.test, []))

    @contextmanager
    def raises(
        self, error: type[E] | tuple[type[E], ...], hide: str = ""
    ) -> Iterator[pytest.ExceptionInfo[E]]:
        """As `pytest.raises`, and compares what the error says."""
        with pytest.raises(error) as raised:
            yield raised
        self(raised.value, hide=hide)
