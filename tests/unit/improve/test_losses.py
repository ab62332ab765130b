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


def test_one_launch_that_trains_otherwise_is_enough() -> None:
    assert sameness([RUN], [RUN, changed(0.1)]) == "different"


@given(st.lists(FLOATS, min_size=1, max_size=9), st.lists(FLOATS, min_size=1, max_size=9))
def test_what_is_bitwise_the_same_has_the_same_losses(one: list[float], other: list[float]) -> None:
    num = min(len(one), len(other))
    assert (sameness([one], [other]) == "bitwise") == (one[:num] == other[:num])
