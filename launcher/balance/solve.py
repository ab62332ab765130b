"""The exact split with the shortest step, for any monotonic costs."""

import heapq
from collections.abc import Callable, Sequence
from itertools import permutations

from gpurun.launcher.errors import SpecError
from gpurun.launcher.units import plural

Cost = Callable[[int], float]
"""Time of a number of samples on one device; never less for more samples."""

_HALVINGS = 60
"""Bisections of the interval that holds the best time: more than the precision of a float."""


def solve(costs: Sequence[Cost], batch: int, minima: Sequence[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Samples per device that make the slowest device as fast as it can be, with `batch` samples in all.

    First every device gets the samples that it can process in the longest time that is too short for the
    whole batch. The remaining samples go, one by one, to the device with the smallest new finish time; ties
    go to the earlier device. With non-decreasing costs no other split ends sooner: a device only exceeds the
    best time once no other could stay within it. Among equally fast splits the one nearest to even is taken.

    Args:
        costs: one for each device.
        batch: samples in all.
        minima: the fewest samples of each device.
        caps: the most.

    Raises:
        SpecError: minima and caps leave no such split.
    """
    _check_room(batch, minima, caps)
    samples = _filled(costs, batch, minima, caps)
    finish = [
        (cost(count + 1), device)
        for device, (cost, count) in enumerate(zip(costs, samples, strict=True))
        if count < caps[device]
    ]
    heapq.heapify(finish)
    for _ in range(batch - sum(samples)):
        _, device = heapq.heappop(finish)
        samples[device] += 1
        if samples[device] < caps[device]:
            heapq.heappush(finish, (costs[device](samples[device] + 1), device))
    return _evened(costs, samples, minima, caps)


def slowest(costs: Sequence[Cost], samples: Sequence[int]) -> float:
    """The time of a split: that of its slowest device."""
    return max(cost(count) for cost, count in zip(costs, samples, strict=True))


def _check_room(batch: int, minima: Sequence[int], caps: Sequence[int]) -> None:
    if sum(minima) > batch:
        raise SpecError(
            f"{plural(batch, 'sample')} can't give {plural(len(minima), 'device')} at least "
            f"{' and '.join(str(least) for least in dict.fromkeys(minima))} each"
        )
    for device, (least, most) in enumerate(zip(minima, caps, strict=True)):
        if least > most:
            raise SpecError(f"device {device} can hold {most} samples, but must get {least}")
    if sum(caps) < batch:
        raise SpecError(
            f"the devices can hold {' + '.join(map(str, caps))} = {plural(sum(caps), 'sample')}, not {batch}"
        )


def _filled(costs: Sequence[Cost], batch: int, minima: Sequence[int], caps: Sequence[int]) -> list[int]:
    """At most `batch` samples: what devices can process in the longest time that isn't too long."""
    low, high = 0.0, slowest(costs, [min(batch, cap) for cap in caps])
    samples = list(minima)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        within = [
            _most_within(cost, middle, least, min(batch, most))
            for cost, least, most in zip(costs, minima, caps, strict=True)
        ]
        if sum(within) <= batch:
            low, samples = middle, within
        else:
            high = middle
    return samples


def _evened(
    costs: Sequence[Cost], samples: Sequence[int], minima: Sequence[int], caps: Sequence[int]
) -> tuple[int, ...]:
    """Moves samples to devices that have fewer, as long as the slower of the two gets no slower."""
    evened, devices = list(samples), range(len(samples))
    for _ in devices:
        before = list(evened)
        for giver, taker in permutations(devices, 2):
            have, few = evened[giver], evened[taker]
            most = min(caps[taker], few + min((have - few) // 2, have - minima[giver]))
            if most > few:
                limit = max(costs[giver](have), costs[taker](few))
                moved = _most_within(costs[taker], limit, few, most) - few
                evened[giver], evened[taker] = have - moved, few + moved
        if evened == before:
            break
    return tuple(evened)


def _most_within(cost: Cost, limit: float, least: int, most: int) -> int:
    """The most samples, from `least` to `most`, that take at most `limit`; `least` if none does."""
    while least < most:
        middle = (least + most + 1) // 2
        if cost(middle) <= limit:
            least = middle
        else:
            most = middle - 1
    return least
