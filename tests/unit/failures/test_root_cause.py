"""Who is to blame: by made-up exits and records."""

import re
import signal
import sys
import sysconfig
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.errors import ParamsError
from gpurun.launcher.failures.root_cause import (
    explain,
    fails_everywhere,
    is_transient,
    root_cause,
    what_to_do,
    with_crash,
)
from gpurun.launcher.inspect.stacks import OURS
from gpurun.launcher.processes.protocol import Exit
from gpurun.launcher.run.job import outcome_error
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import FailureRecord, Status
from gpurun.launcher.worker.base.failure import record_failure
from gpurun.launcher.worker.training.load_workload import load_workload
from tests.sample import COMPARISON
from tests.unit.compare import hand_made
from tests.wording import Wording

files = hand_made.files

S = 1_000_000_000


def ended(rank: int, returncode: int, time_s: float, *sent: int, oom: bool = False) -> Exit:
    return Exit(rank, returncode, int(time_s * S), sent, oom)


def record(rank: int, time_s: float, *, secondary: bool = False, kind: str = "exception") -> FailureRecord:
    text = "Connection closed by peer" if secondary else "boom"
    return FailureRecord(
        time_ns=int(time_s * S),
        rank=rank,
        variant="ddp-2-even",
        stage="round",
        kind=kind,  # type: ignore[arg-type]
        type="RuntimeError" if secondary else "ValueError",
        message=text,
        traceback=f"Traceback (most recent call last):\n{text}\n",
        secondary=secondary,
    )


LOST = replace(record(0, 10.0), type="RuntimeError")
WRAPPED = replace(record(0, 10.0), type="TrainingError", traceback="RuntimeError: x\nTrainingError: boom")
"""Words of a peer that are not among those that we know."""
KILL, ABORT, TERM = signal.SIGKILL, signal.SIGABRT, signal.SIGTERM
Evidence = tuple[list[Exit], list[FailureRecord], float | None]
"""Exits, records, and when we began to stop the ranks, in seconds."""
BLAMED: dict[str, tuple[Evidence, tuple[int, str, tuple[int, ...], tuple[int, ...]]]] = {
    "the earliest exception": (
        ([ended(0, 1, 11.0), ended(1, 1, 10.9)], [record(0, 10.0), record(1, 10.5)], None),
        (0, "exception", (1,), ()),
    ),
    **{
        f"a rank that {number.name} ended, reaped after its peer's {complaint.type}": (
            ([ended(0, 1, 10.1), ended(1, -number, 10.2)], [complaint], None),
            (1, "signal", (0,), ()),
        )
        for number in (KILL, signal.SIGSEGV, signal.SIGBUS)
        for complaint in (LOST, WRAPPED)
    },
    "a ValueError, which no lost peer explains": (
        ([ended(0, -KILL, 10.01), ended(1, 1, 10.1)], [record(1, 10.0)], None),
        (1, "exception", (0,), ()),
    ),
    "a rank that is killed before a ValueError": (
        ([ended(0, -KILL, 10.01), ended(1, 1, 10.1)], [record(1, 10.02)], None),
        (0, "signal", (1,), ()),
    ),
    "an exception before an abort by a watchdog": (
        ([ended(0, -ABORT, 10.2), ended(1, 1, 10.3)], [record(1, 10.0)], None),
        (1, "exception", (0,), ()),
    ),
    "an exception after a lost peer": (
        ([ended(0, 1, 9.0), ended(1, 1, 20.0)], [record(0, 8.0, secondary=True), record(1, 19.0)], None),
        (1, "exception", (), (0,)),
    ),
    "a rank before those that we stopped": (
        ([ended(0, -KILL, 5.1, TERM, KILL), ended(1, 3, 5.0)], [], 5.05),
        (1, "exit", (), (0,)),
    ),
    "a kill that was not ours, whose memory took a second to be freed, while we began to stop": (
        ([ended(0, 1, 5.0), ended(1, -KILL, 6.0, TERM)], [record(0, 5.0, secondary=True)], 5.5),
        (1, "signal", (), (0,)),
    ),
    "a rank before what our stop provoked": (
        ([ended(0, 1, 7.0, TERM), ended(1, 3, 5.0)], [record(0, 6.0)], 5.5),
        (1, "exit", (), (0,)),
    ),
    "the OOM killer": (([ended(0, -9, 5.0, oom=True)], [], None), (0, "oom", (), ())),
    "a rank that left early": (
        ([ended(0, 1, 5.2), ended(1, 0, 5.0), ended(2, -15, 6.0, 15)], [record(0, 5.1, secondary=True)], 6.0),
        (1, "early_exit", (), (0, 2)),
    ),
    "an exception after a rank has left in order": (
        ([ended(0, 0, 5.0), ended(1, 1, 6.0)], [record(1, 5.9)], None),
        (1, "exception", (), ()),
    ),
    "no cause": (
        (
            [ended(0, 1, 5.1), ended(1, 1, 5.2)],
            [record(0, 5.0, secondary=True), record(1, 4.0, secondary=True)],
            None,
        ),
        (1, "exception", (), (0,)),
    ),
}


