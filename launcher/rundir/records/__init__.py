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
    GRADIENT_DIFFERS,
    NO_GROUP,
    CodeVersion,
    DeviceFacts,
    GpuLoad,
    Kind,
    Look,
    LossOver,
    PairRate,
    PointRecord,
    ReduceRate,
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
    elapsed_s,
    stages_s,
)

__all__ = [
    "GRADIENT_DIFFERS",
    "NO_GROUP",
    "Attempt",
    "Balance",
    "BalanceConfig",
    "CaptureRequest",
    "CodeVersion",
    "Curve",
    "DeviceFacts",
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
    "PairRate",
    "PointRecord",
    "Prediction",
    "ProfileConfig",
    "ProgramConfig",
    "ReduceRate",
    "Restart",
    "RootCause",
    "RoundTime",
    "Stage",
    "StepRecord",
    "VariantConfig",
    "VariantFacts",
    "VariantRef",
    "VariantStatus",
    "elapsed_s",
    "stages_s",
]
