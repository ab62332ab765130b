"""What the tab says in words: from a comparison's figures and its own explanations, nothing computed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpurun.launcher.compare.explain import (
    MENTION_FROM,
    largest_loss,
    remaining_loss,
    told,
    traced_and_timed,
    why_slower,
)
from gpurun.launcher.compare.figures.slowest import slowest_rank
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.ranking import is_ranked
from gpurun.launcher.report.terminal.curves import balanced_lines
from gpurun.launcher.units import format_ms, format_percent


def headline(comparison: Comparison | None) -> str | None:
    """The answer in one sentence, with its number, and what the fastest still loses where that is much."""
    if comparison is None:
        return None
    best, alone = _fastest(comparison)
    loss = remaining_loss(best, alone) if best is not None else None
    answer = _answer(comparison)
    return f"{answer} {loss}" if loss else answer


def unsaid(comparison: Comparison | None) -> str | None:
    """What the summary goes on to say after the clause that the headline took from it."""
    if comparison is None:
        return None
    first, rest = _clauses(comparison)
    return rest if _answer(comparison) == first else None


def _clauses(comparison: Comparison) -> tuple[str, str | None]:
    """The summary's first clause as a sentence, and the rest, both without what the fastest loses."""
    best, alone = _fastest(comparison)
    if best is None:  # why none is the fastest is one sentence, whatever it lists; advice follows
        reason, _, advice = comparison.summary.partition(". ")
        return f"{reason.rstrip('.')}.", advice or None
    loss = remaining_loss(best, alone)
    first, _, rest = comparison.summary.removesuffix(loss or "").rstrip().partition(";")
    return f"{first.rstrip('.')}.", rest.strip() or None


def _fastest(comparison: Comparison) -> tuple[VariantResult | None, bool]:
    """The fastest variant, and whether it is the only one that is ranked."""
    best = next((each for each in comparison.variants if each.id == comparison.fastest), None)
    return best, sum(map(is_ranked, comparison.variants)) == 1


def _answer(comparison: Comparison) -> str:
    """Which is fastest, without what it loses."""
    by_id = {variant.id: variant for variant in comparison.variants}
    best = by_id.get(comparison.fastest or "")
    base = by_id.get(comparison.baseline)
    if comparison.disturbed:
        return _clauses(comparison)[0]
    if best is None or best.step_ms is None:
        return _none_is_fastest(comparison)
    if len(by_id) == 1 or base is None:
        return f"{variant_label(best)} takes {format_ms(best.step_ms.median)} ms a step."
    difference = best.vs_baseline
    if best is not base and difference and difference.verdict == "faster" and difference.percent is not None:
        ci = None if difference.ci is None else (-difference.ci[1], -difference.ci[0])
        by = format_percent(-difference.percent, ci)
        if best.global_batch != base.global_batch:  # steps of different batches are different work
            return f"{variant_label(best)} takes {by} less time per sample than {variant_label(base)}."
        return f"{variant_label(best)} is {by} faster than {variant_label(base)}."
    return _ahead_of_the_next(best, comparison) or _clauses(comparison)[0]


def _none_is_fastest(comparison: Comparison) -> str:
    """Why: nothing is measured, or what is can't be ranked."""
    if any(each.step_ms is not None or each.probe is not None for each in comparison.variants):
        return _clauses(comparison)[0]
    return "No variant could be measured." if comparison.complete else "No variant has been measured yet."


def _ahead_of_the_next(best: VariantResult, comparison: Comparison) -> str | None:
    """How much slower the next one is; `None` unless the fastest is the baseline and clearly ahead of it."""
    others = [
        (difference.percent, variant, difference)
        for variant in comparison.variants
        if (difference := variant.vs_baseline) and difference.percent is not None and variant.id != best.id
    ]
    if best.id != comparison.baseline or not others:
        return None
    percent, following, difference = min(others, key=lambda each: each[0])
    if difference.verdict != "slower":
        return None
    by = format_percent(percent, difference.ci)
    slower = (
        f"is {by} slower"
        if following.global_batch == best.global_batch
        else f"takes {by} more time per sample"
    )
    return f"{variant_label(best)} is the fastest; the next, {variant_label(following)}, {slower}."


def explanation(variant: VariantResult, comparison: Comparison) -> str | None:
    """The sentence beside a variant's bars, in ms of its traced steps; `None` where no trace tells."""
    best = next((each for each in comparison.variants if each.id == comparison.fastest), None)
    text = why_slower(variant, best) if best is not None and best.id != variant.id else None
    return _sentence(text or _largest_loss(variant) or _all_compute(variant))


def _largest_loss(variant: VariantResult) -> str | None:
    found = largest_loss(variant.ranks)
    worth_it = found is not None and found.ms >= MENTION_FROM * found.span_ms > 0
    return told(found, variant) if found is not None and worth_it else None


def _all_compute(variant: VariantResult) -> str | None:
    slowest = slowest_rank(variant.ranks)
    if slowest is None or slowest.span_ms is None or slowest.compute_ms is None:
        return None
    return (
        f"{format_ms(slowest.compute_ms)} of {format_ms(slowest.span_ms)} ms are compute;"
        f" nothing else takes a part worth mentioning{traced_and_timed(slowest.span_ms, variant)}"
    )


def _sentence(text: str | None) -> str | None:
    return f"{text[0].upper()}{text[1:]}." if text else None


def system_line(host: Mapping[str, Any], comparison: Comparison | None) -> str:
    """`2 × NVIDIA H200 · bf16 · torch 2.13`."""
    gpus = [str(gpu.get("name")) for gpu in host.get("gpus") or [] if isinstance(gpu, Mapping)]
    names = [f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)]
    if not names and isinstance(host.get("cpu_model"), str):
        names = [f"{host.get('cpu_cores')} × {host['cpu_model']}"]
    variants = comparison.variants if comparison else ()
    precisions = sorted({variant.precision for variant in variants if variant.precision})
    versions = host.get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    return " · ".join([*names, *precisions, *([f"torch {torch}"] if torch else [])])


def cost_sentences(variant: VariantResult, variants: Sequence[VariantResult]) -> list[str]:
    """Prediction, measurement and what other splits would take; nothing of a split that isn't balanced."""
    if variant.balanced is None:
        return []
    # The others only lend their names.
    named = [variant, *(replace(other, balanced=None) for other in variants if other.id != variant.id)]
    num_above = 2 + len(variant.balanced.devices)  # the heading, and the table with its header
    return [line.strip() for line in balanced_lines(named)[num_above:]]
