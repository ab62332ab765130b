"""The largest batch that devices hold, from attempts that may fail."""

MARGIN = 0.05
"""Of the batch that fitted, to be left free: memory fragments, and communication needs buffers too."""
RESOLUTION = 32
"""The search ends when what failed is larger than what fitted by one part in so many."""
MAX_SAMPLES = 1 << 20
"""On one device. Beyond that it isn't memory that bounds a batch."""


def next_attempt(fits: int, fails: int | None) -> int | None:
    """The batch to try: doubled until one fails, then halfway; `None` when they are near enough.

    Args:
        fits: the largest that fitted; 0 before the first.
        fails: the smallest that didn't, if there is one.
    """
    if fails is None:
        return max(1, 2 * fits) if fits < MAX_SAMPLES else None
    return None if fails - fits <= max(1, fits // RESOLUTION) else (fits + fails) // 2


def with_margin(fits: int) -> int:
    """The samples to use of a device that held `fits`."""
    return max(1, int(fits * (1 - MARGIN))) if fits else 0
