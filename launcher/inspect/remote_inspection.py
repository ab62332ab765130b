"""`gpurun stacks` for a job on several nodes: it asks the command on node 0, which asks all nodes.

Request and answer are files next to the control blocks: only the owner has access to that directory.
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
"""How long the command may take to answer: it asks the other nodes, which ask their ranks."""
_POLL_S = 0.05


def take_snapshots(run: RunDir, launch: str) -> tuple[RankSnapshot, ...]:
    """Snapshots of all ranks of a running launch, on all nodes.

    Raises:
        MachineError: the launch spans nodes, and the command on node 0 does not answer.
    """
    if not read_json(run.plan, Plan).nodes:
        return observe(run.control(launch))
    token = secrets.token_hex(8)
    write_bytes(_request(run, launch), token.encode())
    path = _answer(run, launch, token)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        if path.exists():
            snapshots = read_json(path, tuple[RankSnapshot, ...])
            path.unlink(missing_ok=True)
            return snapshots
        time.sleep(_POLL_S)
    raise MachineError(f"{run.path}: no answer within {ANSWER_S:g} s; is its gpurun still running?")


def take_request(run: RunDir, launch: str) -> str | None:
    """The token of a request, which is removed; `None`: there is no request."""
    path = _request(run, launch)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        token = path.read_text()
        path.unlink()
        return token if token.isalnum() else None
    return None


def answer(run: RunDir, launch: str, token: str, snapshots: tuple[RankSnapshot, ...]) -> None:
    """Writes the answer; the asker may be gone, and a full disk must not stop the run."""
    with contextlib.suppress(MachineError):
        write_json(_answer(run, launch, token), snapshots)


def _request(run: RunDir, launch: str) -> Path:
    return run.control(launch) / "look"


def _answer(run: RunDir, launch: str, token: str) -> Path:
    return run.control(launch) / f"seen-{token}.json"
