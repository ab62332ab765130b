"""What is injected: faults of known cause, rank and size, drawn from a seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Fault = Literal["none", "straggler", "split", "input", "transfer", "host", "copies"]
"""The injected causes, under the names that our report gives them."""
FAULTS: tuple[Fault, ...] = get_args(Fault)

STEP_MS = (40.0, 120.0)
SIZE_MS = (10.0, 60.0)
WORLD_SIZES = (2, 3)
REFERENCE = "reference"


@dataclass(frozen=True)
class Case:
    """One run with one fault."""

    id: str
    fault: Fault
    ranks: tuple[int, ...]
    """Those that have it, which the report has to name: for `split` the one with most samples."""
    ms: float
    """How much longer a step of such a rank takes; for `split`, than that of the rank with fewest samples."""
    split: tuple[int, ...]

    def ms_on(self, rank: int, fault: Fault) -> float:
        """How long `rank` suffers from `fault` in each step."""
        return self.ms if fault == self.fault and rank in self.ranks else 0.0


@dataclass(frozen=True)
class Lengths:
    """How long a rank was at what it had to do in a step, by its own clock: who sleeps oversleeps."""

    work_ms: float
    fault_ms: float


@dataclass(frozen=True)
class Series:
    """Cases with the same work to do, run one after the other; the first has no fault."""

    fixed_ms: float
    """What every rank computes in a step, whatever its samples."""
    sample_ms: float
    """What it computes for each sample."""
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Session:
    """What one group of processes runs."""

    run_dir: str
    seed: int
    num_steps: int
    """Steps in each trace."""
    world_size: int
    series: tuple[Series, ...]

    num_captures: int = 1
    """Of each case; all cases of a series come between two of the same."""

    @property
    def captures(self) -> Iterator[tuple[Series, Case, int]]:
        """In the order in which they are taken, with their number."""
        for series in self.series:
            for number in range(self.num_captures):
                yield from ((series, case, number) for case in series.cases)


def capture_id(case: Case, number: int) -> str:
    """The variant that holds a capture of the case; the first is 0."""
    return f"{case.id}-{number}"


def delays_file(run_dir: str, variant_id: str) -> Path:
    """How long the link held up each step of a slow-link case, in ms: a JSON list."""
    return Path(run_dir) / "delays" / f"{variant_id}.json"


def lengths_file(run_dir: str, variant_id: str, rank: int) -> Path:
    """What a rank has really done in each step of a capture: a JSON list of `Lengths`."""
    return Path(run_dir) / "lengths" / f"{variant_id}-{rank}.json"


def draw_series(chance: random.Random, world_size: int, faults: Sequence[Fault], name: str) -> Series:
    """A reference and one case of each of `faults`, all of random size."""
    samples = chance.randint(5, 8)
    step_ms = chance.uniform(*STEP_MS)
    sample_ms = chance.uniform(0.3, 0.9) * step_ms / samples
    even = (samples,) * world_size
    cases = [Case(f"{name}-{REFERENCE}", "none", (), 0.0, even)]
    for place, fault in enumerate(faults):
        case_id = f"{name}-{place}-{fault}"
        if fault == "split":
            cases.append(_uneven(chance, case_id, even, sample_ms))
        else:
            ranks = _ranks(chance, fault, world_size)
            size_ms = 0.0 if fault == "none" else chance.uniform(*SIZE_MS)
            cases.append(Case(case_id, fault, ranks, size_ms, even))
    return Series(step_ms - sample_ms * samples, sample_ms, tuple(cases))


def slow_device() -> Series:
    """Two samples more, on a device that takes three times as long for each: the device is the cause."""
    sample_ms, split = 2.0, (17, 15)
    cases = (
        Case(f"slow-{REFERENCE}", "none", (), 0.0, (16, 16)),
        Case("slow-device", "straggler", (0,), 2 * sample_ms * split[0], split),
    )
    return Series(0.0, sample_ms, cases)


def _ranks(chance: random.Random, fault: Fault, world_size: int) -> tuple[int, ...]:
    """A straggler is one rank, a link is everybody's; the rest hits either."""
    everybody = tuple(range(world_size))
    if fault == "none":
        return ()
    if fault == "straggler" or (fault != "transfer" and chance.random() < 0.5):
        return (chance.choice(everybody),)
    return everybody


def _uneven(chance: random.Random, case_id: str, even: Sequence[int], sample_ms: float) -> Case:
    """Some samples moved from one rank to another, as many as make a difference within `SIZE_MS`."""
    smallest, largest = SIZE_MS
    fits = [n for n in range(1, even[0]) if smallest <= 2 * n * sample_ms <= largest]
    moved = chance.choice(fits or [1])
    giver, taker = chance.sample(range(len(even)), 2)
    split = list(even)
    split[giver], split[taker] = split[giver] - moved, split[taker] + moved
    return Case(case_id, "split", (taker,), 2 * moved * sample_ms, tuple(split))
