"""Values of launches, their components, and the verdicts of a family."""

import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.rundir.records import Look
from gpurun.launcher.stats.estimates import (
    Family,
    components,
    hodges_lehmann,
    holm,
    launch_values,
    levels,
    round_effects,
    t_interval,
)
from gpurun.launcher.units import Interval
from tests.known import known

LOGS = st.lists(st.floats(-1, 1), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=9))
def test_two_variants_differ_by_the_centre_of_their_paired_rounds(rounds: list[tuple[float, float]]) -> None:
    values = launch_values(
        {name: dict(enumerate(logs)) for name, logs in zip("ab", zip(*rounds, strict=True), strict=True)}
    )
    expected = known(hodges_lehmann([a - b for a, b in rounds]))
    assert values["a"] - values["b"] == pytest.approx(expected, abs=1e-12)


@given(LOGS)
def test_a_variant_alone_has_the_centre_of_its_rounds(logs: list[float]) -> None:
    assert launch_values({"a": dict(enumerate(logs))})["a"] == hodges_lehmann(logs)


def test_what_slows_a_whole_round_down_cancels() -> None:
    quiet = {"a": [0.0] * 5, "b": [0.1] * 5, "c": [0.3] * 5}
    slow_round = [0.0, 0.0, 0.7, 0.0, 0.0]
    logs = {
        name: {i: x + s for i, (x, s) in enumerate(zip(xs, slow_round, strict=True))}
        for name, xs in quiet.items()
    }
    assert round_effects(logs) == pytest.approx(dict(enumerate(slow_round)))
    assert launch_values(logs) == pytest.approx({"a": 0.0, "b": 0.1, "c": 0.3})


def test_one_slow_block_moves_no_other_variant() -> None:
    logs = {name: dict.fromkeys(range(5), 0.0) for name in "abcd"}
    logs["d"][2] = 2.0
    values = launch_values(logs)
    assert (values["a"], values["b"], values["c"]) == (0.0, 0.0, 0.0)
    assert values["d"] < 0.5


def test_a_variant_without_rounds_has_no_value() -> None:
    assert launch_values({"a": {1: 0.5}, "b": {}}) == {"a": 0.5}


def test_components_are_those_of_the_model() -> None:
    rng = np.random.default_rng(7)
    launches = rng.normal(0, 0.05, (4000, 1)) + rng.normal(0, 0.10, (4000, 5))
    of_launches, of_rounds = components(launches.tolist())
    assert of_launches == pytest.approx(0.05, rel=0.06)
    assert of_rounds == pytest.approx(0.10, rel=0.02)


def test_rounds_that_scatter_alone_make_launches_scatter_by_nothing() -> None:
    """Means of 3 rounds at 15 % scatter by 9 %, and yet no launch differs from another."""
    rng = np.random.default_rng(8)
    of_launches, _ = components(rng.normal(0, 0.15, (3000, 3)).tolist())
    assert known(of_launches) < 0.03


def test_components_of_too_little() -> None:
    assert components([]) == (None, None)
    assert components([[0.1, 0.2]])[0] is None
    of_launches, of_rounds = components([[0.1], [0.3]])
    assert (known(of_launches), of_rounds) == (pytest.approx(math.sqrt(0.02)), None)


def family(*rows: list[float], looks: tuple[Look, ...] = ()) -> Family:
    return Family({name: dict(enumerate(row)) for name, row in zip("abcdefgh", rows, strict=False)}, looks)


def test_an_interval_is_of_launches() -> None:
    found = family([0.0] * 6, [0.1, 0.2, 0.15, 0.12, 0.18, 0.14])
    assert found.interval("b", "a") == t_interval([0.1, 0.2, 0.15, 0.12, 0.18, 0.14], 0.05)
    assert family([0.0] * 5, [0.1] * 5).interval("b", "a") is None


def test_launches_after_the_last_look_count_at_the_next() -> None:
    looks = (Look(6, 0.5),)
    found = family([0.0] * 8, [0.1, 0.2, 0.15, 0.12, 0.18, 0.14, 9.0, 9.0], looks=looks)
    assert len(found.differences("b", "a")) == 6
    assert found.interval("b", "a") == t_interval([0.1, 0.2, 0.15, 0.12, 0.18, 0.14], levels(looks)[0])


def test_a_comparison_that_ended_keeps_its_level() -> None:
    looks = (Look(6, 0.3), Look(8, 1.0))
    found = family([0.0] * 8, [0.1, 0.2, 0.15, 0.12, 0.18, 0.14], looks=looks)
    assert found.interval("b", "a") == t_interval([0.1, 0.2, 0.15, 0.12, 0.18, 0.14], levels(looks)[0])


def test_holm_makes_room_for_the_next() -> None:
    """p-values 0.001, 0.02, 0.04, 0.3: the first at α/4, the second not at α/3, so the others neither."""

    def comparison(p: float):  # type: ignore[no-untyped-def]
        def at(alpha: float) -> Interval:
            return (0.1, alpha) if p <= alpha else (-0.1, alpha)

        return at

    found = holm({str(p): comparison(p) for p in (0.3, 0.001, 0.04, 0.02)})
    assert list(found) == ["0.3", "0.001", "0.04", "0.02"]
    assert known(found["0.001"]) == (0.1, 0.05 / 4)
    assert known(found["0.02"])[1] == pytest.approx(0.05 / 3)
    all_found = holm({str(p): comparison(p) for p in (0.001, 0.012, 0.02, 0.05)})
    assert all(known(ci)[0] > 0 for ci in all_found.values())
    assert holm({"a": lambda alpha: None}) == {"a": None}


@given(st.lists(st.floats(0.0001, 1), min_size=1, max_size=8))
def test_holm_establishes_what_its_definition_does(p_values: list[float]) -> None:
    def comparison(p: float):  # type: ignore[no-untyped-def]
        return lambda alpha: (0.1, 0.2) if p <= alpha else (-0.1, 0.2)

    found = holm({str(i): comparison(p) for i, p in enumerate(p_values)})
    ordered = sorted(p_values)
    rejected = 0
    while rejected < len(ordered) and ordered[rejected] <= 0.05 / (len(ordered) - rejected):
        rejected += 1
    assert sum(known(ci)[0] > 0 for ci in found.values()) == rejected


@given(st.lists(st.lists(st.floats(-1, 1), min_size=6, max_size=6), min_size=3, max_size=3))
def test_differences_add_up(rows: list[list[float]]) -> None:
    found = family(*rows)
    a_c = fmean(found.differences("a", "c"))
    assert a_c == pytest.approx(
        fmean(found.differences("a", "b")) + fmean(found.differences("b", "c")), abs=1e-12
    )
