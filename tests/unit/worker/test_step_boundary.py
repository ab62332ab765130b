"""Which calls of which optimizers end a step."""

import gc

from gpurun.launcher.worker.program.step_rules import TAKEOVER_CALLS, StepBoundary


class Optimizer:
    """In place of one of torch's; the rules never look into it."""


def test_every_call_of_a_lone_optimizer_ends_a_step() -> None:
    pace, lone = StepBoundary(), Optimizer()
    assert [pace.call(lone) for _ in range(3)] == ["restart", "end", "end"]


def test_of_several_the_last_ends_the_step() -> None:
    pace, first, second = StepBoundary(), Optimizer(), Optimizer()
    calls = [pace.call(one) for _ in range(3) for one in (first, second)]
    assert calls == ["restart", "restart", "inside", "end", "inside", "end"]


def test_a_critic_that_steps_five_times_for_the_generators_once_makes_one_step() -> None:
    pace, critic, generator = StepBoundary(), Optimizer(), Optimizer()
    turn = [critic] * 5 + [generator]
    for one in turn:
        pace.call(one)
    assert [pace.call(one) for one in turn] == ["inside"] * 5 + ["end"]


def test_an_optimizer_per_parameter_makes_one_step_per_backward() -> None:
    pace, many = StepBoundary(), [Optimizer() for _ in range(50)]
    for one in many:
        pace.call(one)
    assert [pace.call(one) for one in many].count("end") == 1


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
