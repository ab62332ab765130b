"""`gpurun stacks` of a job on several nodes: from another terminal, the command on node 0 asks them all.

A request is a file beside the control blocks, and so is the answer: the directory belongs to the owner alone.
"""

import contextlib
import secrets
import time
from pathlib import Path

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.snapshot import STACKS_S, RankSnapshot, observe
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.files import RunDir, read_json, write_bytes, write_json

ANSWER_S = 3 * STACKS_S + 4.0
"""How long the command may take: it asks the other nodes, which ask their ranks."""
_POLL_S = 0.05


def look_at(run: RunDir, launch: str) -> tuple[RankSnapshot, ...]:
    """All ranks of a launch that runs, those of other nodes too.

    Raises:
        MachineError: the launch spans nodes, and the command on node 0 doesn't answer.
    """
    if not read_json(run.plan, Plan).nodes:
        return observe(run.control(launch))
    token = secrets.token_hex(8)
    write_bytes(_request(run, launch), token.encode())
    path = _answer(run, launch, token)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        if path.exists():
            sights = read_json(path, tuple[RankSnapshot, ...])
            path.unlink(missing_ok=True)
            return sights
        time.sleep(_POLL_S)
    raise MachineError(f"{run.path}: no answer within {ANSWER_S:g} s; does its gpurun still run?")


def asked(run: RunDir, launch: str) -> str | None:
    """The token of a request, which is taken by that; `None`: nobody asks."""
    path = _request(run, launch)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        token = path.read_text()
        path.unlink()
        return token if token.isalnum() else None
    return None


def answer(run: RunDir, launch: str, token: str, sights: tuple[RankSnapshot, ...]) -> None:
    """Says what was seen; whoever asked may have gone, and a full disk disturbs nothing."""
    with contextlib.suppress(MachineError):
        write_json(_answer(run, launch, token), sights)


def _request(run: RunDir, launch: str) -> Path:
    return run.control(launch) / "look"


def _answer(run: RunDir, launch: str, token: str) -> Path:
    return run.control(launch) / f"seen-{token}.json"
