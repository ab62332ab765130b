"""The files through which workers and the command speak, one dataclass each.

The run directory is the only channel back from a worker. `LaunchOrder` goes in, the rest comes out. All are
JSON, encoded and checked by msgspec.
"""

from gpurun.launcher.rundir.records.balance import Attempt, Balance, Curve, Fit, Prediction
from gpurun.launcher.rundir.records.measured import (
    Kind,
    LossOver,
    PointRecord,
    RoundTime,
    StepRecord,
    VariantFacts,
)
from gpurun.launcher.rundir.records.orders import (
    BalanceOrder,
    CaptureRequest,
    FitOrder,
    LaunchOrder,
    OrderedVariant,
    OrderHead,
    ProfileOrder,
    ProgramOrder,
    VariantOrder,
)
from gpurun.launcher.rundir.records.outcome import Event, FailureRecord, Restart, RootCause, VariantStatus

__all__ = [
    "Attempt",
    "Balance",
    "BalanceOrder",
    "CaptureRequest",
    "Curve",
    "Event",
    "FailureRecord",
    "Fit",
    "FitOrder",
    "Kind",
    "LaunchOrder",
    "LossOver",
    "OrderHead",
    "OrderedVariant",
    "PointRecord",
    "Prediction",
    "ProfileOrder",
    "ProgramOrder",
    "Restart",
    "RootCause",
    "RoundTime",
    "StepRecord",
    "VariantFacts",
    "VariantOrder",
    "VariantStatus",
]
