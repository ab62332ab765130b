"""The stages of a pipeline, from the messages between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise

from gpurun.launcher.trace.analysis.collectives.collective import Collective

Links = Mapping[int, Set[int]]


def pipeline_stages(messages: Iterable[Collective]) -> dict[int, int]:
    """The stage of each rank, from 0 within its pipeline; empty if the messages aren't those of pipelines.

    A pipeline's ranks, in order, send to the next one and maybe back; the last may also send to the first, as
    in an interleaved schedule. All pipelines have the same number of stages.
    """
    there: defaultdict[int, set[int]] = defaultdict(set)
    for source, target in _ways(messages):
        there[source].add(target)
    chains = list(_chains(there))
    if not chains or len({len(chain) for chain in chains}) > 1:
        return {}
    if not all(_is_pipeline(chain, there) for chain in chains):
        return {}
    return {rank: stage for chain in chains for stage, rank in enumerate(chain)}


def _ways(messages: Iterable[Collective]) -> Iterator[tuple[int, int]]:
    """Sender and receiver of each message."""
    for each in messages:
        for part in each.parts:
            for kind, peer in part.local.sent_and_received:
                if peer != part.rank:
                    yield (part.rank, peer) if kind == "send" else (peer, part.rank)


def _chains(there: Links) -> Iterator[Sequence[int]]:
    """The ranks that messages link, in order."""
    near: defaultdict[int, set[int]] = defaultdict(set)
    for source, targets in there.items():
        for target in targets:
            near[source].add(target)
            near[target].add(source)
    left = set(near)
    while left:
        chain, todo = set[int](), [min(left)]
        while todo:
            rank = todo.pop()
            if rank not in chain:
                chain.add(rank)
                todo += near[rank]
        left -= chain
        yield sorted(chain)


def _is_pipeline(chain: Sequence[int], there: Links) -> bool:
    """Whether each rank sends to its neighbours only. A ring that runs one way is attention over a ring."""
    steps = set(pairwise(chain))
    both = steps | {(after, before) for before, after in steps}
    wrap = {(chain[-1], chain[0]), (chain[0], chain[-1])}
    used = {(source, target) for source in chain for target in there.get(source, ())}
    is_ring = len(chain) > 2 and used == steps | {(chain[-1], chain[0])}
    return steps <= used <= both | wrap and not is_ring
