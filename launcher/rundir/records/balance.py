"""What was found out about devices: their cost for `split: balanced`, their room for `global_batch: max`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """What samples cost on one device: its own work in a step, without communication. In milliseconds."""

    alpha_ms: float
    """Of a step, whatever its samples."""
    alpha_ci: tuple[float, float] | None
    beta_ms: float
    """Of each sample."""
    beta_ci: tuple[float, float] | None
    straight: bool
    """Whether α + β·b meets the measured points; else the curve goes through them."""
    points: tuple[tuple[int, float], ...]
    """Samples and their measured time, both rising."""
    cap: int | None
    """The most samples that its memory holds, where the batch has more: found here, or for
    `global_batch: max`."""


@dataclass(frozen=True)
class Prediction:
    """What the curves say of a split."""

    split: tuple[int, ...]
    compute_ms: float
    """Of its slowest device."""


@dataclass(frozen=True)
class Balance:
    """The best split of a batch over measured devices; `variants/ID/balance.json`."""

    curves: tuple[Curve, ...]
    best: Prediction
    """Its time is T*: by straight curves no split of whole samples is faster; where one isn't straight, none
    of those whose sizes were measured."""
    even: Prediction | None
    """`None` where it doesn't fit."""
    proportional: Prediction | None
    """In proportion to speed, 1/β: best only where all α are alike. `None` where a curve isn't straight."""
    overhead_ms: float
    """What a step of the best split takes beyond its slowest device: communication, measured."""

    @property
    def predicted_ms(self) -> float:
        """The step of the best split."""
        return self.best.compute_ms + self.overhead_ms


@dataclass(frozen=True)
class Attempt:
    """A line of a search: a batch begins, fits or fails; the search is done, or it failed."""

    outcome: str
    batch: int
    message: str = ""


@dataclass(frozen=True)
class MaxBatch:
    """What `global_batch: max` came to; `fit.json`."""

    global_batch: int
    caps: tuple[int, ...]
    """The most samples of each device of the job, with a margin."""
