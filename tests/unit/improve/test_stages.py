"""What a stage of a search refuses: writes where launches meet, and programs that take too long or fail."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.launcher.errors import GpurunError, SpecError, VariantError
from gpurun.launcher.improve import stages
from gpurun.launcher.improve.improve import run_improve
from gpurun.launcher.improve.stages import RemedySearch, Stage, is_prevented
from gpurun.launcher.run.job import Output
from gpurun.launcher.run.open import Invocation
from gpurun.launcher.rundir.files import RunDir, write_json
from gpurun.launcher.rundir.records import CallSite, Observed

NEVER = float("inf")


def search(limit_s: float = NEVER, **more: Any) -> RemedySearch:
    found = object.__new__(RemedySearch)
    vars(found).update(
        spec=SimpleNamespace(
            program="train.py", limit_s=limit_s, hang_timeout_s=None, stated_secrets=(("TOKEN", "1234-abcd"),)
        ),
        began_s=time.monotonic(), budget_s=60.0, spent_s=0.0, first_s=5.0, ends_s={}, changed=(),
        **{"given": SimpleNamespace(directory=Path("/job")), **more},
    )  # fmt: skip
    return found


def stage_that_writes(*paths: str) -> Any:
    return SimpleNamespace(seen_by_rank={("a", 0): [Observed(writes=paths[:1]), Observed(writes=paths[1:])]})


def test_prevented_writes_and_changed_files_are_named_together() -> None:
    found = search()
    found.refuse_writes(stage_that_writes(), is_measured=True)
    found.changed = ("/job/a", "/job/b")
    with pytest.raises(SpecError) as refused:
        found.refuse_writes(stage_that_writes("/job/last.pt", "/job/log"), is_measured=True)
    said = str(refused.value).splitlines()
    assert said[0] == (
        "train.py writes to /job/last.pt, /job/log, which was prevented, as its launches would meet there"
    )
    assert said[1].startswith("    /job/a, /job/b changed while train.py ran")
    assert "$GPURUN_LAUNCH_DIR" in said[2]


def test_a_program_that_fails_by_itself_is_not_told_what_else_changed() -> None:
    found = search()
    found.changed = ("/job/a",)
    found.refuse_writes(stage_that_writes(), is_measured=False)
    with pytest.raises(SpecError, match=r"/job/a changed while train\.py ran"):
        found.refuse_writes(stage_that_writes(), is_measured=True)


def test_a_secret_in_the_name_of_a_file_is_not_shown() -> None:
    with pytest.raises(SpecError, match=r"writes to /job/out-masked:") as refused:
        search().refuse_writes(stage_that_writes("/job/out-1234-abcd"), is_measured=True)
    assert "1234-abcd" not in str(refused.value)


def test_a_temporary_file_that_an_earlier_launch_has_left_was_not_prevented(tmp_path: Path) -> None:
    found, path = search(), tmp_path / "last.pt"
    found.began_s -= 60
    path.touch()
    with pytest.raises(SpecError, match=r"last\.pt, which an earlier launch of it has left there"):
        found.refuse_writes(stage_that_writes(str(path)), is_measured=True)
    found.began_s += 120
    with pytest.raises(SpecError, match=r"last\.pt, which was prevented"):
        found.refuse_writes(stage_that_writes(str(path)), is_measured=True)


@pytest.mark.parametrize(
    ("own_s", "steps", "status", "reason", "error", "said"),
    [
        (NEVER, 0, "timeout", "took longer than 30 s", VariantError,
         "no step of train.py ended in 30 s, the most for a launch with a budget of 60 s"),
        (NEVER, 4, "timeout", "took longer than 30 s", SpecError,
         "4 of train.py's first 16 steps ended in 30 s; try `--budget 8m`"),  # of 12 steps more
        (30.0, 4, "timeout", "took longer than 30 s", VariantError, "fails as it is: took longer than 30 s"),
        (NEVER, 4, "failed", "no data\nlog: a", VariantError, "train.py fails as it is: no data"),
        (NEVER, 4, "failed", "OperationalError: attempt to write a readonly database", VariantError,
         "can't write where others would meet it: write to $GPURUN_LAUNCH_DIR"),
    ],
)  # fmt: skip
def test_a_program_without_a_result_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
    own_s: float,
    steps: int,
    status: str,
    reason: str,
    error: type[GpurunError],
    said: str,
) -> None:
    monkeypatch.setattr(stages, "can_restrict_writes", lambda: True)
    original = SimpleNamespace(status=status, reason=reason)
    stage = SimpleNamespace(of=lambda at: original, num_steps=lambda at: steps, step_s=lambda at: 2.0)
    limits = SimpleNamespace(limit_s=30.0, steps=SimpleNamespace(limit=16))
    given = Invocation(Path("job.yaml"), ())
    found = search(own_s, given=given, path=Path("runs/a")).failure(
        cast(Any, stage), VariantError("it failed"), cast(Any, limits)
    )
    assert type(found) is error
    assert said in str(found)
    assert "log: a" not in str(found)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("PermissionError: [Errno 13] Permission denied: 'last.pt'", True),
        ("PermissionError: [Errno 13] Permission denied: 'out/new/last.pt'", True),
        ("PermissionError: [Errno 13] Permission denied: '/elsewhere/a' -> '{job}/b'", True),
        ("fopen failed: errno 13: Permission denied, file path: {job}/last.pt", True),
        ("unable to open file: name = 'x.h5', errno = 13, error message = 'Permission denied'", True),
        ("OperationalError: attempt to write a readonly database", True),
        ("PermissionError: [Errno 13] Permission denied: '{job}/own/last.pt'", False),
        ("PermissionError: [Errno 13] Permission denied: '/dev/kfd'", False),
        ("PermissionError: [Errno 13] Permission denied: '/proc/1/environ'", False),
        ("PermissionError: [Errno 13] Permission denied", False),  # of a port
        ("RuntimeError: no data in 'last.pt'", False),
    ],
)
def test_only_a_write_that_was_prevented_is_explained_as_one(
    reason: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (str(tmp_path / "own"), "/dev", "/proc")
    assert is_prevented(reason.format(job=tmp_path), tmp_path, places) is expected
    monkeypatch.setattr(os, "access", lambda *_: False)  # where the user may write nothing by itself
    assert is_prevented(reason.format(job=tmp_path), tmp_path, places) is ("readonly" in reason)


def test_the_first_launches_have_half_of_the_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemedySearch, "clock_s", 20.0)
    found = search()
    assert found.limit_s == 20.0
    found.ends_s = {"1-original": 20.0}
    assert found.limit_s == 40.0
    found.budget_s = 1.0
    assert found.limit_s == found.hang_s == 30.0  # what is left to do at the end is done


def test_a_stage_that_was_interrupted_before_it_was_planned_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text("workload: mlp\ndevices: [cpu:0]\nglobal_batch: 8\n")
    (tmp_path / "2-alone").mkdir()
    (tmp_path / "2-alone/invocation.json").write_text("{}")
    found = search(given=Invocation(tmp_path / "job.yaml", ()), path=tmp_path, machine=None)
    monkeypatch.setattr(stages, "as_planned_for", lambda *_: pytest.fail("begun", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="begun"):
        found.stage("2-alone", [()])
    assert not (tmp_path / "2-alone").exists()


def test_a_budget_for_nothing_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("workload: mlp\ndevices: [cpu:0]\nglobal_batch: 8\n")
    given, pools = Invocation(tmp_path / "job.yaml", ()), cast(Any, None)
    with pytest.raises(SpecError, match="the budget is too short to try anything: `--budget 1m`"):
        run_improve(pools, given, 1.0, tmp_path / "found", Output(True, None), print)
    assert not (tmp_path / "found").exists()


def test_a_place_has_what_the_calls_of_any_rank_were_given() -> None:
    stage = Stage(cast(Any, None), cast(Any, None), cast(Any, None), {0: "a"})
    given: list[dict[str, int]] = [{}, {"prefetch_factor": 8}, {}]
    calls = [CallSite("DataLoader", "data.py", 3, True, applied=each) for each in given]
    vars(stage)["seen_by_rank"] = {("a", rank): [Observed((call,))] for rank, call in enumerate(calls)}
    (found,) = stage.calls(0)
    assert found.applied == {"prefetch_factor": 8}


def test_of_several_attempts_at_a_launch_the_last_one_counts(tmp_path: Path) -> None:
    """The first was interrupted before the program's calls."""
    run, call = RunDir(tmp_path), CallSite("DataLoader", "data.py", 3, True)
    for attempt, calls in (("01-a", ()), ("01-a~2", (call,)), ("02-a", (call,))):
        write_json(run.launch_config(attempt), {})
        write_json(run.observed(attempt), Observed(calls))
    launches = [SimpleNamespace(id=name, variants=("a",)) for name in ("01-a", "02-a", "03-a")]
    plan = SimpleNamespace(launches=launches, variant=lambda _: SimpleNamespace(world_size=1))
    stage = Stage(run, cast(Any, plan), cast(Any, None), {0: "a"})
    assert [seen.calls for seen in stage.observed(0)] == [(call,), (call,)]
