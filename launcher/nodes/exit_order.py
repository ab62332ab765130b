"""The exits of ranks on several hosts, in the order in which node 0 hears of them.

Hosts' clocks are never compared. A node reports at once that ranks have ended. Between the ranks of one
message, and between a rank's failure record and its exit, the host's own clock decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpurun.launcher.nodes.messages import RankExit
from gpurun.launcher.processes.protocol import Exit


@dataclass
class Timeline:
    """Converts the times of one attempt to node 0's clock."""

    last_ns: int = 0
    shifts_ns: dict[int, int] = field(default_factory=dict)
    """By rank: what to add to a time of its host to get a time of node 0."""

    def place(self, exits: Sequence[RankExit], now_ns: int) -> list[Exit]:
        """The exits of one message, placed after those of all messages before it.

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
