"""What ends the jobs of a self-test for a cause of the machine: each is named, with what to do about it."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpurun.launcher.cli import main as command
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.errors import GpurunError, MachineError, unwritable
from gpurun.launcher.failures.reporter import full_disk
from gpurun.launcher.failures.root_cause import Failure, what_to_do
from gpurun.launcher.machine.resource_limits import oom_killed
from gpurun.launcher.processes.pool import why_server_ended
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.paths import SELFTEST, elsewhere
from gpurun.launcher.selftest.check_table import blocking
from gpurun.launcher.selftest.evidence import FAULTS, LINKS, MEASURING, TRAINING, Evidence, RanJob
from gpurun.launcher.selftest.self_test import Result, hint_of, not_run, outcome_of, run_selftest
from tests.unit.selftest.healthy import evidence, faulty, variant
from tests.unit.selftest.test_named_faults import judged
from tests.wording import Wording

AS_NO_ONE = ("setpriv", "--reuid", "54322", "--regid", "54322", "--clear-groups")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
CAN_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""Lets it read Python, wherever that is installed. A user who is root has no limit of processes."""
START = "from gpurun.launcher.errors import MachineError\nfrom types import SimpleNamespace\n"
OUTCOME = f"""{START}
import threading
from gpurun.launcher.selftest.self_test import outcome_of
print(outcome_of(lambda: threading.Thread(target=print).start()))
"""
HISTORIES = f"""{START}
from gpurun.launcher.inspect import snapshot
snapshot.ask_history = lambda control, state: state
print(snapshot.ask_histories(None, {{0: "a", 1: "b"}}))
"""
REFUSED = f"""{START}
from gpurun.launcher.machine.resource_limits import check_limits
try:
    check_limits(2)
except MachineError as error:
    print(error)
"""
NO_LOOPBACK = f"""{START}
from gpurun.launcher.machine.network import check_loopback
try:
    check_loopback()
except MachineError as error:
    print(error)
"""


def output(code: str, *prefix: str) -> str:
    """What a program prints under these limits."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    argv = [*prefix, sys.executable, "-P", "-c", code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def as_user(limit: str) -> tuple[str, ...]:
    return (*AS_NO_ONE, *CAN_READ, "bash", "-c", f'{limit}; exec "$@"', "bash")


@needs_root
def test_at_the_limit_of_processes_ranks_are_asked_one_after_the_other() -> None:
    """What the watch over a hang does: a thread per rank can't be started."""
    assert output(HISTORIES, *as_user("ulimit -u 1")) == "{0: 'a', 1: 'b'}\n"


@pytest.mark.slow
@needs_root
def test_at_the_limit_of_processes_a_job_is_a_failed_check() -> None:
    found = output(OUTCOME, *as_user("ulimit -u 1"))
    assert "problem=\"gpurun can't continue: can't start new thread\"" in found
    assert "`ulimit -u` is 1" in found


@needs_root
def test_a_limit_of_processes_that_ranks_would_exceed_is_refused_before_the_start(wording: Wording) -> None:
    wording(output(REFUSED, *as_user("ulimit -u 30")))
    assert output(REFUSED, *as_user("ulimit -u 4096")) == ""
    assert (
        output(REFUSED, "bash", "-c", 'ulimit -u 30; exec "$@"', "bash") == ""
    )  # Linux doesn't count root's


@needs_root
def test_without_a_loopback_interface_no_rank_is_started(wording: Wording) -> None:
    wording(output(NO_LOOPBACK, "unshare", "--net"))
    assert output(NO_LOOPBACK) == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(24, "Too many open files"), "ulimit -n"),
    ],
)
def test_an_exhausted_limit_of_the_command_itself_ends_in_a_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == MachineError.exit_code
    assert words in capsys.readouterr().err


def test_errors_that_no_limit_causes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> NoReturn:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(RuntimeError):
        command.main()
    with pytest.raises(RuntimeError):
        outcome_of(lambda: fail())


