"""Damaged job files, planned as by `gpurun check`."""

import random
from pathlib import Path

from tests.damage.jobs import MACHINES, check, damaged_job

COUNT = 100_000


def case(chance: random.Random, directory: Path) -> None:
    """A job is planned, or refused with a message."""
    path = directory / "job.yaml"
    path.write_bytes(damaged_job(chance))
    check(path, (), chance.choice(MACHINES))
