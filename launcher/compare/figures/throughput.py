"""The throughput of a step: operations, bytes and joules, where they are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gpurun.launcher.compare.figures.recorded import MeasuredVariant
from gpurun.launcher.machine.accelerators import recorded_names, total_peak_flop_per_s
from gpurun.launcher.rundir.records import StepRecord


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one variant, over all its devices; what isn't known is `None`.

    These are fields of `VariantResult`, so a new one is in JSON at once.
    """

    samples_per_s: float | None = None
    flop_per_s: float | None = None
    """Forward and backward; the optimizer's are not counted."""
    mfu: float | None = None
    """Model FLOP utilisation: `flop_per_s` as a share of the devices' peak in this precision."""
    input_bytes_per_s: float | None = None
    """Inputs and targets."""
    joules_per_sample: float | None = None
    """The energy of the GPUs, by their driver's counter; not of the rest of the machine."""


def throughput(measured: MeasuredVariant, step_ms: float | None, host: Mapping[str, Any]) -> Rates:
    """The rates of a variant whose step takes `step_ms`; `host` has the names of the GPUs."""
    variant, facts = measured.variant, measured.facts
    if not step_ms or variant.global_batch is None:
        return Rates()  # the samples of a step aren't known of most programs
    samples_per_s = 1e3 * variant.global_batch / step_ms
    flop_per_s = times(facts.flops_per_sample, samples_per_s)
    peak = total_peak_flop_per_s(gpu_names(sorted(set(variant.devices)), host), variant.precision or "")
    return Rates(
        samples_per_s=samples_per_s,
        flop_per_s=flop_per_s,
        mfu=flop_per_s / peak if flop_per_s is not None and peak else None,
        input_bytes_per_s=times(facts.bytes_per_sample, samples_per_s),
        joules_per_sample=joules_per_sample(measured, variant.global_batch),
    )


def times(per_sample: float | None, samples_per_s: float) -> float | None:
    return None if per_sample is None else per_sample * samples_per_s


def gpu_names(devices: Sequence[str], host: Mapping[str, Any]) -> list[str | None]:
    """The driver's name for each device; `None` for CPUs, and where `host` has none."""
    names = recorded_names(host)
    return [names.get(device) for device in devices]


def joules_per_sample(measured: MeasuredVariant, global_batch: int) -> float | None:
    """Mean energy of a timed step over its samples; a GPU that ranks share counts once."""
    by_device: dict[str, float] = {}
    devices = measured.variant.devices
    for rank, steps in measured.steps.items():
        energy_mj = mean_energy_mj(steps)
        if energy_mj is None:
            return None
        by_device.setdefault(devices[rank], energy_mj)
    return sum(by_device.values()) / 1e3 / global_batch if by_device else None


def mean_energy_mj(steps: Sequence[StepRecord]) -> float | None:
    """Millijoules of a timed step on one rank, over all its GPUs."""
    read = [step.energy_mj for step in steps if step.kind == "timed" and step.energy_mj is not None]
    return fmean(read) if read else None
