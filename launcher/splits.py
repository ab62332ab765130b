"""How a batch is cut into one part per device. All sizes are in samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gpurun.launcher.errors import SpecError
from gpurun.launcher.units import plural

BALANCED = "balanced"
"""The split whose devices are measured before it is chosen."""


@dataclass(frozen=True)
class Split:
    """Samples per device, with the job's own word for it: `even`, `48/16`, `3:1`, `balanced`."""

    name: str
    samples: tuple[int, ...]
    """Empty for `balanced`: that is known only once the devices have been measured."""


def resolve_split(split: str | tuple[int, ...], global_batch: int, num_devices: int) -> Split:
    """The samples that a split of the job file means for this batch and this many devices.

    Fewer parts than devices come out only for `even`, whose chunks may run out early.

    Raises:
        SpecError: the split does not fit; the message says why.
    """
    if isinstance(split, tuple):
        return Split("/".join(map(str, split)), check_samples(split, global_batch, num_devices))
    if split == "even":
        return Split(split, split_even(global_batch, num_devices))
    if split == BALANCED:
        _check_positive(global_batch, num_devices)
        return Split(split, (global_batch,) if num_devices == 1 else ())
    return Split(split, split_ratio(split, global_batch, num_devices))


def parts_of(split: str | tuple[int, ...]) -> int | None:
    """The number of devices that a split of the job file is for; `None` for `even` and `balanced`."""
    if isinstance(split, tuple):
        return len(split)
    return None if split in ("even", BALANCED) else split.count(":") + 1


def is_same_split(
    first: str | tuple[int, ...], second: str | tuple[int, ...], global_batches: Sequence[int]
) -> bool:
    """Whether two splits of the job file come to the same samples for one of the batches."""
    num_devices = parts_of(first) or parts_of(second)
    if first == second or num_devices is None:
        return first == second
    cuts = (_samples_if_any(first, batch, num_devices) for batch in global_batches)
    return any(cut is not None and comes_to(second, cut) for cut in cuts)


def comes_to(split: str | tuple[int, ...], samples: tuple[int, ...]) -> bool:
    """Whether a split of the job file means these samples, one number for each device that has any.

    `even` cuts the same chunks for the devices that get one as it does for more devices.
    """
    return _samples_if_any(split, sum(samples), len(samples)) == samples


def _samples_if_any(
    split: str | tuple[int, ...], global_batch: int, num_devices: int
) -> tuple[int, ...] | None:
    try:
        return resolve_split(split, global_batch, num_devices).samples
    except SpecError:
        return None


def split_even(global_batch: int, num_devices: int) -> tuple[int, ...]:
    """Local batch sizes as `torch.chunk` cuts them: 9 over 4 devices gives (3, 3, 3).

    Every chunk has ceil(global_batch / num_devices) samples, the last one what remains, and no chunk is
    empty: there may be fewer chunks than devices.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.chunk.html
    """
    _check_positive(global_batch, num_devices)
    size = -(-global_batch // num_devices)
    whole, rest = divmod(global_batch, size)
    return (size,) * whole + ((rest,) if rest else ())


def split_ratio(ratio: str, global_batch: int, num_devices: int) -> tuple[int, ...]:
    """Local batch sizes in the ratio `a:b:…`, rounded by the method of largest remainders.

    Each device gets the whole part of its quota; what is left goes, sample by sample, to the largest
    fractions, of equal ones to the earlier device.

    Raises:
        SpecError: the ratio is for another number of devices, or leaves one without a sample.
    Source: https://en.wikipedia.org/wiki/Quota_method#Largest_remainder_method
    """
    _check_positive(global_batch, num_devices)
    weights = [int(part) for part in ratio.split(":")]
    _check_parts(ratio, weights, num_devices)
    samples = split_proportional(global_batch, weights)
    if min(samples) == 0:
        of_batch = _no_samples(f"{ratio} of {plural(global_batch, 'sample')}")
        raise SpecError(f"{of_batch}; use a larger batch or fewer devices")
    return samples


def split_proportional(batch: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Samples in proportion to positive weights, by largest remainder; a device may get none."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [batch * weight / sum(exact) for weight in exact]
    samples = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda device: (samples[device] - quotas[device], device))
    for device in by_remainder[: batch - sum(samples)]:
        samples[device] += 1
    return tuple(samples)


def split_near_even(batch: int, num_devices: int) -> tuple[int, ...]:
    """Samples that differ by 1 at most, the larger parts first; unlike `torch.chunk`'s, for all devices."""
    size, larger = divmod(batch, num_devices)
    return (size + 1,) * larger + (size,) * (num_devices - larger)


def check_samples(samples: tuple[int, ...], global_batch: int, num_devices: int) -> tuple[int, ...]:
    """The samples themselves.

    Raises:
        SpecError: they are for another number of devices, don't add up, or leave a device without a sample.
    """
    _check_positive(global_batch, num_devices)
    _check_parts(list(samples), samples, num_devices)
    if sum(samples) != global_batch:
        raise SpecError(f"the split {list(samples)} adds up to {sum(samples)}, not to {global_batch}")
    return samples


def _check_parts(split: object, parts: Sequence[int], num_devices: int) -> None:
    if len(parts) != num_devices:
        raise SpecError(f"the split {split} is for {plural(len(parts), 'device')}, not for {num_devices}")
    if min(parts) < 1:
        raise SpecError(f"{_no_samples(split)}; use fewer devices instead")


def _no_samples(split: object) -> str:
    return f"the split {split} gives a device no samples"


def _check_positive(global_batch: int, num_devices: int) -> None:
    if global_batch < 1 or num_devices < 1:
        raise SpecError(f"{global_batch} samples can't be split over {plural(num_devices, 'device')}")
