"""The command line from outside: what a person types, reads and gets as an exit code."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.command import SLEEP_JOB, Result, ending, gpurun, write
from tests.whole import first
from tests.wording import Wording

JOB = "workload: mlp\ndevices: cpu:2\nglobal_batch: 8\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x00\xff\xfe", "job.yaml"),
        (JOB.encode() + b"params: !!python/object/apply:os.system ['touch owned']\n", "!!python"),
        (b"[" * 10_000_000, "larger than"),
    ],
)
def test_a_bad_job_file_is_reported_with_its_place(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    result = gpurun(tmp_path, "check", "job.yaml").ended(2)
    assert words in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "owned").exists()


def test_gpus_that_are_not_there_are_the_machines_fault(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB.replace("cpu:2", "[cuda:0, cuda:97]"))
    result = gpurun(tmp_path, "job.yaml", "--out", "run").ended(3)
    assert "cuda:97" in result.err or "no GPU" in result.err
    line = next(n for n, text in enumerate(JOB.splitlines(), 1) if "cpu:2" in text)
    assert f"job.yaml:{line}:" in result.err
    assert not (tmp_path / "run").exists()


def test_init_writes_a_job_that_check_accepts_and_never_overwrites(tmp_path: Path) -> None:
    assert gpurun(tmp_path, "init").code == 0
    first = (tmp_path / "job.yaml").read_text().partition("\n")[0]
    schema = (tmp_path / first.removeprefix("# yaml-language-server: $schema=")).read_text()
    assert json.loads(schema)["properties"]["compare"]
    checked = gpurun(tmp_path, "check", "job.yaml").ended()
    assert "2 variants" in checked.out  # it compares something
    (tmp_path / "job.yaml").write_text(JOB)
    again = gpurun(tmp_path, "init").ended(2)
    assert "--force" in again.err
    assert (tmp_path / "job.yaml").read_text() == JOB
    nowhere = gpurun(tmp_path, "init", "new/job.yaml").ended(2)
    assert "create it first: mkdir" in nowhere.err
    assert not (tmp_path / "new").exists()


@pytest.fixture
def _job(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)


@pytest.mark.usefixtures("_job")
def test_json_is_for_programs(tmp_path: Path) -> None:
    plan = gpurun(tmp_path, "check", "job.yaml", "--memory", "--json", "--set", "split=[6, 2]").json
    assert plan["memory"][plan["variants"][0]["id"]]["peak"]["parameters"] > 0
    assert plan["variants"][0]["split"] == [6, 2]
    assert plan["launches"][0]["processes"][1]["env"]["RANK"] == "1"
    assert gpurun(tmp_path, "devices", "--json").json["cpu_cores"] == len(os.sched_getaffinity(0))
    assert gpurun(tmp_path, "schema").json["properties"]["global_batch"]["description"]


@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize("args", first(2, [["check", "job.yaml"], ["devices"], ["--help"], ["schema"]]))
def test_no_heavy_library_is_imported(tmp_path: Path, args: list[str]) -> None:
    code = (
        "import sys, atexit; atexit.register(lambda: print([m for m in "
        "('torch', 'numpy', 'tensorboard', 'rich') if m in sys.modules], file=sys.stderr));"
        "sys.argv = ['gpurun', *sys.argv[1:]]; from gpurun.launcher.cli.main import main; main()"
    )
    argv = [sys.executable, "-c", code, *args]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def in_shell(directory: Path, words: str) -> subprocess.CompletedProcess[str]:
    """A command line of shell, with `gpurun` and `python` in it."""
    commands = {"python": shlex.quote(sys.executable), "gpurun": f"{shlex.quote(sys.executable)} -m gpurun"}
    script = re.sub(r"\b(python|gpurun)\b(?!\.)", lambda word: commands[word[1]], words)
    return subprocess.run(["sh", "-c", script], cwd=directory, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "found"),
    first(
        2,
        [
            (["gpurun", "che"], ["check"]),
            (["gpurun", "check", ""], ["job.yaml", "more/other.yaml"]),
            (["gpurun", "mo"], ["more/other.yaml"]),
            (["gpurun", "job.yaml", "--set", "steps.rou"], ["steps.rounds="]),
            (["gpurun", "report", "runs/s"], ["runs/sleep/latest"]),
        ],
    ),
)
def test_bash_completes(words: list[str], found: list[str], tmp_path: Path) -> None:
    """A real bash, with the lines that `gpurun completion bash` prints."""
    for name in ("job.yaml", "more/other.yaml", "runs/sleep/latest", "runs/s$(id)/latest", "gpurun"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "gpurun").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m gpurun "$@"\n')
    (tmp_path / "gpurun").chmod(0o755)
    script = (
        f'PATH="$PWD:$PATH"; compopt() {{ :; }}; eval "$(gpurun completion bash)"; '
        f"COMP_WORDS=({shlex.join(words)}); "
        f'COMP_CWORD={len(words) - 1}; _gpurun_completion gpurun; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.parametrize("words", ["job.yaml --set steps.rou", "check job.yaml --set compare.spl"])
def test_a_value_follows_its_completed_key_without_a_space(words: str, tmp_path: Path) -> None:
    """Typed into a real bash: the value goes on where the key ends."""
    real = f"exec {shlex.quote(sys.executable)} -m gpurun"
    either = f'[ "$1" = completion ] && {real} "$@"\n[ "$_GPURUN_COMPLETE" ] && {real}'
    (tmp_path / "gpurun").write_text(f'#!/bin/sh\n{either}\necho "$@" > typed\n')
    (tmp_path / "gpurun").chmod(0o755)
    (tmp_path / "rc").write_text('PATH="$PWD:$PATH"; eval "$(gpurun completion bash)"\n')
    ours, shells = pty.openpty()
    command = ["setsid", "bash", "--rcfile", "rc", "-i"]
    shell = subprocess.Popen(command, cwd=tmp_path, stdin=shells, stdout=shells, stderr=shells)
    os.close(shells)
    os.write(ours, f"gpurun {words}\t7\rexit\r".encode())
    with suppress(OSError), open(ours, "rb", 0) as terminal:  # which ends with the shell
        terminal.readall()
    shell.wait()
    assert (tmp_path / "typed").read_text().endswith("=7\n")


def test_streams_that_are_closed_are_no_one_elses(tmp_path: Path) -> None:
    code = (
        "import os, sys; from gpurun.launcher.cli.streams import fill_gaps; fill_gaps(); print(1);"
        "open('names', 'w').write(str([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]))"
    )
    assert in_shell(tmp_path, f'python -c "{code}" 0<&- >&- 2>&-').returncode == 0
    assert (tmp_path / "names").read_text() == str(["/dev/null"] * 3)
    assert in_shell(tmp_path, "gpurun devices 0<&- >&-").returncode == 0


@pytest.mark.usefixtures("_job")
def test_a_full_disk_behind_the_output_is_reported_and_behind_the_messages_ignored(
    tmp_path: Path, wording: Wording
) -> None:
    done = in_shell(tmp_path, "gpurun check job.yaml --json > /dev/full")
    wording(done.stderr)
    assert done.returncode == 3
    assert in_shell(tmp_path, "gpurun check other.yaml 2> /dev/full").returncode == 2


@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize(
    ("words", "code"),
    first(
        2,
        [
            ("gpurun workloads", 0),
            ("gpurun workloads --json", 0),
            ("gpurun check job.yaml", 0),
            ("gpurun check other.yaml 2>&3", 2),
        ],
    ),
)
def test_a_reader_that_has_enough_changes_no_exit_code(tmp_path: Path, words: str, code: int) -> None:
    # The reader closes its end before the command can write to it.
    done = in_shell(tmp_path, f"mkfifo pipe; (: < pipe) & exec 3> pipe; wait; {words} >&3; echo $? > code")
    assert ((tmp_path / "code").read_text(), done.stderr) == (f"{code}\n", "")


@pytest.mark.usefixtures("_job")
def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path, "torch.py", "open('imported', 'w')")
    before = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    for command in ("job.yaml", "run torch.py"):
        result = gpurun(tmp_path, *command.split(), "--out", "file/run", env=before).ended(3)
        assert "can't write file/run: " in result.err
        assert "--out" in result.err
        assert "Traceback" not in result.err
    assert not (tmp_path / "imported").exists()  # by processes that were started already


def test_no_file_can_be_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = gpurun(tmp_path, "init", "file/job.yaml").ended(3)
    assert "a part of that path is not a directory" in result.err
    assert "--out" not in result.err
    assert "space" not in result.err


@pytest.mark.usefixtures("_job")
def test_a_directory_with_other_files_is_not_to_be_resumed(tmp_path: Path) -> None:
    result = gpurun(tmp_path, "job.yaml", "--out", ".").ended(2)
    assert "with other files" in result.err
    assert "--resume" not in result.err


def on_small_disk(directory: Path, size: str, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of shell in `directory`, with a file system of that size mounted on `disk`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    write(directory, "job.yaml", SLEEP_JOB)
    mount = f"mkdir disk && mount -t tmpfs -o size={size} tmpfs disk || exit 77\n"
    run = f"{shlex.quote(sys.executable)} -m gpurun"
    script = mount + textwrap.dedent(script).replace("gpurun", run)
    argv = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this container may not mount")
    assert "Traceback" not in done.stderr
    return done


ZERO_SLEEP = "--set params.alpha_ms=0 --set params.beta_ms=0"


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_keeps_what_was_written(tmp_path: Path) -> None:
    done = on_small_disk(
        tmp_path,
        "100k",
        f"""
        gpurun job.yaml --out disk/run {ZERO_SLEEP}
        echo "code $?"
        cat disk/run/plan.json > plan.json
        cat disk/run/variants/ddp-2-even/rank0.jsonl > steps.jsonl
        """,
    )
    assert "code 3" in done.stdout, done.stdout + done.stderr
    assert "free some space" in done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["name"] == "naps"
    whole_lines = (tmp_path / "steps.jsonl").read_text().splitlines()[:-1]
    assert whole_lines
    assert all(json.loads(line)["step_ns"] > 0 for line in whole_lines)


@pytest.mark.slow
def test_a_disk_without_room_for_logs_and_failure_records_is_blamed_on_no_rank(tmp_path: Path) -> None:
    done = on_small_disk(tmp_path, "40k", f'gpurun job.yaml --out disk/run {ZERO_SLEEP}; echo "code $?"')
    assert "code 3" in done.stdout, done.stdout + done.stderr
    assert "the workers can't write" in done.stderr
    assert "exit code" not in done.stderr


@pytest.mark.slow
def test_a_run_that_never_got_a_plan_can_only_be_started_again(tmp_path: Path) -> None:
    done = on_small_disk(
        tmp_path, "8k", 'gpurun job.yaml --out disk/run; gpurun --resume disk/run; echo "code $?"'
    )
    assert "code 2" in done.stdout, done.stdout + done.stderr
    first, second = done.stderr.split("gpurun: ")[1:]
    assert "free some space\n" in first
    assert "before its plan" in second
    assert "start a new run" in second


@pytest.mark.slow
def test_the_newest_run_is_found_by_name_and_ddp_may_have_one_rank(tmp_path: Path) -> None:
    write(
        tmp_path,
        "job.yaml",
        """
        name: short
        workload: mlp
        params: {width: 8, inputs: 16}
        devices: cpu:1
        strategy: ddp
        global_batch: 4
        steps: {rounds: 1}
        profile: {steps: 0}
        """,
    )
    assert gpurun(tmp_path, "job.yaml").code == 0
    latest = tmp_path / "runs" / "short" / "latest"
    assert (tmp_path / "runs" / "short" / latest.read_text().strip() / "comparison.json").exists()
    result = gpurun(tmp_path, "report", "runs/short/latest", "--format", "json")
    (variant,) = result.json["variants"]
    assert (variant["strategy"], ending(variant), variant["gradient_error"]) == ("ddp", "ok", 0.0)
    kept = json.loads((latest.parent / latest.read_text().strip() / "comparison.json").read_text())
    for named in (("job.yaml", "--resume"), ("--resume", "runs/short/latest")):
        again = gpurun(tmp_path, *named, "--json").ended()
        assert (again.measured["resumed"]["launches"], again.measured["resumed"]["not_begun"]) == (1, 0)
        assert again.measured | {"resumed": None} == kept


@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize(
    ("moment", "command"),
    first(
        3,
        [
            ("click", "check"),
            ("gpurun.launcher.cli.main", "job"),
            ("gpurun.launcher.processes.guard", "job"),
            ("gpurun.launcher.run.session", "job"),
            ("gpurun.launcher.plan.build", "check"),
            ("at exit", "check"),
        ],
    ),
)
def test_ctrl_c_ends_quietly_at_any_moment(tmp_path: Path, moment: str, command: str) -> None:
    """The signal comes when a module is about to be imported, or when the interpreter shuts down."""
    code = f"""
        import atexit, os, sys
        def interrupt(name=None, *_):
            if name in (None, {moment!r}):
                os.kill(os.getpid(), 2)
        if {moment!r} == "at exit":
            atexit.register(interrupt)
        sys.meta_path.insert(0, type("Hook", (), {{"find_spec": staticmethod(interrupt)}}))
        sys.argv = ["gpurun", {command!r}, "job.yaml"]
        from gpurun.__main__ import main
        main()
    """
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=-1, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "ignored" not in said


def test_an_interrupted_run_keeps_its_rounds_and_can_be_resumed(
    tmp_path: Path, canonical_run: Callable[[str], Result]
) -> None:
    """By Ctrl-C; `test_operations` ends a run with SIGTERM. Its processes would be found as a leak."""
    made = canonical_run("interrupted")
    assert "killed after 5.0 s" in made.err
    assert made.code == 130
    assert "gpurun --resume run" in made.out
    before = made.comparison
    assert not before["complete"]
    assert before["variants"][0]["rounds"] >= 2
    shutil.copytree(made.directory, tmp_path, dirs_exist_ok=True)
    result = gpurun(tmp_path, "--resume", "run").ended()
    assert result.comparison["complete"]
    # The round that was cut off counts for neither; the half of it that was complete is still there.
    assert {variant["rounds"] for variant in result.comparison["variants"]} <= {4, 5}
