"""What was measured of devices: cost curves for `split: balanced`, capacity for `global_batch: max`."""

from dataclasses import dataclass

from gpurun.launcher.rundir.records.measured import Count, Number


@dataclass(frozen=True)
class Curve:
    """The time of a step on one device over its samples, without communication, in milliseconds."""

    alpha_ms: Number
    """The constant part of a step."""
    alpha_ci: tuple[Number, Number] | None
    beta_ms: Number
    """The time of each sample."""
    beta_ci: tuple[Number, Number] | None
    straight: bool
    """Whether the line α + β·b fits the measured points; else the curve goes through them."""
    points: tuple[tuple[Count, Number], ...]
    """Samples and their measured time, both increasing."""
    cap: Count | None
    """The most samples that its memory holds, if the batch has more."""


@dataclass(frozen=True)
class Prediction:
    """What the curves predict for a split."""

    split: tuple[int, ...]
    compute_ms: Number
    """The time of its slowest device."""


@dataclass(frozen=True)
class Balance:
    """The best split of a batch over measured devices; `variants/ID/balance.json`."""

    curves: tuple[Curve, ...]
    best: Prediction
    """Its time is T*: no split is predicted to be faster; if a curve is not straight, no split of measured
    sizes."""
    even: Prediction | None
    """`None` if it does not fit."""
    proportional: Prediction | None
    """In proportion to speed, 1/β: best only if all α are equal. `None` if a curve is not straight."""
    overhead_ms: Number
    """What a step of the best split takes in addition to its slowest device: communication, measured."""

    @property
    def predicted_ms(self) -> float:
        """The step of the best split."""
        return self.best.compute_ms + self.overhead_ms


@dataclass(frozen=True)
class Attempt:
    """A line of a search: a batch begins, fits or fails; or the search is done, or has failed."""

    outcome: str
    batch: Count
    message: str = ""
    step_s: Number = 0.0
    """Of a batch that fits: what a step took, without communication."""


@dataclass(frozen=True)
class MaxBatch:
    """The result of `global_batch: max`; `max_batch.json`."""

    global_batch: Count
    caps: tuple[int, ...]
    """The most samples of each device of the job, with a margin."""
    step_s: Number = 0.0
    """What a step of the largest batches that were tried took; 0 in older runs."""
