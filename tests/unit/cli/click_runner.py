"""Click's runner of commands, the same with every version of Click."""

import inspect
from typing import Any

from click.testing import CliRunner


def runner() -> CliRunner:
    """One that keeps stderr apart, as click's does by itself since 8.2."""
    make: Any = CliRunner
    mixes = "mix_stderr" in inspect.signature(make).parameters
    found: CliRunner = make(mix_stderr=False) if mixes else make()
    return found
