"""Follows what rank 0 of a launch says it is doing."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpurun.launcher.rundir.records import Event


@dataclass
class EventReader:
    """Reads the new lines of an `events.jsonl` and adds up the time that each variant took."""

    path: Path
    last: Event | None = None
    spent_ns: dict[str | None, int] = field(default_factory=dict)
    _offset: int = 0

    def read(self) -> list[Event]:
        """Events that were written since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        events = [msgspec.json.decode(line, type=Event) for line in text.splitlines()]
        for event in events:
            self._count(event)
        return events

    def _count(self, event: Event) -> None:
        if self.last is not None:
            spent = event.time_ns - self.last.time_ns
            self.spent_ns[self.last.variant] = self.spent_ns.get(self.last.variant, 0) + spent
        self.last = event

    def spent_s(self, now_ns: int) -> float:
        """Seconds that the launch has spent on the variant that it is busy with now."""
        if self.last is None:
            return 0.0
        so_far_ns = self.spent_ns.get(self.last.variant, 0)
        return (so_far_ns + now_ns - self.last.time_ns) / 1e9
