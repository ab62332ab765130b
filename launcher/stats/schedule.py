"""The order of a round: fresh and random, yet the same on every rank without a message."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Block:
    """Some steps of one variant in one round."""

    variant: str
    kind: Literal["timed", "aa"]
    """`aa`: the baseline's second block; what differs between its two blocks is noise."""
    order: int
    """Position in the round, from 0."""


def round_blocks(variants: Sequence[str], baseline: str | None, seed: str) -> tuple[Block, ...]:
    """The blocks of one round: every variant once, the baseline twice, shuffled.

    Args:
        variants: those that are still measured.
        baseline: the variant to measure twice, if it is among them.
        seed: names the round, in a run and launch; the order depends on nothing else.
    """
    kinds: list[tuple[str, Literal["timed", "aa"]]] = [(variant, "timed") for variant in variants]
    if baseline is not None and baseline in variants:
        kinds.append((baseline, "aa"))
    # A text seeds by its hash (SHA-512), which is the same in every process, unlike `hash()`.
    random.Random(seed).shuffle(kinds)
    return tuple(Block(variant, kind, order) for order, (variant, kind) in enumerate(kinds))
