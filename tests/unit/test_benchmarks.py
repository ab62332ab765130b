"""The command that runs the benchmarks."""

import json
import os
import random
import re
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.faults import engines
from benchmarks.fuzz import TARGETS, fuzz, guard
from benchmarks.fuzz.guard import LIMIT_BYTES, Outcome, run_all
from benchmarks.gpu import __main__ as gpu_checks
from benchmarks.gpu import loop
from benchmarks.gpu.summary import of_search, steps_ms
from benchmarks.traces import corpus
from benchmarks.traces.reference import totals
from gpurun.launcher.machine.git import commit_of, git
from tests.unit.trace.trace_files import REAL, kernel, launch, span, step, write
from tests.whole import first
from tests.wording import Wording


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("startupp", 2)])
def test_help_and_unknown_names_are_answered(
    word: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", word])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    said = capsys.readouterr()
    assert "startup" in said.out + said.err


def test_the_benchmark_of_improve_takes_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "improve", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "python -m benchmarks improve" in capsys.readouterr().out


def test_steps_of_a_gpus_trace_are_read_from_one_last_kernel_to_the_next() -> None:
    marks = [step(i, 1_000 * i, 1_000) for i in range(3)]
    events = [*marks, *(launch(1_000 * i + 100, 10, i) for i in range(3)), launch(2_500, 10, 9)]
    kernels = [kernel("k", 1_000 * i + 500 + 50 * i, 200, i) for i in range(3)]
    by_work, by_marks, lost = steps_ms([*events, *kernels])
    assert (by_work, by_marks, lost) == ([1.05, 1.05], [1.0] * 3, 1)


@pytest.mark.parametrize(
    ("by_gpurun_ms", "events_ms", "said"),
    [
        ([2.0, 2.01, 1.99] * 5, 0.0, "goal 1.02)"),
        ([2.1, 2.11, 2.09] * 5, 0.02, "goal 1.02) FAILED"),
        ([2.1, 2.9, 1.5] * 5, 0.0, "goal 1.02, undecided)"),
        ([2.1, 2.11, 2.09] * 5, 0.04, "goal 1.02, not for steps of which the events are 2.0%)"),
    ],
)
def test_a_loop_by_gpurun_that_is_slower_than_one_by_hand_fails(
    by_gpurun_ms: list[float], events_ms: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where it scatters too much for a verdict, nor where a step is too short for its events."""
    assert loop.is_slower("mlp", [2.0] * 15, by_gpurun_ms, events_ms) == ("FAILED" in said)
    assert capsys.readouterr().out.rstrip().endswith(said)


def test_a_loop_ends_in_its_time_with_enough_rounds_for_an_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "MOST_S", -1.0)
    chosen = replace(loop.REHEARSED["mlp"], rounds=20)
    by_hand = Mock(return_value=1.0)
    monkeypatch.setattr(loop.Loop, "by_hand_ms", by_hand)
    found, _ = loop.compare("mlp", chosen, torch.device("cpu"), tmp_path, 0.0)
    assert [call.args for call in by_hand.call_args_list[1:]] == [(chosen.steps,)] * loop.LEAST_ROUNDS
    assert found.num_events > 2
    assert "FOUND: mlp" in capsys.readouterr().out


def test_events_that_differ_from_the_gpus_work_fail() -> None:
    assert not loop.is_off("mlp", 2.03, 2.0)
    assert loop.is_off("mlp", 1.95, 2.0)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_trace_without_the_gpus_work_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.5)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    found = loop.Loop(loop.REHEARSED["mlp"], torch.device("cpu"), tmp_path)
    assert found.traced_ms(tmp_path / "mlp.json.gz") == (1.5, None)
    assert loop.is_off("mlp", 1.5, None)


def test_a_tool_that_a_container_lacks_ends_no_check_for_a_gpu(tmp_path: Path) -> None:
    assert gpu_checks.Bench("cuda:0", tmp_path).run("nvidia-smi-of-no-machine") == 127


def test_what_checks_for_a_gpu_found_can_be_taken_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "MAX_ARCHIVE_BYTES", 100_000)
    sizes = {
        "b.json.gz": 30_000,
        "a.json.gz": 40_000,
        "large.json.gz": 50_000,
        "run.log": 20_000,
        "m.pickle": 1,
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    gpu_checks._pack(tmp_path)
    with tarfile.open(tmp_path / gpu_checks.ARCHIVE) as archive:
        assert archive.getnames() == ["run.log", "b.json.gz", "a.json.gz"]
    assert (tmp_path / gpu_checks.ARCHIVE).stat().st_size < 100_000


def test_results_of_checks_for_a_gpu_stay_between_two_calls() -> None:
    """What git doesn't ignore counts as a part of the checkout, which a next call may bring anew."""
    assert "/gpu-results/" in (gpu_checks.ROOT / ".gitignore").read_text().splitlines()


def test_checks_for_a_gpu_end_with_their_limit_and_say_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_checks, "_run", Mock(side_effect=[0, 124]))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "env.log").write_text("FOUND: a GPU\nmore\n")
    (logs / "loop.log").write_text("at work\n")
    assert gpu_checks.main(["env", "loop", "--device", "cpu:1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert (
        "env: ok after 0 s\n    a GPU\nloop: stopped after 0 s\n    > at work\n1 of 2 checks passed" in said
    )
    with tarfile.open(tmp_path / gpu_checks.ARCHIVE) as archive:
        (text,) = (member for member in archive if member.name == "results.txt")
        assert text.size == (tmp_path / "results.txt").stat().st_size > 0
    assert gpu_checks.main(["env", "--limit", "1", "--device", "cpu:1", "--out", str(tmp_path)]) == 1
    assert "env: not run after 0 s" in (tmp_path / "results.txt").read_text()
    again = f"to run next: python -m benchmarks.gpu env --device cpu:1 --out {tmp_path}\n"
    assert again in capsys.readouterr().out


def test_a_check_for_a_gpu_that_the_limit_of_all_cuts_short_is_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    for name, limit_s, is_left in (("selftest", 600, True), ("loop", 600, True), ("h2d", 600, False)):
        (tmp_path / f"logs/{name}.log").write_text("at work\n")
        monkeypatch.setattr(gpu_checks, "_run", Mock(return_value=124))
        gpu_checks.main([name, "--limit", str(limit_s), "--device", "cpu:1", "--out", str(tmp_path)])
        assert (f"to run next: python -m benchmarks.gpu {name} " in capsys.readouterr().out) == is_left


def test_a_check_for_a_gpu_that_is_run_again_replaces_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "_run", Mock(return_value=0))
    for name in ("logs", "runs/quick", "runs/loop"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "logs/quick.log").touch()
    gpu_checks.main(["quick", "--device", "cpu:1", "--out", str(tmp_path)])
    gpu_checks.main(["loop", "--limit", "1", "--device", "cpu:1", "--out", str(tmp_path)])  # doesn't begin
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["loop"]


