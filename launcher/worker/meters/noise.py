"""What slows a block of steps from outside: other programs on the same cores."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpurun.launcher.machine.host import has_own_quota
from gpurun.launcher.worker.meters.cpu_time import others_ns, waited_ns


@dataclass(frozen=True)
class BlockNoise:
    """What slowed one block of steps on one rank."""

    queue_ns: int | None = None
    """In the run queue, in the mean step."""
    others_ns: int | None = None
    """CPU time of other processes on this rank's cores, in the mean step; of one block it may be negative."""


QUIET = BlockNoise()


@dataclass
class NoiseMeter:
    """Adds up over the portions of a block; nothing is read while a step is timed."""

    read_ns: Callable[[], Mapping[str, int] | None] = waited_ns
    read_others_ns: Callable[[], int | None] = others_ns
    is_limited: Callable[[], bool] = has_own_quota
    """Whether the rank may wait for its own CPU quota, which looks like waiting for a core."""
    queue_ns: Counter[str] = field(default_factory=Counter)
    """By thread."""
    others_ns: int | None = 0
    known: bool = True

    def clear(self) -> None:
        """A block begins."""
        self.queue_ns, self.others_ns, self.known = Counter(), 0, True

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what happens within it."""
        before_ns, others_before_ns = self.read_ns(), self.read_others_ns()
        yield
        after_ns, others_after_ns = self.read_ns(), self.read_others_ns()
        self.others_ns = _advanced(self.others_ns, others_before_ns, others_after_ns)
        if before_ns is None or after_ns is None:
            self.known = False
        else:
            for thread, waited in after_ns.items():
                self.queue_ns[thread] += max(0, waited - before_ns.get(thread, 0))

    def per_step(self, num_steps: int) -> BlockNoise:
        """What slowed the block, per step; waiting is that of the thread that waited longest."""
        longest_ns = max(self.queue_ns.values(), default=0)
        known = self.known and not self.is_limited()
        queue_ns = longest_ns // num_steps if known else None
        others_ns = None if self.others_ns is None else round(self.others_ns / num_steps)
        return BlockNoise(queue_ns, others_ns)


def _advanced(total_ns: int | None, before_ns: int | None, after_ns: int | None) -> int | None:
    """`total_ns` with what came between two readings, if both are known."""
    if total_ns is None or before_ns is None or after_ns is None:
        return None
    return total_ns + after_ns - before_ns
