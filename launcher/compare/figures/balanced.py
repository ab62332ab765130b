"""How a balanced split was found, beside what was then measured."""

from collections.abc import Iterable, Mapping

from gpurun.launcher.compare.figures.measured import Measured
from gpurun.launcher.compare.model import Balanced, DeviceCost, SplitCost, StepTime
from gpurun.launcher.rundir.records import Balance, Prediction


def balanced(measured: Measured, step: StepTime | None, others: Mapping[str, Measured]) -> Balanced | None:
    """`None` where the split is not a balanced one, or not found yet."""
    balance = measured.balance
    if balance is None:
        return None
    optimum_ms, measured_ms = balance.best.compute_ms, step.median if step else None
    return Balanced(
        devices=tuple(_costs(measured, balance)),
        optimum_ms=optimum_ms,
        overhead_ms=balance.overhead_ms,
        predicted_ms=balance.predicted_ms,
        measured_ms=measured_ms,
        optimum_over_measured=optimum_ms / measured_ms if measured_ms else None,
        even=_cost(balance, balance.even),
        proportional=_cost(balance, balance.proportional),
        same_as=tuple(one.variant.id for one in others.values() if _is_same(one, measured)),
    )


def _costs(measured: Measured, balance: Balance) -> Iterable[DeviceCost]:
    for device, curve in zip(measured.variant.devices, balance.curves, strict=True):
        yield DeviceCost(
            device=device,
            alpha_ms=curve.alpha_ms,
            alpha_ci=curve.alpha_ci,
            beta_ms=curve.beta_ms,
            beta_ci=curve.beta_ci,
            straight=curve.straight,
            points=curve.points,
            max_samples=curve.cap,
        )


def _cost(balance: Balance, prediction: Prediction | None) -> SplitCost | None:
    if prediction is None:
        return None
    return SplitCost(prediction.split, prediction.compute_ms + balance.overhead_ms)


def _is_same(one: Measured, measured: Measured) -> bool:
    """Whether it is another variant of the same work, split alike."""
    a, b = one.variant, measured.variant
    return a.id != b.id and (a.split, a.strategy, a.devices, a.varied) == (
        (b.split, b.strategy, b.devices, b.varied)
    )
