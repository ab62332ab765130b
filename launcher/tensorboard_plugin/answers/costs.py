"""What the terminal says below the costs of a balanced split: the page draws these, and says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.report.terminal.balanced import balanced_lines


def cost_sentences(variant: VariantResult, variants: Sequence[VariantResult]) -> list[str]:
    """Prediction, measurement and what other splits would take; nothing of a split that isn't balanced."""
    if variant.balanced is None:
        return []
    # The others only lend their names.
    named = [variant, *(replace(other, balanced=None) for other in variants if other.id != variant.id)]
    num_above = 2 + len(variant.balanced.devices)  # the heading, and the table with its header
    return [line.strip() for line in balanced_lines(named)[num_above:]]
