"""What `make test-all` runs and `make test` does not: further cases of one kind."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_WHOLE = "GPURUN_SLOW_TESTS" in os.environ
"""Whether all is run that there is."""


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of one kind, of which `make test` takes the first."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    rest = [pytest.param(*value, marks=pytest.mark.slow) for value in values[count:]]
    return [*(pytest.param(*value) for value in values[:count]), *rest]
