"""`gpurun capture`: makes a running job take traces, from another terminal."""

import time
from collections.abc import Collection, Sequence
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.claim import running_launch
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, RankState, capture_name, open_own
from gpurun.launcher.rundir.files import RunDir, as_json, read_json
from gpurun.launcher.rundir.records import CaptureRequest
from gpurun.launcher.units import ranks_text

_POLL_S = 0.05
_HEAD_START_STEPS = 2
"""How many steps ahead a trace begins, so that every rank sees the request in time."""


def capture_running(run: RunDir, steps: int, ranks: Sequence[int] | None, timeout_s: float) -> Path:
    """Requests a trace of the next steps, and returns the directory of the traces once all are written.

    Args:
        ranks: ranks to record; `None`: all.

    Raises:
        SpecError: the job is not running, is not the user's own, or has no such rank.
        MachineError: the job ended first, or took no trace in time.
    """
    launch = running_launch(run)
    refuse_on_nodes(read_json(run.plan, Plan))
    with open_own(run.control(launch)) as control:
        states = control.running()
        missing = [rank for rank in ranks or () if rank not in states]
        if not states:
            raise SpecError(f"{run.launch(launch)}: {NOT_STARTED}")
        if missing:
            raise SpecError(f"{launch} has no {ranks_text(missing)}; it has {ranks_text(tuple(states))}")
        number = request(control, steps, ranks, states)
    wanted = [
        run.capture(launch, number) / f"rank{rank}.pt.trace.json.gz"
        for rank in (states if ranks is None else ranks)
    ]
    await_files(wanted, tuple(states.values()), timeout_s)
    return run.capture(launch, number)


def refuse_on_nodes(plan: Plan) -> None:
    """Requests reach the ranks of one machine only.

    Raises:
        SpecError: the job has several nodes.
    """
    if plan.nodes:
        raise SpecError(
            f"gpurun capture works on one machine, and this job runs on {len(plan.nodes)} nodes\n"
            "    put `profile: {steps: 3}` into the job to take traces on all of them"
        )


def request(
    control: ControlDir, steps: int, ranks: Sequence[int] | None, states: dict[int, RankState]
) -> int:
    """Writes a request, then rings every rank's bell; returns the request's number."""
    number = 1 + sum(name.startswith("capture") for name in control.names())
    first_step = max(state.steps for state in states.values()) + _HEAD_START_STEPS
    wanted = CaptureRequest(number, steps, None if ranks is None else tuple(ranks), first_step)
    try:
        control.write(capture_name(number), as_json(wanted).encode())
        for rank in states:
            block = control.block(rank)
            block.ring(number)
            block.close()
    except OSError as error:
        raise MachineError(f"the job has ended, or its control directory was changed: {error}") from error
    return number


def await_files(files: Sequence[Path], states: Collection[RankState], timeout_s: float) -> None:
    """Returns when all files are there.

    Raises:
        MachineError: the ranks have ended without them, or the time is up.
    """
    deadline = time.monotonic() + timeout_s
    while not all(file.exists() for file in files):
        ended = not any(state.is_running for state in states)
        if ended and not all(file.exists() for file in files):
            raise MachineError("the ranks ended before they took the trace; capture earlier, or fewer steps")
        if time.monotonic() > deadline:
            raise MachineError(
                f"no trace within {timeout_s:g} s: does the job still complete steps? see `gpurun stacks`\n"
                "    the ranks will still take the trace when they reach their next step"
            )
        time.sleep(_POLL_S)
