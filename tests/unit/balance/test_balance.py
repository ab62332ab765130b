"""The solver against brute force, curves against known lines, and the search on devices of glass."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher import balance
from gpurun.launcher.balance import (
    Calibration,
    balance_of,
    cost_ms,
    fit_curve,
    isotonic,
    slowest,
    solve,
    theil_sen,
)
from gpurun.launcher.errors import SpecError
from gpurun.launcher.rundir.records import CostCurve
from gpurun.launcher.splits import split_near_even, split_proportional
from tests.whole import IS_WHOLE, first
from tests.wording import Wording


def water_level(alphas: Sequence[float], betas: Sequence[float], batch: float) -> float:
    """T = (B + Σα/β) / Σ(1/β) over the devices with α < T: when divisible samples are done on all of them."""
    used = sorted(zip(alphas, betas, strict=True))
    level = used[0][0] + used[0][1] * batch
    for count in range(2, len(used) + 1):
        if used[count - 1][0] >= level:
            break
        level = (batch + sum(a / b for a, b in used[:count])) / sum(1 / b for _, b in used[:count])
    return level


def rising_costs(rng: random.Random, num_devices: int, batch: int) -> list[Callable[[int], float]]:
    """Tables with steps, plateaus, and a device that is as fast for any number of samples."""
    tables = []
    for _ in range(num_devices):
        table = [0.0]
        for _ in range(batch):
            table.append(table[-1] + rng.choice([0.0, 0.0, 1.0, rng.random() * 3]))
        tables.append(table)
    return [table.__getitem__ for table in tables]


def best_by_trying(
    costs: Sequence[Callable[[int], float]], batch: int, minima: Sequence[int], caps: Sequence[int]
) -> float | None:
    choices = product(*(range(least, most + 1) for least, most in zip(minima, caps, strict=True)))
    return min((slowest(costs, split) for split in choices if sum(split) == batch), default=None)


def test_no_split_beats_the_solvers_in_many_cases() -> None:
    rng = random.Random(7)
    for _ in range(3_000 if IS_WHOLE else 500):
        num_devices, batch = rng.randint(1, 3), rng.randint(1, 9)
        costs = rising_costs(rng, num_devices, batch)
        minima = [rng.choice([0, 1]) for _ in range(num_devices)]
        caps = [rng.randint(0, batch) for _ in range(num_devices)]
        best = best_by_trying(costs, batch, minima, caps)
        if best is None:
            with pytest.raises(SpecError):
                solve(costs, batch, minima, caps)
            continue
        split = solve(costs, batch, minima, caps)
        assert sum(split) == batch
        assert all(low <= size <= high for low, size, high in zip(minima, split, caps, strict=True))
        assert slowest(costs, split) == best


@given(
    lines=st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), min_size=2, max_size=16),
    batch=st.integers(16, 100_000),
)
def test_straight_devices_finish_within_a_sample_of_the_water_level(
    lines: list[tuple[float, float]], batch: int
) -> None:
    costs = [lambda n, a=a, b=b: a + b * n if n else 0.0 for a, b in lines]
    split = solve(costs, batch, [0] * len(lines), [batch] * len(lines))
    level = water_level([a for a, _ in lines], [b for _, b in lines], batch)
    assert level * (1 - 1e-9) <= slowest(costs, split) <= level + max(b for _, b in lines) + 1e-9


def test_of_equally_fast_splits_the_one_near_even_is_taken() -> None:
    flat = [lambda n: 5.0, lambda n: 3.0]
    assert solve(flat, 32, [1, 1], [32, 32]) == (16, 16)
    assert solve(flat, 32, [1, 1], [32, 13]) == (19, 13)
    stairs = [lambda n: 10.0 * math.ceil(n / 16), lambda n: 10.0 * math.ceil(n / 16)]
    assert solve(stairs, 24, [1, 1], [24, 24]) == (12, 12)
    assert solve([*flat, lambda n: 1.0 * n], 99, [0] * 3, [99] * 3) == (47, 47, 5)
    # Samples that cost something stay where they cost less, also where a third device is the slowest.
    lines = [lambda n: 1.0 * n, lambda n: 1.1 * n, lambda n: 60.0]
    assert solve(lines, 90, [0, 0, 1], [90, 90, 1])[:2] == (47, 42)


def test_the_water_level_leaves_out_a_device_that_would_only_start() -> None:
    assert water_level([0, 100], [1, 1], 10) == 10
    assert water_level([3.3, 25.5], [1, 2.5], 64) == pytest.approx((64 + 3.3 + 10.2) / 1.4)


@pytest.mark.parametrize(
    ("batch", "minima", "caps"), [(3, [1] * 4, [9] * 4), (9, [1, 1], [4, 4]), (9, [1, 1], [0, 9])]
)
def test_what_can_not_be_split_is_reported(
    batch: int, minima: list[int], caps: list[int], wording: Wording
) -> None:
    with wording.raises(SpecError):
        solve([float] * len(caps), batch, minima, caps)


def test_a_line_is_found_under_outliers_with_intervals_that_hold_it() -> None:
    rng = random.Random(1)
    times = {b: [5 + 0.5 * b + rng.gauss(0, 0.05) for _ in range(7)] for b in (8, 16, 24, 32)}
    times[16][3] = times[32][0] = 90.0  # a hiccup
    curve = fit_curve(times, cap=None)
    assert curve.straight
    assert (curve.alpha_ms, curve.beta_ms) == (pytest.approx(5, abs=0.2), pytest.approx(0.5, abs=0.01))
    assert curve.alpha_ci is not None
    assert curve.alpha_ci[0] <= 5 <= curve.alpha_ci[1]
    assert curve.beta_ci is not None
    assert curve.beta_ci[0] <= 0.5 <= curve.beta_ci[1]


def test_a_staircase_goes_through_its_points_and_never_falls() -> None:
    times = {b: [math.ceil(b / 8) * 10.0] * 7 for b in (4, 8, 9, 16, 17, 24)}
    curve = fit_curve(times, cap=None)
    assert not curve.straight
    assert [cost_ms(curve, b) for b in (4, 8, 9, 16, 17, 24)] == [10, 10, 20, 20, 30, 30]
    costs = [cost_ms(curve, b) for b in range(40)]
    assert costs == sorted(costs)
    assert costs[0] == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_isotonic_rises_keeps_the_sum_and_leaves_what_rises_alone(values: list[float]) -> None:
    found = isotonic(values)
    assert all(a <= b + 1e-9 * max(1, b) for a, b in pairwise(found))
    assert math.fsum(found) == pytest.approx(math.fsum(values))
    assert isotonic(sorted(values)) == sorted(values)


def test_theil_sen_never_falls() -> None:
    assert theil_sen({1: 5.0, 2: 4.0, 3: 3.0})[1] == 0
    assert theil_sen({4: 7.0}) == (7.0, 0.0)


class GlassDevices:
    """α + β·b milliseconds each, with noise; a device with memory for `memory[i]` samples."""

    def __init__(
        self, lines: Sequence[tuple[float, float]], memory: Sequence[int] = (), noise: float = 0.003
    ) -> None:
        self.lines, self.memory, self.noise = lines, memory or (1 << 40,) * len(lines), noise
        self.rng = random.Random(3)
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, split: tuple[int, ...], num_steps: int) -> list[float]:
        self.asked.append(split)
        return [
            math.inf if size > room else (a + b * size) * (1 + abs(self.rng.gauss(0, self.noise)))
            for size, room, (a, b) in zip(split, self.memory, self.lines, strict=True)
        ]


def search(
    devices: GlassDevices, batch: int, minimum: int = 1, most: int = 1 << 40
) -> tuple[tuple[CostCurve, ...], tuple[int, ...]]:
    caps = (1 << 31,) * len(devices.lines)
    return Calibration(devices, batch, minimum, caps, most, "seed").run()


@pytest.mark.parametrize("num_devices", first(2, [2, 8, 3, 16]))
def test_the_search_comes_within_3_percent_of_the_optimum(num_devices: int) -> None:
    rng = random.Random(num_devices)
    for _ in range(20):
        lines = [(rng.uniform(0, 30), rng.uniform(0.2, 5)) for _ in range(num_devices)]
        batch = rng.randint(64 * num_devices, 2048)
        costs = [lambda n, a=a, b=b: a + b * n for a, b in lines]
        best = slowest(costs, solve(costs, batch, [1] * num_devices, [batch] * num_devices))
        curves, split = search(GlassDevices(lines), batch)
        assert sum(split) == batch
        assert slowest(costs, split) <= 1.03 * best
        assert all(len(curve.points) >= 4 for curve in curves)


class KinkedDevices(GlassDevices):
    """Any costs in place of lines."""

    def __init__(self, *costs: Callable[[int], float]) -> None:
        super().__init__([(0, 0)] * len(costs))
        self.costs = costs

    def __call__(self, split: tuple[int, ...], num_steps: int) -> list[float]:
        noise = super().__call__(split, num_steps)
        assert noise == [0.0] * len(split)
        return [
            cost(size) * (1 + abs(self.rng.gauss(0, self.noise)))
            for cost, size in zip(self.costs, split, strict=True)
        ]


def tiled(size: int) -> float:
    return 5.0 + math.ceil(size / 16) * 16


def with_a_cliff(size: int) -> float:
    return 5.0 + size + (15 if size > 20 else 0)


def test_where_curves_are_kinked_the_split_itself_is_measured_and_found_again() -> None:
    devices = KinkedDevices(with_a_cliff, tiled)
    curves, split = search(devices, 52)
    assert split == (20, 32)
    assert split in devices.asked
    assert not any(curve.straight for curve in curves)
    assert [dict(curve.points)[size] for curve, size in zip(curves, split, strict=True)] == [
        pytest.approx(25, rel=0.02),
        pytest.approx(37, rel=0.02),
    ]


@pytest.mark.parametrize("num_devices", first(2, [2, 4, 8]))
def test_of_kinked_devices_a_split_that_was_measured_is_taken_after_few_steps(num_devices: int) -> None:
    rng = random.Random(num_devices)
    for _ in range(10):
        drawn = [
            (rng.uniform(1, 30), rng.uniform(0.3, 3), rng.choice([4, 8, 16])) for _ in range(num_devices)
        ]
        costs = [lambda n, a=a, b=b, tile=tile: a + b * tile * math.ceil(n / tile) for a, b, tile in drawn]
        batch = rng.randint(24 * num_devices, 96 * num_devices)
        devices = KinkedDevices(*costs)
        split = search(devices, batch)[1]
        assert sum(split) == batch
        assert len(devices.asked) < 200
        best = slowest(costs, solve(costs, batch, [1] * num_devices, [batch] * num_devices))
        assert slowest(costs, split) <= 1.15 * best


def test_straight_curves_are_measured_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, others = GlassDevices([(3.3, 1), (25.5, 2.5)]), GlassDevices([(3.3, 1), (25.5, 2.5)])
    search(devices, 64)
    monkeypatch.setattr(balance, "MAX_REFINEMENTS", 0)
    search(others, 64)
    assert devices.asked == others.asked


def test_a_little_less_than_nothing_per_step_is_noise() -> None:
    rng = random.Random(5)
    times = {b: [b * 0.1 + rng.gauss(0, 0.3) - 0.02 for _ in range(7)] for b in (40, 60, 80, 100)}
    assert theil_sen({b: median(values) for b, values in times.items()})[0] < 0
    curve = fit_curve(times, cap=None)
    assert (curve.alpha_ms, curve.beta_ms) == (0, pytest.approx(0.1, rel=0.05))
    assert curve.alpha_ci is not None
    assert curve.alpha_ci[0] == 0
    # What no noise explains is left as it is: a curve that bends upwards.
    bent = fit_curve({b: [b * 1.0 - 9] * 7 for b in (40, 60, 80, 100)}, cap=None)
    assert bent.alpha_ms == pytest.approx(-9)


def test_equal_alphas_are_what_makes_proportional_to_speed_best() -> None:
    curves, split = search(GlassDevices([(3.3, 1), (25.5, 2.5)], noise=0), 64)
    found = balance_of(curves, split, overhead_ms=0.5)
    assert found.best.split == (52, 12)
    assert found.best.compute_ms == pytest.approx(55.5)
    assert found.predicted_ms == pytest.approx(56)
    assert found.even is not None
    assert found.even.compute_ms == pytest.approx(105.5)
    assert found.proportional is not None
    assert found.proportional.split == (46, 18)
    assert found.proportional.compute_ms == pytest.approx(70.5)


def test_even_is_the_jobs_own_even_which_may_leave_a_device_out() -> None:
    curves, split = search(GlassDevices([(1, 1)] * 4, noise=0), 101)
    found = balance_of(curves, split, overhead_ms=0)
    assert found.even is not None
    assert (found.even.split, found.even.compute_ms) == ((26, 26, 26, 23), pytest.approx(27))
    few = balance_of(curves, (3, 2, 2, 2), overhead_ms=0)
    assert few.even is not None
    assert few.even.split == (3, 3, 3)


def test_a_device_with_little_memory_gets_what_it_holds() -> None:
    curves, split = search(GlassDevices([(0, 1), (0, 2.5)], memory=(20, 1000)), 64)
    assert split == (20, 44)
    assert (curves[0].max_samples, curves[1].max_samples) == (20, None)


def test_the_room_that_max_found_bounds_every_split_that_is_shown() -> None:
    devices = GlassDevices([(0, 1), (0, 1)], noise=0)
    curves, split = Calibration(devices, 123, 1, (95, 28), 1 << 40, "seed").run()
    assert split == (95, 28)
    assert [curve.max_samples for curve in curves] == [95, 28]
    found = balance_of(curves, split, overhead_ms=0)
    assert (found.even, found.proportional) == (None, None)
    # A device that holds the whole batch, or less than was hoped for:
    curves, split = Calibration(GlassDevices([(0, 1)] * 2, (99, 20)), 64, 1, (95, 28), 99, "seed").run()
    assert ([curve.max_samples for curve in curves], split) == ([None, 20], (44, 20))


def test_a_batch_that_no_memory_holds_or_a_model_that_never_fits_is_reported(wording: Wording) -> None:
    with pytest.raises(MemoryError, match="not 64"):
        search(GlassDevices([(0, 1), (0, 1)], memory=(20, 20)), 64)
    with wording.raises(MemoryError):
        search(GlassDevices([(0, 1), (0, 1)], memory=(20, 0)), 64)


def test_a_device_that_only_starts_is_left_out_if_it_may() -> None:
    devices = [(1.0, 1.0), (500.0, 1.0)]
    assert search(GlassDevices(devices), 64, minimum=0)[1] == (64, 0)
    assert search(GlassDevices(devices), 64)[1] == (63, 1)


def test_a_small_dataset_is_never_asked_for_more_than_it_has() -> None:
    devices = GlassDevices([(1, 1), (1, 2)])
    search(devices, 32, most=32)
    assert max(map(sum, devices.asked)) <= 32


@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=16))
def test_shares_add_up(batch: int, weights: list[float]) -> None:
    shares = split_proportional(batch, weights)
    assert sum(shares) == batch
    assert all(
        abs(share - batch * w / math.fsum(weights)) < 1 + 1e-6
        for share, w in zip(shares, weights, strict=True)
    )
    even = split_near_even(batch, len(weights))
    assert (sum(even), max(even) - min(even) <= 1) == (batch, True)
