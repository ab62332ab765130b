"""The command that runs the benchmarks."""

import sys
from importlib.util import find_spec

import pytest

from benchmarks.__main__ import NAMES, main


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("startupp", 2)])
def test_help_and_unknown_names_are_answered(
    word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", word])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    said = capsys.readouterr()
    assert "startup" in said.out + said.err


def test_every_name_is_a_module() -> None:
    assert all(find_spec(f"benchmarks.{name}") for name in NAMES)
