"""Requests of another terminal to a job on several nodes; only the command on node 0 reaches all ranks.

The question is a file in the launch's control directory, which is its owner's alone, and so is the answer.
"""

import contextlib
import secrets
import time

import msgspec

from gpurun.launcher.errors import MachineError
from gpurun.launcher.inspect.snapshot import STACKS_S, RankSnapshot, observe_in
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.rundir.control import ControlDir, open_own
from gpurun.launcher.rundir.files import RunDir

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