def test_what_was_found_before_an_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(title: str, number: int, count: int) -> NoReturn:
        raise RuntimeError("a bug")

    no_pools: Any = None
    with pytest.raises(RuntimeError):
        run_selftest(no_pools, "cpu:1", tmp_path / "run", lambda found: None, begin)
    assert read_json(tmp_path / "run" / SELFTEST, Result).checks


# The remedy is that of the cause


def failure(message: str, error: str | None = "RuntimeError", **changes: Any) -> Failure:
    found = Failure(1, None, "exception", f"raised {error}", message, "", None, (), False, error)
    return replace(found, **changes)


SEMAPHORE = """\
  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__
    sl = self._semlock = _multiprocessing.SemLock(
                         ^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 28] No space left on device
"""
READ_ONLY = SEMAPHORE.replace("[Errno 28] No space left on device", "[Errno 30] Read-only file system")
ABORTED = """\
terminate called without an active exception
Fatal Python error: Aborted

Current thread 0x00007ff7bc031b80 (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper
"""
"""Of gloo, where it could start only one of its two threads."""
FAILING = evidence().jobs[FAULTS].variants
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
CAUSES: dict[str, tuple[Failure, str, str]] = {
    "open files": (failure("[Errno 24] Too many open files", "OSError"), "", "`ulimit -n` is"),
    "processes": (failure("Resource temporarily unavailable"), "", "`ulimit -u` is"),
    "memory of threads": (failure("Resource temporarily unavailable"), "", "`ulimit -v` is 4000 KiB: raise"),
    "an abort": (
        failure("Aborted", kind="signal", error=None),
        "Fatal Python error: Aborted",
        "`ulimit -v` is 4000 KiB",
    ),
    "processes of gloo": (failure("Aborted", kind="signal", error=None), ABORTED, "`ulimit -u` is"),
    "shared memory": (
        failure("[Errno 28] No space left on device", "OSError", traceback=SEMAPHORE),
        "",
        "/dev/shm is full",
    ),
    "unwritable shared memory": (
        failure("[Errno 30] Read-only file system", "OSError", traceback=READ_ONLY),
        "",
        "mount it writable",
    ),
    "size of files": (failure("[Errno 27] File too large", "OSError"), "", "`ulimit -f` is 4000 KiB"),
    "memory": (failure(NO_MEMORY), "", "`ulimit -v` is 4000 KiB"),
    "killed for memory": (failure(oom_killed(), error=None, kind="oom"), "", "for lack of memory"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("part", [MEASURING, TRAINING, FAULTS, LINKS])
def test_the_remedy_is_that_of_the_cause_in_every_part(
    cause: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log, words = CAUSES[cause]
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    run = RunDir(tmp_path)
    write_json(run.root_cause("01-ddp-2"), replace(found, hint=what_to_do(found, log)))
    hint = hint_of(run, "launches/01-ddp-2/log/rank1.log")
    assert hint is not None
    assert words in hint
    lost = variant(status="failed", reason=found.reason, split=(9, 9, 9))
    job = RanJob((lost,) if part == TRAINING else (), problem=found.reason, remedies={found.reason: hint})
    seen = with_job(part, job)
    assert hint in [each.remedy for each in judged(seen, (part,)).values() if each.status == "failed"]
    assert bool(blocking(seen)) == (part != LINKS)


def with_job(part: str, job: RanJob) -> Evidence:
    without = {"facts": ()} if part in (MEASURING, LINKS) else {}
    return replace(evidence(), jobs={**evidence().jobs, part: job}, **without)  # type: ignore[arg-type]


OF_CAUSE = "end other programs"


@pytest.mark.parametrize("fault", ["late", "oom", "killed", "asleep"])
def test_the_oom_killer_beats_each_checks_own_remedy_and_ends_what_follows(fault: str) -> None:
    reason = f"rank 2 was killed by SIGKILL: {oom_killed()}"
    changed = [faulty(fault, "oom", reason) if is_same(each, fault) else each for each in FAILING]
    hangs = () if fault == "asleep" else evidence().jobs[FAULTS].hangs
    job = RanJob(tuple(changed), problem=reason, remedies={reason: OF_CAUSE}, hangs=hangs)
    found = judged(with_job(FAULTS, job))
    wrong = {each.name: each.remedy for each in found.values() if each.status == "failed"}
    assert set(wrong.values()) == {OF_CAUSE}
    assert found["loader workers"].found == f"not run, because of: {next(iter(wrong))}"


def test_a_server_that_the_oom_killer_ends_is_named_with_what_to_do() -> None:
    job = not_run(MachineError(why_server_ended(["a warning"], was_oom_killed=True)))
    assert "OOM killer ended the server that starts the ranks" in str(job.problem)
    assert "end other programs" in job.remedies[str(job.problem)]
    assert "a warning" not in job.remedies[str(job.problem)]
    assert "(out of memory? see the kernel's log)" in why_server_ended([])


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_loader_worker_is_blamed_on_memory_where_the_kernel_counted_one(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurun.launcher.machine.resource_limits.oom_kills", lambda: kills)
    words = "DataLoader worker (pid 4194305) is killed by signal: Killed. "
    hint = what_to_do(failure(words), "")
    assert bool(hint) == bool(kills)


def test_that_a_rank_runs_out_of_memory_as_it_should_ends_nothing() -> None:
    """Under a large `ulimit -v`, its words have a remedy."""
    reason = str(faulty_of("oom").reason)
    job = replace(evidence().jobs[FAULTS], remedies={reason: "raise `ulimit -v`"})
    assert not blocking(with_job(FAULTS, job))


def is_same(found: VariantResult, fault: str) -> bool:
    return found.split == faulty(fault, "ok", None).split


def faulty_of(fault: str) -> VariantResult:
    return next(each for each in FAILING if is_same(each, fault))


def test_a_file_that_ulimit_forbids_names_it_and_no_other_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = unwritable(tmp_path, OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
    assert "--out" in str(elsewhere(error))  # the file system's own limit
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    limited = elsewhere(error)
    assert str(limited).endswith("`ulimit -f` is 4000 KiB: raise it (ulimit -f unlimited)")
    found = judged(with_job(MEASURING, not_run(limited)))
    assert found["measuring"].remedy == "`ulimit -f` is 4000 KiB: raise it (ulimit -f unlimited)"
    run = RunDir(tmp_path)
    run.log("01", 0).parent.mkdir(parents=True)
    run.log("01", 0).write_text(str(error))
    of_rank = full_disk(run, "01", 0, None)
    assert str(of_rank).startswith(f"the workers can't write {tmp_path}: File too large;")
    assert "ulimit -f unlimited), then continue" in str(of_rank)
    assert "--resume" not in next(iter(not_run(of_rank).remedies.values()))


def test_no_memory_without_a_limit_is_no_exhausted_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert what_to_do(failure(NO_MEMORY), "") is None
    assert what_to_do(failure("Aborted", kind="signal", error=None), "Fatal Python error: Aborted") is None
    assert "ulimit -v" not in str(what_to_do(failure("Resource temporarily unavailable"), ""))


def test_a_hang_under_a_limit_of_memory_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen under `ulimit -v 700000`: gloo could start only some of its threads."""
    lost = variant(status="hung", reason="no step completed for 52 s")
    seen = with_job(MEASURING, RanJob((lost,), problem=lost.reason))
    assert "NCCL_P2P" in str(judged(seen)["measuring"].remedy)
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    assert "`ulimit -v` is 4000 KiB" in str(judged(seen)["measuring"].remedy)


ERRORS: dict[str, tuple[Callable[[], GpurunError], str]] = {
    "full disk": (lambda: full_disk(RunDir(Path("run")), "01-ddp-2", 0, None), "free some space, or name"),
    "open files": (lambda: MachineError("`ulimit -n` is 60\n    raise it"), "raise it"),
}


@pytest.mark.parametrize("cause", ERRORS)
def test_an_error_that_ends_a_job_says_what_to_do(cause: str) -> None:
    error, words = ERRORS[cause]
    found = judged(with_job(MEASURING, not_run(error())), (MEASURING,))["measuring"]
    assert found.status == "failed"
    assert words in (found.remedy or "")
    assert "--resume" not in (found.remedy or "")
