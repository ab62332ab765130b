"""Splits: sums, torch.chunk's rule, quotas, and what is refused."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpurun.launcher.errors import SpecError
from gpurun.launcher.splits import (
    Split,
    check_samples,
    comes_to,
    is_same_split,
    resolve_split,
    split_even,
    split_ratio,
)
from tests.wording import Wording

batches = st.integers(1, 5000)
counts = st.integers(1, 16)
weights = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


def chunks_of(global_batch: int, num_devices: int) -> tuple[int, ...]:
    """What torch.chunk does, by cutting a real list."""
    rows = list(range(global_batch))
    size = -(-global_batch // num_devices)
    return tuple(len(rows[start : start + size]) for start in range(0, global_batch, size))


@given(batches, counts)
def test_even_cuts_as_torch_chunk(global_batch: int, num_devices: int) -> None:
    assert split_even(global_batch, num_devices) == chunks_of(global_batch, num_devices)


@pytest.mark.parametrize(
    ("global_batch", "num_devices", "samples"),
    [(50, 2, (25, 25)), (9, 4, (3, 3, 3)), (1, 4, (1,)), (10, 4, (3, 3, 3, 1)), (4, 4, (1, 1, 1, 1))],
)
def test_even_by_hand(global_batch: int, num_devices: int, samples: tuple[int, ...]) -> None:
    assert split_even(global_batch, num_devices) == samples


@given(batches, weights)
def test_ratio_stays_within_one_sample_of_its_quota(global_batch: int, parts: list[int]) -> None:
    try:
        samples = split_ratio(":".join(map(str, parts)), global_batch, len(parts))
    except SpecError:
        assume(False)
    assert sum(samples) == global_batch
    for got, weight in zip(samples, parts, strict=True):
        assert abs(got - Fraction(global_batch * weight, sum(parts))) < 1
        assert got >= 1


@given(batches, weights)
def test_a_larger_weight_never_gets_less(global_batch: int, parts: list[int]) -> None:
    try:
        samples = split_ratio(":".join(map(str, parts)), global_batch, len(parts))
    except SpecError:
        assume(False)
    ranked = sorted(zip(parts, samples, strict=True))
    assert all(low[1] <= high[1] for low, high in pairwise(ranked) if low[0] < high[0])


@given(batches, weights)
def test_ratio_refuses_only_what_leaves_a_device_empty(global_batch: int, parts: list[int]) -> None:
    ratio = ":".join(map(str, parts))
    if min(Fraction(global_batch * weight, sum(parts)) for weight in parts) >= 1:
        assert len(split_ratio(ratio, global_batch, len(parts))) == len(parts)
    elif global_batch < len(parts):
        with pytest.raises(SpecError, match="no samples"):
            split_ratio(ratio, global_batch, len(parts))


@pytest.mark.parametrize(
    ("ratio", "global_batch", "samples"),
    [
        ("3:1", 64, (48, 16)),
        ("1:1", 9, (5, 4)),  # equal remainders: the earlier device
        ("1:1:1", 8, (3, 3, 2)),
        ("5:3:1", 7, (4, 2, 1)),  # quotas 3.89, 2.33, 0.78
    ],
)
def test_ratio_by_hand(ratio: str, global_batch: int, samples: tuple[int, ...]) -> None:
    assert split_ratio(ratio, global_batch, len(samples)) == samples


@given(st.lists(st.integers(1, 99), min_size=1, max_size=8))
def test_samples_that_add_up_are_taken_as_they_are(samples: list[int]) -> None:
    assert check_samples(tuple(samples), sum(samples), len(samples)) == tuple(samples)


@pytest.mark.parametrize(
    ("split", "global_batch", "num_devices"),
    [
        ((48, 15), 64, 2),
        ((48, 16), 64, 3),
        ((64, 0), 64, 2),
        ((-1, 65), 64, 2),
        ("3:1", 64, 1),
        ("3:0", 64, 2),
        ("999:1", 64, 2),
        ("even", 0, 2),
        ("even", 4, 0),
    ],
)
def test_what_does_not_fit_says_why(
    split: str | tuple[int, ...], global_batch: int, num_devices: int, wording: Wording
) -> None:
    with wording.raises(SpecError):
        resolve_split(split, global_batch, num_devices)


def test_names_are_the_jobs_own_words() -> None:
    assert resolve_split("even", 64, 2) == Split("even", (32, 32))
    assert resolve_split((48, 16), 64, 2) == Split("48/16", (48, 16))
    assert resolve_split("3:1", 64, 2) == Split("3:1", (48, 16))


@given(st.integers(1, 500), st.integers(1, 40))
def test_even_is_known_by_the_samples_of_those_devices_that_have_some(
    global_batch: int, num_devices: int
) -> None:
    samples = split_even(global_batch, num_devices)
    assert comes_to("even", samples)
    assert comes_to(samples, samples)
    assert is_same_split("even", samples, (1, global_batch))


@pytest.mark.parametrize(
    ("first", "second", "batches", "is_same"),
    [
        ("even", "even", (64,), True),
        ("even", (32, 32), (64,), True),
        ("even", (33, 31), (64,), False),
        ("even", (32, 32), (65,), False),
        ("3:1", (48, 16), (8, 64), True),
        ("3:1", "6:2", (64,), True),
        ("3:1", "1:3", (64,), False),
        ("3:1", "3:1:1", (64,), False),
        ("99:1", "even", (2,), False),
    ],
)
def test_splits_are_the_same_by_their_samples(
    first: str | tuple[int, ...], second: str | tuple[int, ...], batches: tuple[int, ...], is_same: bool
) -> None:
    assert is_same_split(first, second, batches) is is_same
    assert is_same_split(second, first, batches) is is_same
