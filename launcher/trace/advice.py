"""Causes of time that isn't compute: how sentences name each one, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["input", "copies", "host", "transfer", "other_steps", "other", "split", "straggler"]
"""`split` and `straggler` are waiting, for a rank with more samples and for one that is slower."""


@dataclass(frozen=True)
class Cause:
    """What a sentence says about a cause."""

    advice: str
    """What to do about it."""
    spent: str = ""
    """Completes `every rank spends 11 of 60 ms` and `22 % of the time is spent`.

    Empty for a wait: its sentence names the rank that the others wait for.
    """
    if_balanced: str | None = None
    """The advice where a balanced split was measured already, if that needs another one."""


CAUSES: dict[Kind, Cause] = {
    "input": Cause("raise num_workers, or do less work per sample", "waiting for data"),
    "copies": Cause("pin the memory and copy with non_blocking=True", "on copies that nothing overlaps"),
    "host": Cause("try larger batches, torch.compile or CUDA graphs", "waiting for the CPU to launch work"),
    "transfer": Cause(
        "try larger batches, gradient accumulation or another bucket size",
        "on communication that nothing overlaps",
    ),
    "other_steps": Cause(
        "look at the timeline for what delays the step's own", "on work of other steps only"
    ),
    "other": Cause("look for synchronisation and dependencies", "in gaps between work already launched"),
    "split": Cause(
        "try split: balanced",
        if_balanced="find out why the ranks take other times than when this split was found",
    ),
    "straggler": Cause(
        "find out what slows that rank down, or give it less work (split: balanced)",
        if_balanced="find out what slows that rank down",
    ),
}
_ON_CPU = CAUSES | {
    "host": Cause("try larger batches, fewer operators, or torch.compile", "in Python between operators")
}


def cause_named(kind: Kind, on_cpu: bool, is_balanced: bool = False) -> Cause:
    """The cause, with the words and the advice that fit.

    Args:
        kind: its key in the table.
        on_cpu: whether the CPU itself is what computes.
        is_balanced: whether the split is a balanced one already.
    """
    found = (_ON_CPU if on_cpu else CAUSES)[kind]
    return replace(found, advice=found.if_balanced) if is_balanced and found.if_balanced else found
