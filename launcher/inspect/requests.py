"""Requests of another terminal to a running job: traces (`gpurun capture`), and what its ranks do.

On several nodes only the command on node 0 reaches all ranks. The question to it is a file in the launch's
control directory, which is its owner's alone, and so is the answer.
"""

import contextlib
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.inspect.snapshot import STACKS_S, RankSnapshot, observe_in
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.claim import running_launch
from gpurun.launcher.rundir.control import NOT_STARTED, ControlDir, RankState, capture_name, open_own
from gpurun.launcher.rundir.files import RunDir, as_json
from gpurun.launcher.rundir.records import CaptureRequest
from gpurun.launcher.units import ranks_text

ANSWER_S = 3 * STACKS_S + 4.0
"""How long the command may take to answer: it asks the other nodes, which ask their ranks."""
_POLL_S = 0.05
_QUESTION = "question.json"


class WhatRanksDo(msgspec.Struct, frozen=True, tag=True):
    """`gpurun stacks`: what does every rank do?"""


class WantTraces(msgspec.Struct, frozen=True, tag=True):
    """`gpurun capture`: have these ranks write a trace of their next steps."""

    steps: int
    ranks: tuple[int, ...] | None
    """`None`: all."""


class RanksSeen(msgspec.Struct, frozen=True, tag=True):
    """The answer to `WhatRanksDo`."""

    snapshots: tuple[RankSnapshot, ...]


class TracesRequested(msgspec.Struct, frozen=True, tag=True):
    """The answer to `WantTraces`: the ranks know."""

    number: int
    """The number of the request."""
    ranks: tuple[int, ...]
    """The ranks that will write a trace."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The answer to what can't be done."""

    why: str


Question = WhatRanksDo | WantTraces
Answer = RanksSeen | TracesRequested | Declined
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class Asked(msgspec.Struct, frozen=True):
    """A question, and the token of its answer."""

    token: str
    question: Question


def take_snapshots(run: RunDir, launch: str) -> tuple[RankSnapshot, ...]:
    """Snapshots of all ranks of a running launch, on all nodes.

    Raises:
        MachineError: the launch spans nodes, and the command on node 0 does not answer.
    """
    with open_own(run.control(launch)) as control:
        if not run.read(run.plan, Plan).nodes:
            return observe_in(control)
        found = ask(control, WhatRanksDo())
        assert isinstance(found, RanksSeen)
        return found.snapshots


def node_names(run: RunDir, attempt: str) -> dict[int, str]:
    """`node 1 (hostb)` by rank, where the job has several nodes."""
    plan = run.read(run.plan, Plan)
    launches = (launch for launch in plan.launches if plan.nodes and launch.id == attempt.partition("~")[0])
    return {
        each.rank: f"node {each.node} ({plan.nodes[each.node].host})"
        for launch in launches
        for each in launch.processes
    }


def ask(control: ControlDir, question: Question) -> Answer:
    """The answer of the command on node 0.

    Raises:
        MachineError: there is none in time.
    """
    token = secrets.token_hex(8)
    control.write(_QUESTION, msgspec.json.encode(Asked(token, question)))
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        if content := control.read(_answer_name(token)):
            control.remove(_answer_name(token))
            return _answers.decode(content)
        time.sleep(_POLL_S)
    raise MachineError(f"no answer within {ANSWER_S:g} s: is the gpurun of this run still running?")


def take_question(run: RunDir, launch: str) -> Asked | None:
    """A question, which is removed; `None`: there is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError), ControlDir(run.control(launch)) as control:
        if content := control.read(_QUESTION):
            control.remove(_QUESTION)
            asked = msgspec.json.decode(content, type=Asked)
            return asked if asked.token.isalnum() else None
    return None


def answer(run: RunDir, launch: str, token: str, found: Answer) -> None:
    """Writes the answer; the asker may be gone, and a full disk must not stop the run."""
    with contextlib.suppress(OSError), ControlDir(run.control(launch)) as control:
        control.write(_answer_name(token), msgspec.json.encode(found))


def _answer_name(token: str) -> str:
    return f"answer-{token}.json"


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
