"""Which collective each rank has reached, from torch's flight recorder. Pure.

Ranks are compared by sequence numbers alone: gloo never records that a collective has begun or ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Collective:
    """A collective that a rank has called."""

    group: str
    """torch's number of the process group."""
    seq: int
    """Counts the collectives of the group from 1, equally on every rank."""
    name: str
    """`all_reduce`."""

    def __str__(self) -> str:
        return f"{self.name} #{self.seq}" + (f" of group {self.group}" if self.group != "0" else "")


History = tuple[Collective, ...]
"""The collectives of one rank, oldest first, as many as the flight recorder keeps."""


class _Entry(msgspec.Struct):
    collective_seq_id: int
    process_group: tuple[str, str]
    profiling_name: str
    is_p2p: bool = False


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


@dataclass(frozen=True)
class Gap:
    """The collective that some ranks have called and others have not."""

    collective: Collective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def parse_history(dump: bytes) -> History:
    """The collectives in a dump of the flight recorder, without sends and receives.

    Raises:
        msgspec.MsgspecError: this is not such a dump.
    """
    entries = msgspec.json.decode(dump, type=_Dump).entries
    return tuple(
        Collective(entry.process_group[0], entry.collective_seq_id, _name(entry.profiling_name))
        for entry in entries
        if not entry.is_p2p
    )


def _name(profiling_name: str) -> str:
    """`all_reduce` of `gloo:all_reduce`."""
    return profiling_name.rpartition(":")[2]


def find_gap(histories: Mapping[int, History]) -> Gap | None:
    """The first collective that not all ranks of its group have called; `None`: there is none.

    A rank belongs to a group if it has called one of its collectives; all ranks belong to the default group.
    """
    groups = dict.fromkeys(collective.group for history in histories.values() for collective in history)
    gaps = [gap for group in groups if (gap := _gap_in(group, histories))]
    return gaps[0] if gaps else None


def _gap_in(group: str, histories: Mapping[int, History]) -> Gap | None:
    last = {rank: _last(history, group) for rank, history in histories.items()}
    if group != "0":
        last = {rank: seq for rank, seq in last.items() if seq}
    lowest, highest = min(last.values()), max(last.values())
    if lowest == highest:
        return None
    waiting = tuple(rank for rank, seq in last.items() if seq > lowest)
    missing = tuple(rank for rank, seq in last.items() if seq == lowest)
    called = [c for rank in waiting for c in histories[rank] if (c.group, c.seq) == (group, lowest + 1)]
    name = called[0].name if called else "collective"
    return Gap(Collective(group, lowest + 1, name), waiting, missing)


def _last(history: History, group: str) -> int:
    return max((collective.seq for collective in history if collective.group == group), default=0)


def last_ones(history: History) -> Sequence[Collective]:
    """The newest collective of each group."""
    return list({collective.group: collective for collective in history}.values())
