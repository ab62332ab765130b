"""YAML text: what its scalars mean, where things are, and what is refused."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.yaml.tree import Source, Unreadable, override_source, parse_source, read_source
from tests.wording import Wording

BOMB = "a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"b{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


def data_of(text: str) -> Any:
    source = parse_source(text.encode(), "job.yaml")
    assert source.problems == ()
    return source.root.plain()


def refusal(content: bytes) -> str:
    """All that is wrong with the file, in one text."""
    try:
        source = parse_source(content, "job.yaml")
    except SpecError as error:
        return str(error)
    return "\n".join(map(str, source.problems))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3:1", "3:1"),
        ("no", "no"),
        ("on", "on"),
        ("1e-3", 1e-3),
        ("1_000", "1_000"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("~", None),
        ("TRUE", True),
        ("false", False),
        ("'64'", "64"),
        ("!!str 64", "64"),
        ("!!float 1", 1),
        ("2001-12-14", "2001-12-14"),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    got = data_of(f"k: {text}")["k"]
    assert got == value
    assert type(got) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives(number: float) -> None:
    assert data_of(f"k: {number!r}")["k"] == number


@given(st.integers(-(2**63), 2**64 - 1))
def test_every_integer_survives(number: int) -> None:
    assert data_of(f"k: {number}")["k"] == number


def test_positions_of_keys_and_values() -> None:
    source = parse_source(b"a: 1\nb:\n  - x\n  - {c: [7, 8]}\n", "job.yaml")
    assert str(source.problem(("b", 1, "c", 1), "here")) == "job.yaml:4:13: here"
    assert str(source.key_problem(("b", 1, "c"), "here")) == "job.yaml:4:6: here"
    assert str(source.problem(("b", 1, "missing"), "here")) == "job.yaml:4:5: here"
    assert str(source.problem(("nothing",), "here")) == "job.yaml:1:1: here"


def test_aliases_are_written_out() -> None:
    assert data_of("a: &x {k: [1]}\nb: *x\n") == {"a": {"k": [1]}, "b": {"k": [1]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "job.yaml: the file is empty"),
        (b"# nothing\n", "job.yaml: the file is empty"),
        (b"a: 'x", "job.yaml:1:6: invalid YAML"),
        (b"a:\n\t- b", "job.yaml:2:1: a tab in the indentation\n.*not tabs"),
        (b"a: b: c", "job.yaml:1:4: a `: ` within a value that has no quotes"),
        (b"a: 1\na: 2\n", r"job.yaml:2:1: duplicate key `a` \(first on line 1\)"),
        (BOMB.encode(), "more than 10,000 values"),
        (b"a: &a [*a]", r"job.yaml:1:8: the alias `\*a` refers to itself"),
        (b"a: *b", r"job.yaml:1:4: the alias `\*b` has no anchor above it"),
        (
            b"a: !!python/object:os.system x",
            "job.yaml:1:4: the tag `!!python/object:os.system` is not allowed",
        ),
        (b"a: !!python/object/apply:os.system [ls]", "the tag `!!python/object/apply:os.system`"),
        (b"a: !own {}", "the tag `!own` is not allowed"),
        (b"a: !!int x", "`x` is not a valid `!!int`"),
        (b"a: 1\n---\nb: 2\n", "job.yaml:2:1: a second document"),
        (b"a: .nan", "job.yaml:1:4: `.nan` is not a number"),
        (b"a: -.inf", "`-.inf` is not a number"),
        (b"a: 1e999", "too large"),
        (b"a: " + b"9" * 5000, "too large"),
        (b"a: 1\nb: \xff", r"job.yaml:2:4: not UTF-8: a stray byte 0xff"),
        (b"a: 1\nb: x\x00", r"job.yaml:2:5: the control character U\+0000"),
        (b"a: \x1b[31m", r"control character U\+001B"),
        (b'a: "\\ud800"', "invalid YAML"),
        (b"1: 2", "a key must be text, not the number 1\n.*quotes"),
        (b"? [a]\n: 2", "a key must be text, not a list"),
        (b"[" * 10_000_000, "larger than 1,000,000 bytes"),
        (b"[" * 900_000, "job.yaml:1:(51|1001): nested more than 50 levels deep"),
        (b"{a: " * 200_000, "nested more than 50"),
        (b"- " * 400_000, "nested more than 50"),
        (b"? " * 400_000, "nested more than 50"),
        (b"%YAML 3.0\n---\na: 1\n", "invalid YAML"),
    ],
)
def test_what_is_refused_and_where(content: bytes, message: str) -> None:
    assert re.search(message, refusal(content)), refusal(content)[:500]


def test_aliases_that_nest_too_deep(wording: Wording) -> None:
    chain = "a: &a0 [1]\n" + "".join(f"b{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 90))
    wording(refusal(chain.encode()))


def test_several_mistakes_come_at_once() -> None:
    found = refusal(b"a: 1\na: 2\nb: .nan\nc: !x 1\n")
    assert [line.split()[0] for line in found.splitlines() if line.startswith("job")] == [
        "job.yaml:2:1:",
        "job.yaml:3:4:",
        "job.yaml:4:4:",
    ]


def test_a_byte_order_mark_is_no_mistake() -> None:
    assert data_of("\ufeffa: 1") == {"a": 1}


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "quickstart.yaml").write_text("a: 1")
    with wording.raises(SpecError):
        read_source(tmp_path / "quikstart.yaml")


def test_a_directory_is_no_file(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "job.yaml").write_text("a: 1")
    with wording.raises(SpecError):
        read_source(tmp_path)


@pytest.mark.parametrize("name", ["x\0y", "x" * 300])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="can't be read"):
        read_source(tmp_path / name)


def test_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def refuse(self: Path, mode: str) -> None:  # root, as in a container, may read everything
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with wording.raises(SpecError):
        read_source(tmp_path / "job.yaml")


def overridden(text: str, *overrides: str) -> Source:
    return override_source(parse_source(text.encode(), "job.yaml"), overrides)


def test_overrides_replace_add_and_reach_into_lists() -> None:
    source = overridden("a: 1\nl: [x, {y: 1}]\n", "a=[1, 3:1]", "new.deep=1e-3", "l.1.y=no", "t=a=b")
    assert source.root.plain() == {
        "a": [1, "3:1"],
        "l": ["x", {"y": "no"}],
        "new": {"deep": 1e-3},
        "t": "a=b",
    }


def test_a_mistake_in_an_override_names_the_option(wording: Wording) -> None:
    source = overridden("a: {b: 1}\n", "a.b=.nan")
    wording(str(source.problems[0]))
    assert str(source.problem(("a", "b"), "wrong")) == "--set a.b: wrong"


@pytest.mark.parametrize("override", ["nothing", "=1", "a..b=1", "a=[", "a.b=1", "l.7=1", "l.x=1", "a=\x00"])
def test_overrides_that_are_refused(override: str, wording: Wording) -> None:
    (problem,) = overridden("a: 1\nl: [x]\n", override).problems
    wording(str(problem))


def test_a_refused_override_stops_no_other() -> None:
    source = overridden("a: 1\n", "b=[", "c", "d=2")
    assert [problem.file for problem in source.problems] == ["--set b", "--set c"]
    assert source.root.plain() == {"a": 1, "b": Unreadable(), "d": 2}
