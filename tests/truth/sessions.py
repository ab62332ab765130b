"""Sessions drawn and run: fault after fault in the same processes."""

import random
from collections.abc import Sequence
from pathlib import Path

from gpurun.launcher.rundir.files import write_json
from tests import forkserver
from tests.truth.plan import FAULTS, Fault, Session, draw_series

NUM_STEPS = 7


def draw_session(
    directory: Path, seed: int, world_size: int, series: Sequence[Sequence[Fault]], num_captures: int = 1
) -> Session:
    """A session in `directory`, with one series for each list of faults."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(f"{seed}/{world_size}")
    drawn = [draw_series(chance, world_size, faults, f"s{i}") for i, faults in enumerate(series)]
    return Session(str(directory), seed, NUM_STEPS, world_size, tuple(drawn), num_captures)


def shuffled(seed: int, num_series: int) -> list[list[Fault]]:
    """Every fault once in each series, in random order."""
    chance = random.Random(seed)
    return [chance.sample(FAULTS, len(FAULTS)) for _ in range(num_series)]


def run_session(session: Session, timeout_s: float) -> None:
    """Runs it in processes of its own; the traces are in its run directory.

    Raises:
        RuntimeError: a rank failed; the message holds what the ranks said.
    """
    path = Path(session.run_dir) / "session.json"
    write_json(path, session)
    done = forkserver.run("tests.truth", str(path), cwd=forkserver.ROOT, timeout_s=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"the session in {path} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
