"""Which calls of which optimizers end a step, and which steps of a long program are kept."""

import gc
import random
from statistics import fmean, median, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.figures.recorded import round_blocks_ns
from gpurun.launcher.rundir.files import RoundSample
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.stats.schedule import WINDOW_STEPS
from gpurun.launcher.worker.program.step_rules import TAKEOVER_CALLS, KeptSteps, StepBoundary


class Optimizer:
    """In place of one of torch's; the rules never look into it."""


def test_every_call_of_a_lone_optimizer_ends_a_step() -> None:
    pace, lone = StepBoundary(), Optimizer()
    assert [pace.call(lone) for _ in range(3)] == ["restart", "end", "end"]


def test_of_several_the_last_ends_the_step() -> None:
    pace, first, second = StepBoundary(), Optimizer(), Optimizer()
    calls = [pace.call(site) for _ in range(3) for site in (first, second)]
    assert calls == ["restart", "restart", "inside", "end", "inside", "end"]


def test_a_critic_that_steps_five_times_for_the_generators_once_makes_one_step() -> None:
    pace, critic, generator = StepBoundary(), Optimizer(), Optimizer()
    turn = [critic] * 5 + [generator]
    for site in turn:
        pace.call(site)
    assert [pace.call(site) for site in turn] == ["inside"] * 5 + ["end"]


def test_an_optimizer_per_parameter_makes_one_step_per_backward() -> None:
    pace, many = StepBoundary(), [Optimizer() for _ in range(50)]
    for site in many:
        pace.call(site)
    assert [pace.call(site) for site in many].count("end") == 1


def test_an_optimizer_that_is_gone_hands_the_pace_to_the_next() -> None:
    pace, first, second = StepBoundary(), Optimizer(), Optimizer()
    pace.call(first)
    pace.call(second)
    del second
    gc.collect()
    assert [pace.call(first) for _ in range(3)] == ["restart", "end", "end"]


def test_an_optimizer_that_no_longer_steps_loses_the_pace() -> None:
    pace, first, second = StepBoundary(), Optimizer(), Optimizer()
    pace.call(first)
    pace.call(second)
    calls = [pace.call(first) for _ in range(TAKEOVER_CALLS + 2)]
    assert calls == ["inside"] * TAKEOVER_CALLS + ["restart", "end"]
    assert pace.call(second) == "inside"


def written(steps: list[StepRecord], most: int, at_once: int) -> list[StepRecord]:
    """The file of a rank that writes so many steps at once."""
    kept = KeptSteps("01")
    lines: list[StepRecord] = []
    kept.sample.most = most
    for begin in range(0, len(steps), at_once):
        new = kept.add(steps[begin : begin + at_once])
        lines = [*(line for line in lines if kept.has(line)), *new]
    return lines + kept.rest()


@given(st.integers(1, 800), st.integers(1, 40), st.integers(1, 300), st.integers(1, 300))
def test_ranks_keep_the_same_rounds_however_often_they_write(
    num_steps: int, most: int, portion: int, other: int
) -> None:
    """The rounds that are kept have the times that they would have if all steps were."""
    steps = [StepRecord("01", n // WINDOW_STEPS + 1, 0, n, "timed", n * n, {}, n) for n in range(num_steps)]
    lines = written(steps, most, portion)
    assert lines == written(steps, most, other)
    assert lines == steps or len(lines) <= most * WINDOW_STEPS + WINDOW_STEPS
    assert lines[-1].step == num_steps - 1
    assert len({line.step for line in lines}) == len(lines)
    kept, everything = round_blocks_ns(lines, "timed"), round_blocks_ns(steps, "timed")
    last_round = everything.popitem()[0]
    times = {key: fmean(block) for key, block in kept.items() if key != last_round}
    assert times == {key: fmean(everything[key]) for key in times}
    assert max(line.peak_bytes or 0 for line in lines) == num_steps - 1


@pytest.mark.parametrize("period", [16, 200, 1024])
def test_a_sample_has_the_median_and_the_mean_of_all_rounds(period: int) -> None:
    """Rounds drift, scatter by 10 %, and an evaluation makes every so many rounds ten times as long."""
    chance, sample = random.Random(period), RoundSample("01", most=400)
    rounds_ms = [
        (10 + number / 10_000) * chance.gauss(1, 0.1) * (1 if number % period else 10)
        for number in range(20_000)
    ]
    for number in range(len(rounds_ms)):
        sample.add(number)
    kept_ms = [ms for number, ms in enumerate(rounds_ms) if sample.keeps(number)]
    assert 100 <= len(kept_ms) <= 400
    assert abs(fmean(kept_ms) - fmean(rounds_ms)) <= 3 * stdev(rounds_ms) / len(kept_ms) ** 0.5
    middle_ms = median(rounds_ms)
    below = sum(ms < middle_ms for ms in kept_ms)
    assert abs(below - len(kept_ms) / 2) <= 3 * len(kept_ms) ** 0.5 / 2
