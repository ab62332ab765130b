"""The interface between gpurun and a micro-benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Unit = Literal["bytes", "rows"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Site:
    """Where a micro-benchmark runs: what one rank sees."""

    devices: "tuple[torch.device, ...]"
    """Of this process; one, unless it owns several."""
    names: tuple[str, ...]
    """What the job calls them: `cuda:1`, where this process sees no other and calls it `cuda:0`."""
    world_size: int
    dtype: "torch.dtype"
    """What the job's precision computes in."""

    @property
    def device(self) -> "torch.device":
        return self.devices[0]


@dataclass(frozen=True)
class Case:
    """One point of a curve."""

    series: str
    """The curve's name."""
    size: int
    """Its place on the curve, in the benchmark's unit."""
    run: Callable[[], object]
    """One repetition. On a GPU it may return before its work is done: a block of them is waited for."""
    nbytes: int | None = None
    """Bytes that a repetition moves."""
    flops: int | None = None
    """Floating-point operations of a repetition; a multiply-add is two."""
    bus_factor: float | None = None
    """Bytes that cross the busiest link, as a share of `nbytes`."""


@dataclass(frozen=True)
class Cases:
    """What can be measured at a site."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()
    """What could not be measured there, and why."""


@dataclass(frozen=True)
class Probe:
    """A micro-benchmark."""

    unit: Unit
    cases: Callable[[Site], Cases]
    """What to measure; all ranks must get cases of the same sizes in the same order."""


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """`first`, `first`·`factor`, … up to `last`, which is always the end."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)
