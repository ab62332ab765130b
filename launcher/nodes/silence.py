"""When a node has been silent for too long: pure, by counts and this node's own monotonic clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

SILENCE_S = 5.0
"""A node that isn't heard of for this long is gone: with the grace period, all is over within 10 s."""
SUSPICIOUS_SILENCE_S = 2.5
"""Likewise, where ranks have lost their connections to peers already."""
BUSY_S = 1.0
"""Who hasn't listened for this long can't tell silence from not having listened."""


@dataclass
class Silence:
    """Whom node `rank` hasn't heard of, and for how long.

    Node 0 counts each node's heartbeats. Another node hears of the store only, and that is node 0's.
    """

    rank: int
    now_s: float
    suspicious: bool = False
    counts: tuple[int, ...] = ()
    heard_s: dict[int, float] = field(default_factory=dict)

    def begin(self, num_nodes: int, now_s: float) -> None:
        """From now on hearts beat."""
        watched = range(1, num_nodes) if self.rank == 0 else (0,)
        self.heard_s = dict.fromkeys(watched, now_s)

    def resume(self, now_s: float) -> None:
        """This node listens again, perhaps after it was busy: that time is nobody's silence."""
        away_s = now_s - self.now_s
        if away_s > BUSY_S:
            self.heard_s = {rank: heard_s + away_s for rank, heard_s in self.heard_s.items()}
        self.now_s = now_s

    def beats(self, counts: Sequence[int], now_s: float) -> None:
        """Heartbeats of all nodes so far, read from the store."""
        for rank in self.heard_s:
            if self.rank != 0 or not self.counts or counts[rank] != self.counts[rank]:
                self.heard_s[rank] = now_s
        self.counts = tuple(counts)

    def find(self, now_s: float) -> tuple[int, float] | None:
        """A node that has been silent for too long, and for how many seconds."""
        self.now_s = now_s
        limit_s = SUSPICIOUS_SILENCE_S if self.suspicious else SILENCE_S
        silent = [(now_s - heard_s, rank) for rank, heard_s in self.heard_s.items()]
        longest_s, rank = max(silent, default=(0.0, 0))
        return (rank, longest_s) if longest_s > limit_s else None