def test_searches_for_a_gpu_are_where_a_second_call_replaces_them(tmp_path: Path) -> None:
    bench = Mock(out=tmp_path, on_gpu=False, device="cpu:1", pick=lambda _, rehearsed: rehearsed)
    bench.gpurun.return_value = 0
    assert gpu_checks.improve(bench) == 0
    calls = [call.args for call in bench.gpurun.call_args_list]
    places = [words[words.index("--out") + 1] for words in calls]
    assert places == ["runs/improve/program", "runs/improve/job"]


ENDS_AFTER_ITS_PARENT = """
import os, signal, sys, time
parent = os.getppid()
def end(*_):
    while os.getppid() == parent:
        time.sleep(0.01)
    open(sys.argv[1], "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


def test_a_check_for_a_gpu_that_is_stopped_has_ended_with_all_it_started(tmp_path: Path) -> None:
    words = (
        "sh",
        "-c",
        f'{sys.executable} -c "$0" "$1"; true',
        ENDS_AFTER_ITS_PARENT,
        str(tmp_path / "ended"),
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        gpu_checks.end_group(started)
    assert (tmp_path / "ended").exists()


def test_a_file_that_vanishes_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = tmp_path / "kept", tmp_path / "lost"
    kept.touch()
    monkeypatch.setattr(Path, "rglob", lambda *_: [lost, kept])
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    gpu_checks._pack(tmp_path)
    with tarfile.open(tmp_path / gpu_checks.ARCHIVE) as archive:
        assert archive.getnames() == ["kept"]


def test_of_jobs_by_engines_those_since_a_commit_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    commits = []
    for message in ("first", "second", "third"):
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        git(tmp_path, *identity, "commit", "--quiet", "--allow-empty", "--message", message)
        commits.append(commit_of(tmp_path) or "")
    of_another_branch = "0123456"
    kept = [
        engines.Tried("Ray", "cancelled", "2026-01-01 10:00", commit[: engines.SHORT], 1.0, "")
        for commit in (*commits, of_another_branch)
    ]
    counted = engines.counted(kept, commits[1])
    assert counted == kept[1:3]
    failed = replace(counted[1], engine="by hand", wrong="left\nbehind")
    wording(engines.text_of([replace(attempt, commit="abcdef0") for attempt in (counted[0], failed)]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["startup", "--times", "2"], "--times, --only and --since are for `engines` alone"),
        (["--only", "Ray"], "--times, --only and --since are for `engines` alone"),
        (["engines", "--only", "Rays"], "there is no engine Rays; there are by hand, Open MPI"),
    ],
)
def test_options_are_those_of_a_benchmark(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert said in f"{ended.value.code}{capsys.readouterr().err}"


def test_every_name_is_a_module() -> None:
    assert all(map(find_spec, NAMES.values()))


@pytest.mark.parametrize("name", first(2, [name for name in TARGETS if name != "messages"]))
def test_fuzzing_tries_inputs_and_says_so(name: str) -> None:
    assert fuzz(name, 2).startswith("2 inputs in ")


DONE = Outcome(failures=(), slowest_s=0.1, peak_bytes=1)


def breaks_out(chance: random.Random, directory: Path) -> None:
    """Odd inputs change a file outside and pass over the refusal; of the others every second fails."""
    if chance.random() < 0.5:
        with suppress(BaseException):
            (directory.parent / "outside").write_text("x")
    else:
        raise ValueError("found")


def test_fuzzing_reports_what_fails_and_what_reaches_outside() -> None:
    with pytest.raises(SystemExit, match=r"(?s)3 of 3 .*input 0\n.*open .*/outside"):
        run_all("breaking out", breaks_out, 3)
    with pytest.raises(SystemExit, match=r"(?s)1 of 1 .*--- input 7\n"):
        run_all("breaking out", breaks_out, 1, first=7)


def does_nothing(chance: random.Random, directory: Path) -> None:
    pass


def test_fuzzing_goes_on_with_further_inputs_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 40.0, 80.0, 80.0))
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    tried: list[range] = []

    def keep(name: str, case: object, numbers: range, prepare: object) -> list[Outcome]:
        tried.append(numbers)
        return [DONE]

    monkeypatch.setattr(guard, "_try_range", keep)
    said = run_all("doing nothing", does_nothing, 2, first=3, least_s=60)
    assert tried == [range(3, 5), range(5, 7)]
    assert said.startswith("4 inputs from number 3 on in 80 s")


def takes_half(chance: random.Random, directory: Path) -> None:
    bytearray(LIMIT_BYTES // 2)


@pytest.mark.slow
def test_the_limit_on_memory_does_not_count_what_the_caller_holds() -> None:
    held = bytearray(b"x") * LIMIT_BYTES
    assert re.search(r" (0|51\d) MB of memory", run_all("taking half", takes_half, 3))
    assert held


def test_a_search_for_improvements_on_a_gpu_is_summed_up(tmp_path: Path) -> None:
    assert [line[:9] for line in of_search(tmp_path)] == ["no result"]
    row = {
        "code": "DataLoader(pin_memory=True)",
        "verdict": "kept",
        "percent": -12.3456,
        "ci": None,
        "why": "",
    }
    found = {"name": "train.py", "gain": {"percent": -12.0, "ci": [-13.0, -11.0]}, "remedies": [row]}
    (tmp_path / "improve.json").write_text(json.dumps(found))
    assert [*of_search(tmp_path)] == [
        "train.py: percent=-12 ci=[-13.0, -11.0]",
        "DataLoader(pin_memory=True): kept percent=-12.35",
    ]


def test_public_traces_are_compared_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "owner" / "name" / "0123456789abcdef" / "traces"
    place.mkdir(parents=True)
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    copy = kernel("Memcpy HtoD (Pinned -> Device)", 70, 9.125, 3, stream=13) | {"cat": "gpu_memcpy"}
    work = [kernel("gemm", 20, 30.5, 1), kernel(ring, 40, 20, 2, stream=20), copy]
    calls = [span("cpu_op", "aten::mm", 0, 9), *(launch(at, 1, at) for at in (1, 2, 3))]
    write(place / "a.json", [step(1, 0, 100), *calls, *work])
    (place / "b.json").write_text('{"a": 1}')
    sections: list[str] = []
    monkeypatch.setattr(corpus, "record", lambda title, text, facts: sections.append(text))
    corpus.main([str(tmp_path)])
    outcomes = ["exact: 8 events on 0", "exact: both refuse it (no list of trace events)"]
    assert re.findall("(?:exact|differs): .*(?= [|])", sections[0]) == outcomes
    checksum = sha256((place / "a.json").read_bytes()).hexdigest()
    assert f"| owner/name | 0123456789 | traces/a.json | {checksum} |" in sections[0]
    monkeypatch.setattr(corpus, "totals", lambda path: replace(totals(path), idle_ns=0))
    corpus.main([str(tmp_path)])
    assert "differs: idle 10000 != 0" in sections[1]


@pytest.mark.parametrize(
    "name", first(2, ["vit_H100", "ddp_2of128", "dlrm_8xV100", "nccl_args_A100", "resnet50_V100"])
)
def test_real_traces_are_to_the_nanosecond_what_the_reference_says(name: str) -> None:
    for path in sorted((REAL / name).glob("*.json.gz")):
        assert corpus._outcome(path).startswith("exact: "), path
