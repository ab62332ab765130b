"""`gpurun capture`: makes a running job take traces, from another terminal."""

import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.inspect.questions import Answer, Declined, TracesRequested, WantTraces, ask
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.claim import running_launch
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, RankState, capture_name, open_own
from gpurun.launcher.rundir.files import RunDir, as_json
from gpurun.launcher.rundir.records import CaptureRequest
from gpurun.launcher.units import ranks_text

_POLL_S = 0.05
HEAD_START_STEPS = 2
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
    wanted = WantTraces(steps, None if ranks is None else tuple(ranks))
    with open_own(run.control(launch)) as control:
        states = control.running()
        if not states:
            raise SpecError(f"{run.launch(launch)}: {NOT_STARTED}")
        requested = (
            traces_requested(ask(control, wanted))
            if run.read(run.plan, Plan).nodes
            else request(control, wanted, states, launch)
        )
    files = [run.captured_trace(launch, requested.number, rank) for rank in requested.ranks]
    await_files(files, tuple(states.values()), timeout_s)
    return run.capture(launch, requested.number)


def traces_requested(found: Answer) -> TracesRequested:
    """The answer of a job on several nodes.

    Raises:
        SpecError: it was declined.
    """
    if isinstance(found, Declined):
        raise SpecError(found.why)
    assert isinstance(found, TracesRequested)
    return found


def request(
    control: ControlDir, wanted: WantTraces, states: dict[int, RankState], launch: str
) -> TracesRequested:
    """Writes a request, then rings every rank's bell.

    Raises:
        SpecError: there is no such rank.
        MachineError: the job has ended.
    """
    recorded = ranks_to_record(wanted, states, launch)
    first_step = max(state.steps for state in states.values()) + HEAD_START_STEPS
    number = next_number(control)
    try:
        write_request(control, CaptureRequest(number, wanted.steps, wanted.ranks, first_step))
        ring(control, number, states)
    except OSError as error:
        raise MachineError(f"the job has ended, or its control directory was changed: {error}") from error
    return TracesRequested(number, recorded)


def ranks_to_record(wanted: WantTraces, ranks: Collection[int], launch: str) -> tuple[int, ...]:
    """The ranks of a launch to record.

    Raises:
        SpecError: it lacks one that is wanted.
    """
    if missing := [rank for rank in wanted.ranks or () if rank not in ranks]:
        raise SpecError(f"{launch} has no {ranks_text(missing)}; it has {ranks_text(tuple(sorted(ranks)))}")
    return tuple(sorted(ranks)) if wanted.ranks is None else wanted.ranks


def next_number(control: ControlDir) -> int:
    """The number of the next request."""
    return 1 + sum(name.startswith("capture") for name in control.names())


def write_request(control: ControlDir, wanted: CaptureRequest) -> None:
    """Writes a request, which no rank reads until a bell rings.

    Raises:
        OSError: it can't be written.
    """
    control.write(capture_name(wanted.number), as_json(wanted).encode())


def ring(control: ControlDir, number: int, ranks: Iterable[int]) -> None:
    """Lets ranks of this machine know of a request.

    Raises:
        OSError: a rank has not started, or has ended.
    """
    for rank in ranks:
        block = control.block(rank)
        block.ring(number)
        block.close()


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