@pytest.mark.parametrize("name", BLAMED)
def test_the_rank_that_began_is_blamed(name: str, wording: Wording) -> None:
    (exits, records, stopped_s), expected = BLAMED[name]
    failure = root_cause(exits, records, None if stopped_s is None else int(stopped_s * S))
    assert (failure.rank, failure.kind, failure.also, failure.victims) == expected
    assert failure.secondary == (name == "no cause")
    wording(explain(failure, "", "x.log"))


def test_of_a_huge_message_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    """The search for known words alone would take minutes."""
    try:
        raise ValueError("first " + "x" * 5_000_000 + " last")
    except ValueError as error:
        found = record_failure(RunDir(tmp_path), "01", 0, None, "round", error)
    assert len(found.message) < 5_000
    assert len(found.traceback) < 20_000
    assert found.message.startswith("first ")
    assert found.message.endswith(" last")
    failure = root_cause([ended(0, 1, 10.1)], [found], None)
    assert len(explain(failure, "y" * (1 << 16), "log")) < 100_000
    assert len(failure.headline) < 500


def test_nothing_to_explain() -> None:
    with pytest.raises(ValueError, match="no rank"):
        root_cause([], [], None)


NO_GUARD = "An attempt has been made to start a new process before the\n  current"
NEEDED = "a.py: error: the following arguments are required"


@pytest.mark.parametrize(
    ("error", "message", "log", "words"),
    [
        ("ModuleNotFoundError", "No module named 'einops'", "", f"Python is {sys.executable}: install"),
        ("AssertionError", "Torch not compiled with CUDA enabled", "", "`gpurun devices` says why"),
        ("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'", "", "torch finds none"),
        ("RuntimeError", "No CUDA GPUs are available", "", "torch finds none"),
        ("RuntimeError", "Distributed package doesn't have NCCL built in", "", 'the backend "gloo"'),
        (
            "None",
            "",
            "step\n  what():  [x] Is there a distributed collective mismatch in your code?",
            "DETAIL",
        ),
        ("ImportError", "attempted relative import with no known parent package", "", "run -m package.train"),
        ("EOFError", "EOF when reading a line", "run name? ", "what `input()` asks for"),
        ("SystemExit", "exit code 2", "x\nusage: a.py [-h]\na.py: error: --data", "they follow `--`"),
        ("SystemExit", "exit code 2", f"usage: a.py\n{NEEDED}: --data, --local_rank", "environ["),
        ("DistNetworkError", "timed out", "gpurun: this rank waits at a:1 for", "leave MASTER_ADDR and"),
        ("DistNetworkError", "timed out", "", None),
        (
            "ProcessExitedException",
            "exit code 1",
            f"RuntimeError:\n  {NO_GUARD}\n",
            'below `if __name__ == "__m',
        ),
        ("SystemExit", "exit code 2", f"usage: a.py\n{NEEDED}: --local_rank/--local-rank", "environ["),
        (
            "SystemExit",
            "exit code 2",
            "usage: a.py\na.py: error: unrecognized arguments: --local-rank=0",
            "environ[",
        ),
        ("SystemExit", "exit code 2", "OSError: Too many open files", "ulimit -n"),
        ("ValueError", "no use for EOFError: EOF when reading a line", "usage: none", None),
    ],
)
def test_usual_mistakes_have_a_remedy(error: str, message: str, log: str, words: str | None) -> None:
    made = replace(root_cause([], [record(0, 1)], None), error=error, message=message)
    assert (words or "None") in str(what_to_do(made, log))


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ("ModuleNotFoundError: No module named 'transformers'", f"Python is {sys.executable}: install"),
        ("AssertionError: Torch not compiled with CUDA enabled", "leave the model on the CPU and unwrapped"),
        ("ValueError: no ModuleNotFoundError: No module named", None),
        ("RuntimeError: expected target dtype to be Long or Byte, but got Float", "`targets.long()`"),
        ("RuntimeError: expected scalar type Long but found Float", "`targets.long()`"),
        ("ImportError: attempted relative import with no known parent package", "workload: package.train"),
        ("int 3", None),
    ],
)
def test_usual_mistakes_in_a_workload_have_a_remedy_too(got: str, words: str | None) -> None:
    mistake = f"model.py:2: model.py can't be imported\n    expected: a module\n    got:      {got}\n  File"
    made = replace(
        root_cause([], [record(0, 1, kind="user")], None), message=mistake, error=got.split(":")[0]
    )
    assert (words or "None") in str(what_to_do(made, ""))


