"""Options set in the arguments of a program: each in its form, and every other argument stays."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.jobfile.values import with_options

NAME = "num_workers"
FORMS = ("--num_workers {}", "--num-workers {}", "--num_workers={}", "-num-workers={}", "num_workers={}")


def is_other(word: str) -> bool:
    plain = word.lstrip("+-").replace("-", "_")
    return word not in ("--", "on", "off") and not plain.startswith(NAME)


values = st.text(min_size=1, max_size=6).filter(lambda text: not text.startswith("-")) | st.integers().map(
    str
)
others = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(["--epochs", "1", "--lr=0.1", "--workers", "num", "-w", "model.width=3", "-1"]),
    ).filter(is_other),
    max_size=4,
)
nothing: list[str] = []
rests = st.just(nothing) | others.map(lambda words: ["--", *words, "--num_workers", "8"])


@given(
    others,
    st.lists(st.tuples(st.sampled_from(FORMS[:4]), values, others), max_size=3),
    rests,
    values,
    st.sampled_from([NAME, "num-workers"]),
)
def test_the_last_one_gets_the_value_and_every_other_argument_stays(
    before: list[str], there: list[tuple[str, str, list[str]]], rest: list[str], value: str, name: str
) -> None:
    def line(of: list[tuple[str, str, list[str]]]) -> tuple[str, ...]:
        words = [*before]
        for form, old, after in of:
            option, space, _ = form.partition(" ")
            words += [option, old] if space else [form.format(old)]
            words += after
        return tuple(words)

    found = with_options((*line(there), *rest), {name: value})
    changed = [*there[:-1], (there[-1][0], value, there[-1][2])] if there else []
    added = () if there else (f"--{name}", value)
    if value in ("on", "off") and not any("=" in form for form, _, _ in there[-1:]):
        return  # a flag
    assert found == (*line(changed), *added, *rest)


@given(others, st.lists(others, max_size=3), rests)
def test_a_flag_is_there_or_not_and_every_other_argument_stays(
    before: list[str], between: list[list[str]], rest: list[str]
) -> None:
    without = [*before, *(word for words in between for word in words)]
    line = [*before, *(word for words in between for word in ("--num-workers", *words))]
    assert with_options([*line, *rest], {NAME: "off"}) == (*without, *rest)
    added = [] if between else ["--num_workers"]
    assert with_options([*line, *rest], {NAME: "on"}) == (*line, *added, *rest)


@given(others, st.sampled_from(["", "+", "++"]), st.none() | values, others, rests, values | st.just("on"))
def test_a_key_of_hydra_keeps_its_prefix(
    before: list[str], prefix: str, old: str | None, after: list[str], rest: list[str], value: str
) -> None:
    there = [] if old is None else [f"{prefix}num_workers={old}"]
    new = [] if old is None else [f"{prefix}num_workers={value}"]
    added = [f"num_workers={value}"] if old is None else []
    found = with_options([*before, *there, *after, *rest], {f"+{NAME}": value})
    assert found == (*before, *new, *after, *added, *rest)


@given(others, st.dictionaries(st.sampled_from([NAME, "amp", "+a.b", "x"]), values | st.just("off")))
def test_setting_options_again_changes_nothing(line: list[str], options: dict[str, str]) -> None:
    once = with_options(line, options)
    assert with_options(once, options) == once


@given(
    st.permutations([["--epochs", "3"], ["--lr=0.5"], ["--amp"], ["data"]]),
    st.sampled_from([[], ["--num-workers", "1"], ["--num_workers=1"], ["--num-workers=1"]]),
    st.integers(0, 4),
    st.integers(-5, 5),
)
def test_argparse_reads_the_value_and_all_else_as_before(
    groups: list[list[str]], there: list[str], at: int, value: int
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-workers", "--num_workers", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("path")
    line = [word for group in (*groups[:at], there, *groups[at:]) for word in group]
    before = vars(parser.parse_args(line))
    options = {NAME: str(value), "amp": "off"}
    after = vars(parser.parse_args(with_options(line, options)))
    assert after == {**before, "num_workers": value, "amp": False}


@pytest.mark.parametrize(
    ("line", "name", "value", "wanted"),
    [
        ("--workers 4 --epochs 1", "workers", "0", "--workers 0 --epochs 1"),
        ("--lr -0.1 x", "lr", "-3", "--lr -3 x"),
        ("--workers", "workers", "0", "--workers 0"),
        ("--workers --epochs 1", "workers", "0", "--workers 0 --epochs 1"),
        ("--input -", "input", "file", "--input file"),
        ("-b 64", "b", "32", "-b 32"),
        ("", "b", "32", "-b 32"),
        ("", "model.width", "32", "--model.width 32"),
        ("model.width=1", "model.width", "32", "model.width=32"),
        ("++model.width=1", "model.width", "32", "++model.width=32"),
        ("modelXwidth=1", "+model.width", "32", "modelXwidth=1 model.width=32"),
        ("--workers-max 4", "workers", "0", "--workers-max 4 --workers 0"),
        ("--amp on --x", "amp", "off", "--amp off --x"),
        ("--amp=on --x", "amp", "off", "--amp=off --x"),
        ("amp=on", "amp", "off", "amp=off"),
        ("--compile", "compile", "max", "--compile max"),
        ("", "+amp", "off", "amp=off"),
        ("", "amp", "off", ""),
        ("fit -- --workers 4", "workers", "0", "fit --workers 0 -- --workers 4"),
    ],
)
def test_by_hand(line: str, name: str, value: str, wanted: str) -> None:
    assert with_options(line.split(), {name: value}) == tuple(wanted.split())
