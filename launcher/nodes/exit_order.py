"""Ends of ranks on several hosts in one order, by the store's counter: clocks of different hosts never meet.

A node's message gets its number from the store when the node notices that ranks have ended. Between ranks in
one message, and between a rank's own account and its end, the host's own clock tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpurun.launcher.nodes.messages import RankExit
from gpurun.launcher.processes.protocol import Exit


@dataclass
class Timeline:
    """Times of one attempt as node 0's clock would have shown them."""

    last_ns: int = 0
    shifts_ns: dict[int, int] = field(default_factory=dict)
    """By rank: what to add to a time of its host to get one of node 0's."""

    def place(self, exits: Sequence[RankExit], now_ns: int) -> list[Exit]:
        """The exits of one message, later than those of every message before it.

        Args:
            now_ns: when the message was read, by node 0's clock.
        """
        if not exits:
            return []
        first_ns = min(exit_.time_ns for exit_ in exits)
        shift_ns = max(now_ns, self.last_ns + 1) - first_ns
        self.last_ns = max(exit_.time_ns for exit_ in exits) + shift_ns
        self.shifts_ns.update({exit_.rank: shift_ns for exit_ in exits})
        return [_exit(exit_, exit_.time_ns + shift_ns) for exit_ in exits]


def rank_exits(exits: Sequence[Exit]) -> tuple[RankExit, ...]:
    """The exits as they are sent."""
    return tuple(
        RankExit(e.rank, e.pid, e.returncode, e.time_ns, tuple(map(int, e.signals_sent)), e.oom_killed)
        for e in exits
    )


def _exit(sent: RankExit, time_ns: int) -> Exit:
    return Exit(sent.rank, sent.pid, sent.returncode, time_ns, sent.signals_sent, sent.oom_killed)
