"""What Slurm's environment says about a job: its host names, and a port of its own."""

import itertools
import re
from collections.abc import Iterator

from gpurun.launcher.errors import SpecError

FIRST_SLURM_PORT, NUM_SLURM_PORTS = 20_000, 10_000
"""Below Linux's range of ports for outgoing connections, 32768 and up."""
MAX_HOSTS = 100_000
_PART = re.compile(r"\[([^\][]*)\]|([^\][]+)")
_RANGE = re.compile(r"^(\d{1,18})(?:-(\d{1,18}))?$")


def slurm_port(job_id: int) -> int:
    """A port that two jobs on one node are unlikely to share."""
    return FIRST_SLURM_PORT + job_id % NUM_SLURM_PORTS


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that `gpu[01-03,7],login` stands for, in its order: gpu01, gpu02, gpu03, gpu7, login.

    Source: `man scontrol`, "show hostlist".

    Raises:
        SpecError: it isn't such a list, or stands for too many.
    """
    names = list(itertools.islice(_all_names(text), MAX_HOSTS + 1))
    if not names or len(names) > MAX_HOSTS:
        raise SpecError(f"Slurm's list of nodes can't be read: {text[:200]!r}")
    return tuple(names)


def _all_names(text: str) -> Iterator[str]:
    for item in _split(text):
        parts = [
            _numbers(found[1], text) if found[1] is not None else (found[2],)
            for found in _PART.finditer(item)
        ]
        if sum(len(found[0]) for found in _PART.finditer(item)) != len(item) or not item:
            raise SpecError(f"Slurm's list of nodes can't be read: {text[:200]!r}")
        yield from map("".join, itertools.product(*parts))


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _numbers(text: str, whole: str) -> tuple[str, ...]:
    """`01-03,7` as 01, 02, 03, 7: as wide as the first number of a range."""
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise SpecError(f"Slurm's list of nodes can't be read: {whole[:200]!r}")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise SpecError(f"Slurm's list of nodes can't be read: {whole[:200]!r}")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(found)
