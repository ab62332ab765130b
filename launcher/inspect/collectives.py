"""Which collective each rank has reached, from torch's flight recorder. Pure.

Ranks are compared by sequence numbers alone: gloo never records that a collective has begun or ended. Each
backend counts its own collectives, also where several belong to one process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import msgspec

from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.units import plural, ranks_text

MISMATCHED = "mismatched collectives"
_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
"""Collectives whose input has the same number of elements on all ranks."""
_COMPLETED = "completed"
"""Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, `completed_state`."""


@dataclass(frozen=True)
class CalledCollective:
    """A collective that a rank has called."""

    group: str
    """torch's number of the process group."""
    seq: int
    """Counts the collectives of the group from 1, equally on every rank."""
    name: str
    """`all_reduce`."""
    backend: str = "gloo"
    is_pending: bool = field(default=False, compare=False)
    """Whether the GPU has it before it, or still works on it; gloo never says."""
    num_elements: int | None = field(default=None, compare=False)
    """The number of elements of its input, where it has to be the same on all ranks."""

    @property
    def counted_in(self) -> tuple[str, str]:
        """The scope of its number: the collectives of one backend in one group."""
        return self.backend, self.group

    def __str__(self) -> str:
        return f"{self.name} #{self.seq}" + (f" of group {self.group}" if self.group != "0" else "")


History = tuple[CalledCollective, ...]
"""The collectives of one rank, oldest first, as many as the flight recorder keeps."""


class _Entry(msgspec.Struct):
    collective_seq_id: int
    process_group: tuple[str, str]
    profiling_name: str
    is_p2p: bool = False
    state: str = _COMPLETED
    input_sizes: list[list[int]] = []


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


@dataclass(frozen=True)
class Gap:
    """The collective that some ranks have called and others have not."""

    collective: CalledCollective
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def parse_history(dump: bytes) -> History:
    """The collectives in a dump of the flight recorder, without sends and receives.

    Of collectives that NCCL runs as one, one more entry, with their number, says when they are completed. One
    of sends and receives has the number of the collective before it, which says nothing of what comes after.
    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective` and `endCoalescing`.

    Raises:
        msgspec.MsgspecError: this is not such a dump.
    """
    entries = msgspec.json.decode(dump, type=_Dump).entries
    done: set[tuple[tuple[str, str], int]] = set()
    called = []
    for collective in reversed([_collective(entry) for entry in entries if not entry.is_p2p]):
        if not collective.is_pending:
            done.add((collective.counted_in, collective.seq))
        called.append(replace(collective, is_pending=(collective.counted_in, collective.seq) not in done))
    return tuple(reversed(called))


def _collective(entry: _Entry) -> CalledCollective:
    """torch's name begins with that of the backend: `nccl:all_reduce`."""
    backend, _, name = entry.profiling_name.rpartition(":")
    is_pending = backend not in ("", CPU.backend) and entry.state != _COMPLETED
    size = sum(map(prod, entry.input_sizes)) if name in _SAME_SIZE and entry.input_sizes else None
    return CalledCollective(entry.process_group[0], entry.collective_seq_id, name, backend, is_pending, size)


def find_gap(histories: Mapping[int, History]) -> Gap | None:
    """The first collective that not all ranks of its group have called; `None`: there is none.

    A rank belongs to a group if it has called one of its collectives; all ranks belong to the default group.
    """
    counts = dict.fromkeys(collective.counted_in for history in histories.values() for collective in history)
    gaps = [gap for counted_in in counts if (gap := _gap_in(counted_in, histories))]
    return gaps[0] if gaps else None


def _gap_in(counted_in: tuple[str, str], histories: Mapping[int, History]) -> Gap | None:
    backend, group = counted_in
    last = {rank: _last(history, counted_in) for rank, history in histories.items()}
    if group != "0":
        last = {rank: seq for rank, seq in last.items() if seq}
    lowest, highest = min(last.values()), max(last.values())
    if lowest == highest:
        return None
    waiting = tuple(rank for rank, seq in last.items() if seq > lowest)
    missing = tuple(rank for rank, seq in last.items() if seq == lowest)
    after = (counted_in, lowest + 1)
    called = [
        collective
        for rank in waiting
        for collective in histories[rank]
        if (collective.counted_in, collective.seq) == after
    ]
    name = called[0].name if called else "collective"
    return Gap(CalledCollective(group, lowest + 1, name, backend), waiting, missing)


def _last(history: History, counted_in: tuple[str, str]) -> int:
    return max((collective.seq for collective in history if collective.counted_in == counted_in), default=0)


@dataclass(frozen=True)
class Mismatch:
    """The calls of ranks under one number, which should be one collective."""

    calls: tuple[tuple[CalledCollective, tuple[int, ...]], ...]
    """Each call with its ranks."""

    def __str__(self) -> str:
        """`rank 0 called all_reduce #4, rank 1 called broadcast #4`."""
        has_names = len({call.name for call, _ in self.calls}) > 1
        return ", ".join(
            f"{ranks_text(ranks)} called {call if has_names else _with_size(call)}"
            for call, ranks in self.calls
        )


def _with_size(call: CalledCollective) -> str:
    return f"{call} with {plural(call.num_elements or 0, 'element')}"


def find_mismatch(histories: Mapping[int, History]) -> Mismatch | None:
    """The first collective that ranks called by several names, or with several sizes; `None`: there is none.

    gloo accepts some of these without an error, and then each rank has other data. Numbers that a rank has
    more than once, as for calls that NCCL ran as one, are not compared.
    """
    calls: dict[tuple[str, str, int], list[tuple[CalledCollective, int]]] = {}
    for rank, history in histories.items():
        for call in history:
            calls.setdefault((*call.counted_in, call.seq), []).append((call, rank))
    found = [_by_kind(ones) for ones in calls.values() if len({rank for _, rank in ones}) == len(ones)]
    several = [mismatch for mismatch in found if len(mismatch.calls) > 1]
    return min(several, key=lambda mismatch: mismatch.calls[0][0].seq, default=None)


def _by_kind(calls: Sequence[tuple[CalledCollective, int]]) -> Mismatch:
    kinds: dict[tuple[str, int | None], list[tuple[CalledCollective, int]]] = {}
    for call, rank in calls:
        kinds.setdefault((call.name, call.num_elements), []).append((call, rank))
    return Mismatch(tuple((ones[0][0], tuple(rank for _, rank in ones)) for ones in kinds.values()))


def find_pending(histories: Mapping[int, History]) -> CalledCollective | None:
    """The first collective that all ranks have called and no GPU has completed; `None`: there is none."""
    first = [
        next((collective for collective in history if collective.is_pending), None)
        for history in histories.values()
    ]
    return first[0] if len(set(first)) == 1 else None


def last_ones(history: History) -> Sequence[CalledCollective]:
    """The newest collective of each group and backend."""
    return list({collective.counted_in: collective for collective in history}.values())
