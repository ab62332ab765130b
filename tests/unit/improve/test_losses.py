"""Whether a change trains the same, by its losses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.improve.trials import differ, sameness

RUN = (2.30, 2.11, 1.97, 1.85, 1.80, 1.77)
FLOATS = st.floats(0.01, 100.0)


def changed(by: float, step: int = 0) -> tuple[float, ...]:
    return tuple(loss * (1 + by) if number == step else loss for number, loss in enumerate(RUN))


@pytest.mark.parametrize(
    ("other", "dtype", "expected"),
    [
        (RUN, "float32", "bitwise"),
        (RUN[:3], "float32", "bitwise"),  # a launch that ended earlier
        (changed(5e-6), "float32", "rounding"),
        (changed(2e-5), "float32", "different"),
        (changed(2e-5), "bfloat16", "rounding"),
        (changed(2e-2), "bfloat16", "different"),
        (changed(0.05, step=2), "bfloat16", "rounding"),
        (changed(0.2, step=2), "bfloat16", "different"),
        (changed(1e-4, step=2), "float32", "rounding"),
        (changed(1e-2, step=1), "float32", "different"),  # the same loss, another gradient
        ((None, *RUN[1:]), "float32", "unknown"),
        ((), "float32", "unknown"),
        ((RUN[0], None, *RUN[2:]), "float32", "different"),
        (tuple(reversed(RUN)), "float32", "different"),
    ],
)
def test_losses_say_whether_the_training_is_the_same(
    other: tuple[float | None, ...], dtype: str, expected: str
) -> None:
    assert sameness([RUN, RUN], [other], dtype) == expected


def test_where_the_original_differs_from_run_to_run_bits_say_nothing() -> None:
    runs = [RUN, changed(1e-3)]
    assert differ(runs)
    assert not differ([RUN, RUN[:2]])
    assert sameness(runs, [changed(1.5e-3)]) == "rounding"
    assert sameness(runs, [changed(1e-2)]) == "different"


LONG = tuple(2.0 / (1 + number / 20) for number in range(60))


def grown(by: float, factor: float) -> tuple[float, ...]:
    """Losses whose relative difference grows by a factor from step to step."""
    return tuple(loss * (1 + by * factor**number) for number, loss in enumerate(LONG))


CHAOTIC = tuple(
    loss * (1 + min(0.5, 1e-7 * 2.5**number * (6.0 if number % 4 == 3 else 1.0)))
    for number, loss in enumerate(LONG)
)
"""Steps are now and then 15 times as far apart as any before: ImageNet's recipe of torchvision, compiled."""


@pytest.mark.parametrize(
    ("other", "rounds", "expected"),
    [
        (grown(1e-7, 1.0), True, "rounding"),
        (grown(1e-7, 1.2), True, "rounding"),  # 0.5 % in the end
        (grown(1e-7, 1.3), True, "rounding"),  # as far apart as they can be, and nothing began it
        (grown(1e-7, 3.0), True, "rounding"),  # a large learning rate: 1 % after ten steps
        (CHAOTIC, True, "rounding"),
        (grown(1e-9, 50.0), True, "different"),
        (grown(1e-7, 1.0), False, "different"),
        (LONG[:41] + tuple(loss * 1.023 for loss in LONG[41:]), True, "different"),
        (LONG[:41] + tuple(loss * 1.023 for loss in LONG[41:]), False, "different"),
        (LONG[:41], False, "bitwise"),
        ((*LONG[:41], None, *LONG[42:]), True, "different"),
    ],
)
def test_all_steps_count_and_rounding_grows_from_step_to_step(
    other: tuple[float | None, ...], rounds: bool, expected: str
) -> None:
    """The first launches are short."""
    assert sameness([LONG[:15], LONG], [other], rounds=rounds) == expected


def test_rounding_of_a_loss_that_is_next_to_nothing_is_no_difference() -> None:
    small = (*LONG[:10], 1e-9, 2e-12)
    assert sameness([small], [(*LONG[:10], 2e-9, 1e-12)]) == "rounding"
    assert sameness([small], [(*LONG[:10], 1e-2, 2e-12)]) == "different"


def test_what_does_not_round_may_differ_only_where_the_original_does() -> None:
    assert sameness([RUN, RUN], [changed(1e-6)], rounds=False) == "different"
    assert sameness([RUN, changed(1e-6)], [changed(-1e-6)], rounds=False) == "rounding"


@pytest.mark.parametrize(
    ("num", "expected"), [(1, "unknown"), (29, "unknown"), (30, "bitwise"), (60, "bitwise")]
)
def test_losses_that_mostly_are_no_finite_numbers_show_nothing(num: int, expected: str) -> None:
    """The last ones of a launch on a GPU may not be computed yet."""
    run = (*LONG[:num], *[None] * (60 - num))
    assert sameness([run, run], [run]) == expected


def test_one_launch_that_trains_otherwise_is_enough() -> None:
    assert sameness([RUN], [RUN, changed(0.1)]) == "different"


@given(st.lists(FLOATS, min_size=1, max_size=9), st.lists(FLOATS, min_size=1, max_size=9))
def test_what_is_bitwise_the_same_has_the_same_losses(some: list[float], other: list[float]) -> None:
    num = min(len(some), len(other))
    assert (sameness([some], [other]) == "bitwise") == (some[:num] == other[:num])
