"""The process groups that a trace's header describes: their names, and how many ranks each has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpurun.launcher.trace.kineto.columns import CommFacts

UNNAMED = "default"
"""Stands for the group where the trace names none."""
DEFAULT_DESCRIPTION = "default_pg"
"""How torch describes the group of all ranks."""


@dataclass(frozen=True)
class ProcessGroups:
    """What the header's `distributedInfo` says about groups."""

    unnamed: str
    """The name of the group that a collective belongs to if its trace doesn't say."""
    sizes: Mapping[str, int]
    """Number of ranks by name of the group, where it is known."""

    @staticmethod
    def of(header: Mapping[str, Any]) -> ProcessGroups:
        """Reads the header; what isn't as torch writes it counts as not there."""
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        listed = info.get("pg_config")
        groups = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        world = info.get("world_size")
        named = {_name(each): _size(each, world) for each in groups}
        sizes = {name: size for name, size in named.items() if size is not None}
        return ProcessGroups(_name(groups[0]) if len(groups) == 1 else UNNAMED, sizes)

    def name(self, facts: CommFacts) -> str:
        """The group of this collective."""
        return self.unnamed if facts.group is None else facts.group

    def size(self, facts: CommFacts) -> int | None:
        """Its number of ranks: as the kernel says, else as the header says."""
        return self.sizes.get(self.name(facts)) if facts.group_size is None else facts.group_size


def _name(group: Mapping[str, Any]) -> str:
    return str(group.get("pg_name", UNNAMED))


def _size(group: Mapping[str, Any], world: object) -> int | None:
    ranks = group.get("ranks")
    sizes = [len(ranks) if isinstance(ranks, list) else None, group.get("pg_size")]
    if group.get("pg_desc") == DEFAULT_DESCRIPTION:
        sizes.append(world)
    return next((size for size in sizes if type(size) is int and size > 0), None)
