"""Which nodes have been silent for too long. Pure."""

from dataclasses import dataclass, field

PULSE_S = 1.0
"""The time between two heartbeats of a node that has nothing else to send."""
CLOSED_S = 5.0
"""A node whose connection was closed by its kernel, and that does not connect again, has ended."""
QUIET_S = 3.0
"""When users are informed that a node is silent, which may pass."""
BUSY_S = 1.0
"""A node that did not listen for this long can't judge whether others were silent."""


@dataclass
class Silence:
    """When the other nodes were heard last.

    Node 0 listens to all other nodes, which listen to node 0 only. All times are of this node's own
    monotonic clock.
    """

    limit_s: float
    now_s: float
    """When it was checked last."""
    suspicious: bool = False
    """Whether ranks have already lost their peers; then half of the limit is enough."""
    heard_s: dict[int, float] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    """Nodes whose connection was closed while it worked."""
    quiet: set[int] = field(default_factory=set)
    """Nodes that users know to be silent."""

    def hear(self, rank: int, now_s: float) -> None:
        """Something came from this node."""
        self.heard_s[rank] = now_s
        self.closed.discard(rank)

    def close(self, rank: int, now_s: float) -> None:
        """The connection to a node ended: by the other end, if the node was heard shortly before."""
        if rank in self.heard_s and now_s - self.heard_s[rank] < 2 * PULSE_S:
            self.closed.add(rank)

    def check(self, now_s: float) -> tuple[int, float] | None:
        """The node that has been silent for too long, and for how many seconds."""
        away_s = now_s - self.now_s
        if away_s > BUSY_S:
            self.heard_s = {rank: heard_s + away_s for rank, heard_s in self.heard_s.items()}
        self.now_s = now_s
        over = {rank: now_s - heard_s for rank, heard_s in self.heard_s.items()}
        late = {rank: over_s for rank, over_s in over.items() if over_s > self._limit_of(rank)}
        return max(late.items(), key=lambda item: item[1]) if late else None

    def changes(self) -> dict[int, bool]:
        """Nodes that have become silent since the last call, `True`, and those that are back, `False`."""
        now_quiet = {rank for rank, heard_s in self.heard_s.items() if self.now_s - heard_s > QUIET_S}
        changed = now_quiet ^ self.quiet
        self.quiet = now_quiet
        return {rank: rank in now_quiet for rank in sorted(changed)}

    def _limit_of(self, rank: int) -> float:
        limit_s = self.limit_s / 2 if self.suspicious else self.limit_s
        return min(limit_s, CLOSED_S) if rank in self.closed else limit_s
