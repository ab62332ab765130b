"""Virtual time, in whole nanoseconds: a host that submits work, and streams that do it in order. No torch."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass
class Host:
    """The clock of the thread that drives a device: of the rank, or of a replica of DataParallel."""

    now_ns: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def spend(self, duration_ns: int) -> None:
        """Works for so long."""
        with self.lock:
            self.now_ns += duration_ns

    def wait_until(self, at_ns: int) -> None:
        """Waits for a moment, unless it has passed."""
        with self.lock:
            self.now_ns = max(self.now_ns, at_ns)


@dataclass
class Stream:
    """Work of a device, first in, first out."""

    host: Host
    device: int = 0
    depth: int = 1024
    """Pieces of work that wait at most; the host waits for a place before it submits another one."""
    tail_ns: int = 0
    """When all that was submitted so far is done."""
    ends_ns: deque[int] = field(default_factory=deque)

    def submit(self, duration_ns: int, not_before_ns: int = 0) -> int:
        """Adds work that begins when the host has submitted it and all before it is done; returns its end."""
        with self.host.lock:
            self.host.wait_until(self.place_free_at_ns())
            start_ns = max(self.tail_ns, self.host.now_ns, not_before_ns)
            self.tail_ns = start_ns + duration_ns
            self.ends_ns.append(self.tail_ns)
            return self.tail_ns

    def place_free_at_ns(self) -> int:
        """When fewer than `depth` pieces of work are still to be done."""
        while self.ends_ns and self.ends_ns[0] <= self.host.now_ns:
            self.ends_ns.popleft()
        return self.ends_ns[-self.depth] if len(self.ends_ns) >= self.depth else 0

    def wait_until(self, at_ns: int) -> None:
        """What is submitted from now on begins no earlier."""
        with self.host.lock:
            self.tail_ns = max(self.tail_ns, at_ns)

    def synchronize(self) -> None:
        """The host waits for all that was submitted."""
        self.host.wait_until(self.tail_ns)


@dataclass
class Event:
    """A moment of a stream: when all that was submitted before it is done."""

    at_ns: int | None = None
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        """Takes the moment; on an idle stream it is now."""
        with stream.host.lock:
            self.stream, self.at_ns = stream, max(stream.tail_ns, stream.host.now_ns)

    def query(self) -> bool:
        """Whether the moment has passed; true of an event that was never recorded, as in CUDA."""
        return self.stream is None or self.at_ns is None or self.at_ns <= self.stream.host.now_ns

    def synchronize(self) -> None:
        """The host waits for the moment."""
        if self.stream is not None and self.at_ns is not None:
            self.stream.host.wait_until(self.at_ns)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: one of them is not recorded or in the future, or they are of two devices.
        """
        if self.at_ns is None or end.at_ns is None or self.stream is None or end.stream is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not self.query() or not end.query():
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.stream.device != end.stream.device:
            raise RuntimeError("Events of two devices have no time between them.")
        return (end.at_ns - self.at_ns) / 1e6
