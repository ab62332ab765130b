"""A row at several resolutions, so that a window takes about as many blocks as it has pixels."""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.launcher.tensorboard_plugin.timeline.blocks import Blocks, merge

FEW_BLOCKS = 2000
"""A row with fewer is merged as it is asked for."""
FINEST_NS = 256
STEP = 4
"""From one level to the next blocks get this much longer."""
WORTH = 0.6
"""A level with more than this share of the blocks of the finer one isn't kept."""


def coarser(blocks: Blocks) -> Iterator[tuple[int, Blocks]]:
    """The row's levels, the finest first, each with the length below which its blocks were merged, in ns."""
    shortest_ns = FINEST_NS
    kept = len(blocks)
    while kept > FEW_BLOCKS and len(blocks):
        blocks = merge(blocks, shortest_ns)
        if len(blocks) <= WORTH * kept:
            kept = len(blocks)
            yield shortest_ns, blocks
        if shortest_ns > int(blocks.end[-1]) - int(blocks.start[0]):
            return
        shortest_ns *= STEP
