"""What a report says of a balanced split: what the devices cost, and what that made of the batch."""

from collections.abc import Mapping, Sequence

from launcher.compare.label import split_text, variant_label
from launcher.compare.model import Balanced, DeviceCost, Interval, SplitCost, VariantResult
from launcher.report.grid import grid
from launcher.units import format_ms, format_number


def balanced_lines(variants: Sequence[VariantResult]) -> list[str]:
    """A paragraph per balanced variant."""
    names = {variant.id: variant_label(variant) for variant in variants}
    return [
        line for variant in variants if variant.balanced for line in _lines(variant, variant.balanced, names)
    ]


def _lines(variant: VariantResult, found: Balanced, names: Mapping[str, str]) -> list[str]:
    rows = [
        _device_row(device, samples) for device, samples in zip(found.devices, variant.split, strict=True)
    ]
    header = ("device", "per step, ms", "per sample, ms", "curve", "samples")
    lines = [f"{variant_label(variant)}: what the devices cost, and the split that is best for them"]
    lines += [f"  {line}" for line in grid(header, rows, right=(4,))]
    lines += [f"  {_prediction(found)}", *(f"  {line}" for line in _others(found))]
    if found.same_as:
        same = ", ".join(names.get(one, one) for one in found.same_as)
        lines.append(f"  These are the samples of {same} too: both were measured.")
    return lines


def _device_row(device: DeviceCost, samples: int) -> tuple[str, ...]:
    curve = "straight" if device.straight else "by its points"
    if device.max_samples is not None:
        curve += f", memory for {device.max_samples}"
    return (
        device.device,
        f"{_figure(device.alpha_ms)}{_interval(device.alpha_ci)}",
        f"{_figure(device.beta_ms)}{_interval(device.beta_ci)}",
        curve,
        str(samples),
    )


def _prediction(found: Balanced) -> str:
    """`Predicted 57.1 ms: T* = 55.8, the best there is, + 1.3 overhead; measured 57.5: T*/T = 0.97.`"""
    text = (
        f"Predicted {format_ms(found.predicted_ms)} ms: T* = {format_ms(found.optimum_ms)}, which no split of"
        f" whole samples beats, + {format_ms(found.overhead_ms)} overhead"
    )
    if found.measured_ms is None or found.optimum_over_measured is None:
        return f"{text}; not measured."
    return f"{text}; measured {format_ms(found.measured_ms)}: T*/T = {found.optimum_over_measured:.2f}."


def _others(found: Balanced) -> list[str]:
    """What one would have got without measuring."""
    parts = [
        f"{word} ({split_text(cost.split)}) {format_ms(cost.step_ms)} ms"
        for word, cost in _named(found)
        if cost is not None
    ]
    flat = [device.device for device in found.devices if device.beta_ms == 0]
    lines = [f"By the same figures {', '.join(parts)}."] if parts else []
    if flat:
        lines.append(f"No split is in proportion to speed: samples cost nothing on {', '.join(flat)}.")
    return lines


def _named(found: Balanced) -> list[tuple[str, SplitCost | None]]:
    return [("even would take", found.even), ("in proportion to speed", found.proportional)]


def _figure(ms: float) -> str:
    """Three significant digits; a sample may take microseconds."""
    return format_number(ms, 4) if 0 < abs(ms) < 0.1 else format_number(ms, 3 if abs(ms) < 1 else 2)


def _interval(ci: Interval | None) -> str:
    return f" ({_figure(ci[0])} to {_figure(ci[1])})" if ci else ""
