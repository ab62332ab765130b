"""The files through which workers and the command communicate, one dataclass each.

The run directory is the only channel back from a worker. `LaunchConfig` goes in, the rest comes out. All are
JSON, encoded and checked by msgspec.
"""

from gpurun.launcher.rundir.records.balance import Attempt, Balance, Curve, MaxBatch, Prediction
from gpurun.launcher.rundir.records.config import (
    BalanceConfig,
    CaptureRequest,
    LaunchConfig,
    LaunchHead,
    MaxBatchConfig,
    ProfileConfig,
    ProgramConfig,
    VariantConfig,
    VariantRef,
)
from gpurun.launcher.rundir.records.measured import (
    GpuLoad,
    Kind,
    Look,
    LossOver,
    PointRecord,
    RoundTime,
    StepRecord,
    VariantFacts,
)
from gpurun.launcher.rundir.records.outcome import (
    Event,
    FailureRecord,
    Restart,
    RootCause,
    Stage,
    VariantStatus,
)

__all__ = [
    "Attempt",
    "Balance",
    "BalanceConfig",
    "CaptureRequest",
    "Curve",
    "Event",
    "FailureRecord",
    "GpuLoad",
    "Kind",
    "LaunchConfig",
    "LaunchHead",
    "Look",
    "LossOver",
    "MaxBatch",
    "MaxBatchConfig",
    "PointRecord",
    "Prediction",
    "ProfileConfig",
    "ProgramConfig",
    "Restart",
    "RootCause",
    "RoundTime",
    "Stage",
    "StepRecord",
    "VariantConfig",
    "VariantFacts",
    "VariantRef",
    "VariantStatus",
]
