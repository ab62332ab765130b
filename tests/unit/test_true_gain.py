"""The true gain of a change, as the benchmark of `gpurun improve` has it."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from benchmarks.verdicts.improve import CELLS, drawn, section
from benchmarks.verdicts.true_gain import LEAST_TURNS, MOST_TURNS, TrueGain, gain_of, in_turns


def test_it_is_the_mean_ratio_of_the_sides_of_each_turn() -> None:
    found = gain_of([10.0, 20.0, 30.0], [8.0, 16.0, 24.0])
    assert (found.percent, found.error, found.turns) == (pytest.approx(-20.0), pytest.approx(0.0), 3)
    assert gain_of([10.0, 10.0], [9.0, 10.0]).error == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(
    ("ci", "is_outside"),
    [((-25.0, -15.0), False), ((-40.0, -23.0), True), ((-40.0, -22.0), False), ((-17.0, -10.0), True)],
)
def test_it_contradicts_an_interval_beyond_its_own_error(ci: tuple[float, float], is_outside: bool) -> None:
    """With ten turns, 2.26 standard errors."""
    assert TrueGain(-20.0, 1.0, 10).contradicts(ci) == is_outside


@pytest.mark.parametrize(
    ("run_s", "turns"), [(0.1, MOST_TURNS), (4.0, 6), (1000.0, LEAST_TURNS)], ids=["fast", "some", "slow"]
)
def test_as_many_turns_as_there_is_time_for(run_s: float, turns: int) -> None:
    """In one the original is first, in the next the change."""
    now_s, order = [0.0], list[str]()

    def side(name: str, ms: Iterator[float]) -> Callable[[], float]:
        def measure() -> float:
            now_s[0] += run_s
            order.append(name)
            return next(ms)

        return measure

    found = in_turns(side("a", count(2.0)), side("b", count(1.0)), 50.0, lambda: now_s[0])
    assert found.turns == turns
    assert "".join(order) == ("abba" * turns)[: 2 * turns]


@pytest.mark.parametrize("cell", CELLS)
def test_programs_that_are_drawn_are_python(cell: str) -> None:
    for number in range(CELLS[cell][1]):
        compile(drawn(cell, number)[1].text, "train.py", "exec")


def test_what_was_recorded_before_true_gains_were_has_none() -> None:
    planted = {"cell": "planted", "kept": ["x"], "found": 1, "planted": 1, "hurting": 0}
    earlier = {**planted, "kind": "slow_dataset"}
    true = {"percent": -20.0, "error": 1.0, "turns": 10}
    now = {**planted, "kind": "unused", "true": true, "is_outside": True}
    text = section([earlier, now])
    assert "| slow dataset | 2m | 1 | 1 | 1 |  |  |" in text
    assert "| unused | 2m | 1 | 1 | 1 | 1 of 1 |  |" in text
    assert "In 1 of 1 searches that kept something" in text


def test_starts_by_torchrun_are_beside_what_was_stated() -> None:
    true = {"percent": -21.0, "error": 0.52, "turns": 10}
    written = {"cell": "written", "kind": "slow_dataset", "gain_percent": -20.0, "ci": [-22.0, -18.04]}
    counts = {"kept": ["x"], "found": 1, "planted": 1, "hurting": 0}
    text = section([{**written, **counts, "true": true, "is_outside": False}])
    assert "| slow dataset | -20.0 % (-22.0 to -18.0) | -21.0 % (standard error 0.5) | yes |" in text
    assert "In 0 of 0 searches" in text
