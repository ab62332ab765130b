"""What a rank did, as tasks that wait for each other: the nodes and edges of its dependency graph.

A task ends at a moment that the trace has. It begins when all that it waits for has ended; what is left until
its own end is what it costs, and a replay can take that away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from gpurun.launcher.trace.intervals import Int64

NO_LABEL = -1


class Part(IntEnum):
    """What a task's time goes into."""

    COMPUTE = 0
    TRANSFER = 1
    """Of a collective or message, after all of its ranks have arrived."""
    COPIES = 2
    INPUT = 3
    """The training loop waits for its next batch."""
    HOST = 4
    """The CPU: Python, operators, launches."""
    LATENCY = 5
    """Between a launch, or the end of what the work waited for, and the start of the work."""
    BEFORE = 6
    """Before the rank's first event: its capture began later than that of the others."""


@dataclass(frozen=True)
class Exchange:
    """A rank's part in a collective: two tasks."""

    start: int
    end: int
    device: str | None
    arrival: int
    """The task that ends when the rank arrives."""
    departure: int


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks of one rank; times in ns since its trace's base."""

    ends: Int64
    main: NDArray[np.int8]
    """`Part` of what isn't in `known`."""
    known: Int64
    """Time in ns by task and `Part`, at most: of the whole task where it is longer."""
    label: NDArray[np.int32]
    """Number of the kernel's name in `labels`; −1: none."""
    labels: tuple[str, ...]
    edges: NDArray[np.int32]
    """Pairs: a task, and one that waits for it."""
    exchanges: tuple[Exchange, ...]
    start: int
    """When the rank's first task could begin."""
    num_guessed: int
    """Waits of a stream or the CPU for GPU work that the trace doesn't record, but its times show."""


@dataclass
class TaskList:
    """Tasks as they are found."""

    ends: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    known: list[tuple[int, int, int]] = field(default_factory=list)
    """Task, part, time."""
    label: dict[int, int] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    num_guessed: int = 0

    def add(self, end: int, main: Part, after: Iterable[int] = ()) -> int:
        """A new task that ends then, and waits for the tasks in `after`."""
        number = len(self.ends)
        self.ends.append(end)
        self.main.append(main)
        self.edges.extend((task, number) for task in after)
        return number

    def spends(self, task: int, part: Part, ns: int) -> None:
        """Says that so much of the task's time, at most, goes into this part."""
        if ns > 0:
            self.known.append((task, part, ns))

    def done(self, labels: Sequence[str], start: int) -> Tasks:
        """All of them."""
        known = np.zeros((len(self.ends), len(Part)), dtype=np.int64)
        for task, part, ns in self.known:
            known[task, part] += ns
        label = np.full(len(self.ends), NO_LABEL, dtype=np.int32)
        for task, number in self.label.items():
            label[task] = number
        return Tasks(
            ends=np.array(self.ends, dtype=np.int64),
            main=np.array(self.main, dtype=np.int8),
            known=known,
            label=label,
            labels=tuple(labels),
            edges=np.array(self.edges, dtype=np.int32).reshape(-1, 2),
            exchanges=tuple(self.exchanges),
            start=start,
            num_guessed=self.num_guessed,
        )
