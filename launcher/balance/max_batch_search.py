"""The search for the largest batch that fits into memory."""

MARGIN = 0.05
"""Share of the fitting batch to leave free, for fragmentation and communication buffers."""
RESOLUTION = 32
"""The search ends when the failed size exceeds the fitting one by at most one part in so many."""
MAX_SAMPLES = 1 << 20
"""Samples per device; larger batches aren't limited by memory."""


def next_attempt(fits: int, fails: int | None) -> int | None:
    """The batch to try next: doubled until one fails, then halfway; `None` when close enough.

    Args:
        fits: the largest that fitted; 0 before the first.
        fails: the smallest that didn't, if there is one.
    """
    if fails is None:
        return max(1, 2 * fits) if fits < MAX_SAMPLES else None
    return None if fails - fits <= max(1, fits // RESOLUTION) else (fits + fails) // 2


def with_margin(fits: int) -> int:
    """The samples to use on a device that held `fits`."""
    return max(1, int(fits * (1 - MARGIN))) if fits else 0
