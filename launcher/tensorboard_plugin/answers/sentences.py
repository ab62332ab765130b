"""What the tab says in words: from a comparison's figures and its own explanations, nothing computed anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpurun.launcher.compare.causes import (
    MENTION_FROM,
    largest_loss,
    loss_text,
    traced_and_timed,
    why_slower,
)
from gpurun.launcher.compare.figures.slowest import slowest_rank
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.report.terminal.curves import balanced_lines
from gpurun.launcher.units import format_ms


def explanation(variant: VariantResult, comparison: Comparison) -> str | None:
    """The sentence next to a variant's bars, in ms of its traced steps; `None` without traces."""
    best = next((each for each in comparison.variants if each.id == comparison.first), None)
    text = why_slower(variant, best) if best is not None and best.id != variant.id else None
    return _sentence(text or _largest_loss(variant) or _all_compute(variant))


def _largest_loss(variant: VariantResult) -> str | None:
    found = largest_loss(variant.ranks)
    worth_it = found is not None and found.ms >= MENTION_FROM * found.span_ms > 0
    return loss_text(found, variant) if found is not None and worth_it else None


def _all_compute(variant: VariantResult) -> str | None:
    slowest = slowest_rank(variant.ranks)
    if slowest is None or slowest.span_ms is None or slowest.compute_ms is None:
        return None
    return (
        f"{format_ms(slowest.compute_ms)} of {format_ms(slowest.span_ms)} ms are compute;"
        f" no other part is significant{traced_and_timed(slowest.span_ms, variant)}"
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
