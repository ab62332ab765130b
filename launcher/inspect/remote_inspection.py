"""`gpurun stacks` for a job on several nodes: it asks the command on node 0, which asks all nodes.

Request and answer are files next to the control blocks: only the owner has access to that directory.
"""

import contextlib
import secrets
import time

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.snapshot import STACKS_S, RankSnapshot, observe_in
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.control import ControlDir, open_own
from gpurun.launcher.rundir.files import RunDir, read_json

ANSWER_S = 3 * STACKS_S + 4.0
"""How long the command may take to answer: it asks the other nodes, which ask their ranks."""
_POLL_S = 0.05
_REQUEST = "look"


def take_snapshots(run: RunDir, launch: str) -> tuple[RankSnapshot, ...]:
    """Snapshots of all ranks of a running launch, on all nodes.

    Raises:
        MachineError: the launch spans nodes, and the command on node 0 does not answer.
    """
    with open_own(run.control(launch)) as control:
        if not read_json(run.plan, Plan).nodes:
            return observe_in(control)
        token = secrets.token_hex(8)
        control.write(_REQUEST, token.encode())
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if content := control.read(_answer_name(token)):
                control.remove(_answer_name(token))
                return msgspec.json.decode(content, type=tuple[RankSnapshot, ...])
            time.sleep(_POLL_S)
    raise MachineError(f"{run.path}: no answer within {ANSWER_S:g} s; is its gpurun still running?")


def take_request(run: RunDir, launch: str) -> str | None:
    """The token of a request, which is removed; `None`: there is no request."""
    with contextlib.suppress(OSError), ControlDir(run.control(launch)) as control:
        if token := control.read(_REQUEST).decode("ascii", "replace"):
            control.remove(_REQUEST)
            return token if token.isalnum() else None
    return None


def answer(run: RunDir, launch: str, token: str, snapshots: tuple[RankSnapshot, ...]) -> None:
    """Writes the answer; the asker may be gone, and a full disk must not stop the run."""
    with contextlib.suppress(OSError), ControlDir(run.control(launch)) as control:
        control.write(_answer_name(token), msgspec.json.encode(snapshots))


def _answer_name(token: str) -> str:
    return f"seen-{token}.json"
