"""Which ranks a collective is of: its group is a name and a set of ranks.

A name alone doesn't do: `split_group` and meshes of devices give disjoint groups one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.trace.kineto.columns import CommFacts

UNNAMED = "default"
"""The name of a group that the trace doesn't name."""
DEFAULT_DESCRIPTION = "default_pg"
"""How torch describes the group of all ranks."""
MAX_WORLD = 1 << 20
"""Larger numbers of ranks are damage."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A process group, as one rank's trace has it."""

    name: str
    ranks: Ranks | None
    """Sorted; `None` if the trace doesn't say."""
    is_ambiguous: bool = False
    """Whether it may be any of several groups that this rank is in."""


@dataclass(frozen=True)
class ProcessGroups:
    """What the header's `distributedInfo` says about the groups of this rank."""

    configured: Mapping[str, Ranks | None]
    """The ranks of each group by its name; `None` where they are not listed."""
    sizes: Mapping[str, int]
    """Number of ranks by name of the group, where it is known."""
    world: Ranks | None
    """All ranks, if their number is known."""

    @staticmethod
    def of(header: Mapping[str, Any]) -> ProcessGroups:
        """Reads the header; entries in another format than torch's are ignored."""
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        listed = info.get("pg_config")
        groups = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        size = info.get("world_size")
        world = tuple(range(size)) if type(size) is int and 0 < size < MAX_WORLD else None
        sizes = {_name(each): _size(each, size) for each in groups}
        return ProcessGroups(
            {_name(each): _ranks(each, world) for each in groups},
            {name: size for name, size in sizes.items() if size is not None},
            world,
        )

    def group(self, facts: CommFacts) -> Group:
        """The group of this collective: from its own arguments, else from the header."""
        if facts.group is None and facts.ranks is None:
            return self._unnamed(facts)
        name = UNNAMED if facts.group is None else facts.group
        return Group(name, facts.ranks or self.configured.get(name) or self._if_world(facts.group_size))

    def size(self, facts: CommFacts) -> int | None:
        """Its number of ranks: from the kernel, else from the header."""
        if facts.group_size is not None:
            return facts.group_size
        group = self.group(facts)
        return self.sizes.get(group.name) if group.ranks is None else len(group.ranks)

    def _unnamed(self, facts: CommFacts) -> Group:
        """The only group that this rank has; of several, which one isn't known."""
        if len(self.configured) == 1:
            ((name, ranks),) = self.configured.items()
            return Group(name, ranks)
        every = set(self.configured.values())
        if len(every) == 1:
            return Group(UNNAMED, every.pop())
        ranks = self._if_world(facts.group_size)
        return Group(UNNAMED, ranks, is_ambiguous=ranks is None and len(every) > 1)

    def _if_world(self, size: int | None) -> Ranks | None:
        """All ranks, if the group is as large as that; a group of two can't be another one."""
        if self.world is None or (size is None and len(self.world) > 2):
            return None
        return self.world if size in (None, len(self.world)) else None


def _name(group: Mapping[str, Any]) -> str:
    return str(group.get("pg_name", UNNAMED))


def _ranks(group: Mapping[str, Any], world: Ranks | None) -> Ranks | None:
    listed = group.get("ranks")
    if isinstance(listed, list) and listed and all(type(rank) is int and rank >= 0 for rank in listed):
        return tuple(sorted(set(listed)))
    is_world = group.get("pg_desc") == DEFAULT_DESCRIPTION or (world and group.get("pg_size") == len(world))
    return world if is_world else None


def _size(group: Mapping[str, Any], world: object) -> int | None:
    ranks = group.get("ranks")
    sizes = [len(ranks) if isinstance(ranks, list) and ranks else None, group.get("pg_size")]
    if group.get("pg_desc") == DEFAULT_DESCRIPTION:
        sizes.append(world)
    return next((size for size in sizes if type(size) is int and size > 0), None)