def test_a_value_that_a_built_in_workload_refuses_is_a_mistake_in_the_job(
    files: Any, wording: Wording
) -> None:
    with wording.raises(ParamsError) as refused:
        load_workload("gpt", {"width": 65}, ".")
    mistake = replace(
        record(0, 4.9, kind="user"),
        type="ParamsError",
        message=str(refused.value),
        stage="build",
        traceback="",
    )
    failure = root_cause([ended(0, 1, 5.0)], [mistake], None)
    wording(failure.headline)
    assert fails_everywhere(failure)
    assert not is_transient(failure)
    hinted = replace(mistake, message="train.py:1: build has no parameter `widht`\n    did you mean `width`?")
    wording(root_cause([ended(0, 1, 5.0)], [hinted], None).reason)
    write_json(files.run.plan, hand_made.splits_plan())
    files.close(hand_made.EVEN, hand_made.UNEVEN, status="failed", reason=failure.reason)
    lost = compare_run(files.run)
    outcome = outcome_error(lost, refused.value)
    assert outcome is refused.value
    assert outcome.exit_code == 2
    hand_made.write_splits(files)
    measured = outcome_error(compare_run(files.run), refused.value)
    assert measured is None  # others had params of their own


LIBRARY = sysconfig.get_path("purelib")
TRACEBACK = f"""\
Traceback (most recent call last):
  File "{OURS}launcher/worker/entry/workload_rank.py", line 35, in main
    run_launch(journal)
  File "{LIBRARY}/torch/nn/modules/module.py", line 1778, in _call_impl
    return forward_call(*args)
           ^^^^^^^^^^^^^^^^^^^
  File "/home/ada/train.py", line 14, in forward
    return lookup(x)
           ^^^^^^^^^
  File "{LIBRARY}/torch/nn/functional.py", line 9, in embedding
    raise ValueError(text)
ValueError: boom
    and a second line
"""


PROFILER = "ERROR:2026-11-24 19:58:01 9:9 DeviceProperties.cpp:56] gpuGetDeviceCount failed with code 35\n"
MISTAKE = "train.py:3: the loss is no scalar\n    expected: one number\n    got:      shape (4,)"
ITEM = 'Original Traceback (most recent call last):\n  File "train.py", line 3, in item\n    fail()\n'
SPAWNED = "-- Process 1 terminated with the following error:"
"""torch's own begins with empty lines, and has no type."""
WORK = 'Traceback (most recent call last):\n  File "train.py", line 4, in work\n    raise ValueError("x")\n'
USAGE = 'Traceback (most recent call last):\n  File "/home/ada/train.py", line 2, in main\nSystemExit: 2\n'
CHAIN = (
    "Traceback (most recent call last):\nValueError: could not convert string to float: 'x'\n\n"
    f"During handling of the above exception, another exception occurred:\n\n{USAGE}"
)
OURS_ALONE = TRACEBACK.replace("/home/ada/", f"{LIBRARY}/")


def of_loader(name: str, raised: str) -> str:
    """What torch's DataLoader passes on from a process of its own."""
    return f"Caught {name} in DataLoader worker process 0.\n{ITEM}{raised}\n"


