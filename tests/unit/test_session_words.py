"""What a session says of a launch that ends while a balanced split is being found."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gpurun.launcher.failures.root_cause import Failure, explain
from gpurun.launcher.run.session import Session
from gpurun.launcher.run.stage import located
from gpurun.launcher.rundir.records import Event
from tests.known import known

KILLED = Failure(1, None, "signal", "was killed by SIGKILL", "", "", None, (), False)
MEASURING = Event(0, "balance", "ddp-2-balanced")


def test_a_rank_that_left_no_word_ended_while_the_devices_were_measured() -> None:
    told = explain(located(KILLED, MEASURING), "", "0.log", host="here")
    assert "rank 1 was killed by SIGKILL\n    it happened on here during balance of ddp-2-balanced" in told


def test_other_stages_may_differ_between_ranks_and_a_ranks_own_word_counts() -> None:
    assert located(KILLED, Event(0, "warmup", "ddp-2-even")) is KILLED
    assert located(KILLED, None) is KILLED
    own = replace(KILLED, stage="build")
    assert located(own, MEASURING) is own


def late(doing: Event, hangs: bool) -> str:
    told: list[str] = []
    session: Any = SimpleNamespace(
        spec=SimpleNamespace(limit_s=5, hang_timeout_s=3, on_hang="stop"),
        run=SimpleNamespace(control=lambda name: None),
        pool=SimpleNamespace(observe=lambda folder: ()),
        account=SimpleNamespace(hang=lambda hang, name, what: told.append(what)),
    )
    tail: Any = SimpleNamespace(last=doing)
    ended = Session.too_late(session, SimpleNamespace(id="01"), "01", tail, 1 if hangs else 9, hangs)  # type: ignore[arg-type]
    assert ended is not None
    assert known(ended.late) in told[0]
    return told[0]


def test_a_hang_while_the_devices_are_measured_is_told_as_such() -> None:
    assert late(MEASURING, True) == "ddp-2-balanced made no step for 3 s while its split was being found"
    assert late(MEASURING, False) == "ddp-2-balanced took longer than 5 s while its split was being found"
    assert late(Event(0, "round", "x"), False) == "x took longer than 5 s"
