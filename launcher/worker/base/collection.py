"""Stretches of a rank's time without Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector out of timed steps: it would hit one rank and make the others wait.

    And out of large imports, which make objects and no garbage: a tenth of their time would go into looking.
    """
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