RAISED = record(2, 4.9)
EXPLAINED: dict[str, tuple[FailureRecord, str]] = {
    "a log that ends with the traceback": (RAISED, f"step 1\nstep 2\n{RAISED.traceback}"),
    "a log with a complaint of the profiler": (RAISED, PROFILER + RAISED.traceback),
    "a mistake of the user's": (
        replace(record(0, 4.9, kind="user"), message=MISTAKE, traceback=""),
        f"step 1\n{MISTAKE}\n",
    ),
    "a loader's exception of two lines": (
        replace(RAISED, message=of_loader("RuntimeError", "RuntimeError: bad record 7\nand more")),
        "",
    ),
    "a loader's exception of a library": (
        replace(RAISED, message=of_loader("HTTPError", "requests.HTTPError: 404")),
        "",
    ),
    "a loader's exception while another was handled": (
        replace(
            RAISED,
            message=of_loader(
                "KeyError",
                "KeyError: 'x'\n\nDuring that:\n\nTraceback (most recent call last):\n  File\nOSError: y",
            ),
        ),
        "",
    ),
    "a spawned process's": (
        replace(RAISED, message=f"\n\n{SPAWNED}\n{WORK}ValueError: bad shard\n"),
        "",
    ),
    "an exit, without the exceptions that led to it": (
        replace(RAISED, type="SystemExit", message="exit code 2", traceback=CHAIN),
        CHAIN,
    ),
    "frames of the user's, the log's whole": (
        replace(RAISED, traceback=TRACEBACK),
        f"step 1\n{TRACEBACK}",
    ),
    "no frame of the user's": (replace(RAISED, traceback=OURS_ALONE), f"step 1\n{OURS_ALONE}"),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_an_explanation_shows_everything_once(name: str, wording: Wording) -> None:
    found, log = EXPLAINED[name]
    failure = root_cause([ended(found.rank, 1, 5.0)], [found], None)
    wording(failure.headline, failure.reason)
    wording(explain(failure, log, "x.log"), hide=rf"{re.escape(LIBRARY)}|{re.escape(OURS)}")


def test_a_crash_shows_where_and_not_the_end_of_the_stack(wording: Wording) -> None:
    log = (
        "step 1\nUSDT:2026-11-30 02:26:34 29621:29621 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
        "Fatal Python error: Aborted\n\n"
        "Current thread 0x7f (most recent call first):\n"
        f'  File "{LIBRARY}/torch/x.py", line 3 in check\n'
        '  File "/home/ada/train.py", line 14 in forward\n'
        '  File "<frozen runpy>", line 88 in _run_code\n\nExtension modules: a, b (total: 2)\n'
    )
    failure = with_crash(root_cause([ended(1, -signal.SIGABRT, 5.0)], [], None), log)
    wording(failure.headline)
    text = explain(failure, log, "x.log")
    wording(text, hide=r"/\S+(?=/torch/)")
    assert "step 1" in text
    assert not any(word in text for word in ("runpy", "Extension", "USDT"))
    of_gloo = f"  what():  [x] Is there a distributed collective mismatch in your code?\n{log}"
    mismatched = with_crash(root_cause([ended(1, -signal.SIGABRT, 5.0)], [], None), of_gloo)
    wording(mismatched.headline)


RECORD = st.builds(
    record,
    st.integers(0, 3),
    st.floats(1, 9),
    secondary=st.booleans(),
    kind=st.sampled_from(["exception", "oom"]),
)
EXIT = st.builds(ended, st.integers(0, 3), st.sampled_from([0, 1, 3, -6, -9, -11, -15]), st.floats(1, 9))


@given(st.lists(EXIT, min_size=1, max_size=4, unique_by=lambda e: e.rank), st.lists(RECORD, max_size=4))
def test_the_order_of_the_evidence_does_not_matter(exits: list[Exit], records: list[FailureRecord]) -> None:
    unique = list({r.rank: r for r in records}.values())
    failures = {root_cause(order, unique[::-1], None) for order in permutations(exits)}
    assert len(failures) == 1
    (failure,) = failures
    assert failure.rank not in failure.victims
    primary = [r for r in unique if not r.secondary]
    if primary:
        assert not failure.secondary
    assert explain(failure, "log", "path")


# The command's exit code: what counts as a result, and what as a failure


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        (("ok", "oom"), None),
        (("unsteady", "oom", "oom"), None),
        (("oom",), "no variant could be measured; out of memory: v0"),
        (("oom", "oom"), "out of memory: v0, v1"),
        (("oom", "failed", "ok"), "1 of 3 variants failed: v1"),
        (("timeout", "hung"), "2 of 2 variants failed: v0, v1"),
        (("ok", "ok"), None),
    ],
)
def test_running_out_of_memory_is_a_result_only_next_to_another_one(
    statuses: tuple[Status, ...], words: str | None
) -> None:
    variants = tuple(
        replace(COMPARISON.variants[0], id=f"v{number}", status=status)
        for number, status in enumerate(statuses)
    )
    error = outcome_error(replace(COMPARISON, variants=variants))
    assert (error is None) == (words is None)
    if error is not None and words is not None:
        assert error.exit_code == 4
        assert words in str(error)


def test_where_nothing_fits_a_smaller_batch_is_advised(wording: Wording) -> None:
    even = replace(COMPARISON.variants[0], id="even", status="oom", reason="rank 0 ran out of memory")
    wording(str(outcome_error(replace(COMPARISON, variants=(even,)))))
    program = replace(even, strategy="script", workload="")
    wording(str(outcome_error(replace(COMPARISON, variants=(program,)))))
