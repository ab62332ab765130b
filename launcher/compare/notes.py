"""What a reader of the figures has to know, as whole sentences."""

from collections.abc import Mapping

from gpurun.launcher.compare.figures.measured import Measured
from gpurun.launcher.compare.label import variant_label, varied_texts
from gpurun.launcher.compare.summary import MORE_LAUNCHES
from gpurun.launcher.plan.model import Plan, SkippedCombination
from gpurun.launcher.stats.launches import MIN_PAIRS


def notes(plan: Plan, measured: Mapping[str, Measured]) -> tuple[str, ...]:
    """The plan's notes, and what the measurement adds to them."""
    baseline = measured[plan.baseline]
    others = [
        one for one in measured.values() if one is not baseline and one.variant.same_task(baseline.variant)
    ]
    if not baseline.variant.kind.is_ranked:
        others = []
    found = [*plan.notes, *(_left_out(combination) for combination in plan.left_out)]
    if others and baseline.finished and not baseline.counts:
        return (*found, _lost_baseline(baseline))
    found += _few_launches(baseline, others)
    found += _other_batches(baseline, others)
    return tuple(found)


def _left_out(combination: SkippedCombination) -> str:
    return f"Left out: {' '.join(varied_texts(combination.combination))}: {combination.reason}"


def _lost_baseline(baseline: Measured) -> str:
    name, status = variant_label(baseline.variant), baseline.status.status
    return f"The baseline {name} ended as {status}, so nothing is compared with it; name another `baseline`."


def _few_launches(baseline: Measured, others: list[Measured]) -> list[str]:
    """Variants that run in other processes than the baseline need pairs of launches."""
    repetitions = set(baseline.launch_medians_ns)
    apart = [one for one in others if one.group != baseline.group and one.counts]
    pairs = [len(repetitions & set(one.launch_medians_ns)) for one in apart]
    if not apart or min(pairs) >= MIN_PAIRS:
        return []
    names = ", ".join(
        variant_label(one.variant) for one, num in zip(apart, pairs, strict=True) if num < MIN_PAIRS
    )
    return [
        f"Launches of the same processes scatter, so {names} can be compared with the baseline only over"
        f" {MIN_PAIRS} pairs of launches (here {min(pairs)}): set {MORE_LAUNCHES}."
    ]


def _other_batches(baseline: Measured, others: list[Measured]) -> list[str]:
    batch = baseline.variant.global_batch
    if all(one.variant.global_batch == batch for one in others):
        return []
    return ["Global batches differ, so variants are compared by their time per sample."]
