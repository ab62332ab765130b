"""The table of commands, and the table of schedulers that the commands look into."""

import errno
import gc
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import click
import pytest
from click.testing import CliRunner, Result

from gpurun.launcher.cli.commands import job as job_commands
from gpurun.launcher.cli.commands import job_file
from gpurun.launcher.cli.completion import lines_for, suggestions
from gpurun.launcher.cli.main import COMMANDS, GROUPS, cli, main
from gpurun.launcher.cli.output import check_steps, show_json
from gpurun.launcher.cli.streams import Cleaned, prepare_streams
from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import MachineError, SpecError, StepsError, VariantError
from gpurun.launcher.jobfile.load import compared, load_job, load_text, program_job
from gpurun.launcher.logs.lines import clean
from gpurun.launcher.nodes.rendezvous import NodeFlags, find_facts
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.run.open import check_free
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir, read_json
from gpurun.launcher.rundir.records import Status
from gpurun.launcher.schedulers import SCHEDULERS
from gpurun.launcher.schedulers.base import Scheduler
from tests.conftest import SNAPSHOTS
from tests.known import known
from tests.unit.cli.click_runner import runner
from tests.unit.plan.machines import FakeMachine
from tests.wording import Wording
from tools.system_packages import without

COMMAND_LINES = SNAPSHOTS / "mistakes/command-lines.txt"
"""Mistakes on the command line after `$ `, with what each is answered after `> `."""
FILES = {
    "job.yaml": "workload: mlp\ndevices: cpu:2\nglobal_batch: 8\n",
    "wrong.yaml": "workload: gpt\nglobal_batch: 0\nprecison: bf16\n",
    "program.yaml": "script: train.py\ndevices: cpu:1\n",
    "train.py": "print()\n",
    "models/net.py": "def build(width=8, *, depth): ...\n",
    "train.sh": "#!/bin/bash\ntorchrun train.py\n",
    "notes.txt": "hello\n",
    "other.json": "{}\n",
    "no-work.json": '{"traceEvents": []}\n',
    "prof/a b/x.json": '{"traceEvents": [{"ph": "X"}]}',
    "broken.py": "x = 1\nfor i in range(3)\n    print(i)\n",
    "image.json": "\x89PNG\r\n",
    "pickle.json": "\x80\x04",
    "blank.json": "",
}
"""What is in the directory in which they are typed."""
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def help_of(*words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--help"], terminal_width=80)
    assert result.exit_code == 0
    return result.output


def test_help_shows_every_command_with_its_whole_summary() -> None:
    shown, every = help_of(), CliRunner().invoke(cli, ["help", "--all"], terminal_width=80).output
    names = [name for group in GROUPS.values() for name in group]
    assert all(f"{entry.summary}\n" in every for entry in COMMANDS.values())
    assert re.findall(r"^  (\w+)  ", shown.partition("\nRun:")[2], re.MULTILINE) == names
    assert re.findall(r"^  (\w+)  ", every.partition("\nRun:")[2], re.MULTILINE) == list(COMMANDS)
    assert len(shown.splitlines()) <= 40
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_by_its_name_and_its_examples_can_be_pasted(name: str) -> None:
    command = known(cli.get_command(click.Context(cli), name))
    assert command.name == name
    examples = re.findall(r"Example: gpurun .*\n", f"{command.help}\n")
    assert examples
    assert all(example in help_of(name) for example in examples)


def test_a_scheduler_of_the_table_says_where_the_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Scheduler(
        name="New",
        node_rank=lambda environ: int(environ["NEW_NODE"]),
        rendezvous=lambda environ: environ["NEW_HOST"],
        num_nodes=lambda environ: 2,
        preemption="none",
    )
    monkeypatch.setitem(SCHEDULERS, "new", new)
    facts = find_facts(2, NodeFlags(), {"NEW_NODE": "1", "NEW_HOST": "node0:5"})
    assert (facts.rank, facts.host, facts.port) == (1, "node0", 5)


def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints to stderr when it exits with 2."""
    monkeypatch.setattr(sys, "argv", ["gpurun", *words])
    monkeypatch.setattr(os, "environ", dict(os.environ))  # commands set what libraries read when imported
    # Libraries that other tests imported may have left threads in this process, which waits here.
    monkeypatch.setattr("gpurun.launcher.processes.guard.threading.active_count", lambda: 1)
    interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        main()
    signal.signal(signal.SIGINT, interrupt)
    gc.enable()
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_mistakes_on_the_command_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    snapshot: Callable[[str, str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "empty").mkdir()
    cases = [line for line in COMMAND_LINES.read_text().splitlines() if line.startswith("$ ")]
    assert len(cases) >= 50
    answers = {
        case: ended(monkeypatch, capsys, *shlex.split(case)[2:]).replace(str(tmp_path), "HERE")
        for case in cases
    }
    assert all(len(textwrap.wrap(answer, 80)) < 24 for answer in answers.values())  # one screen
    shown = ("\n> ".join([case, *answer.splitlines()]) for case, answer in answers.items())
    snapshot("mistakes/command-lines.txt", "\n\n".join(shown) + "\n")


@pytest.mark.parametrize("words", [["job.yaml"], ["--resume", "runs/job/1"], ["run", "train.py"]])
def test_a_hang_timeout_is_that_of_the_job_whatever_is_started(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed without its job file has the other overrides too."""
    asked: list[str] = []

    def run(invocation: Callable[[], Any], out: Any, resume: Any, more: Any = (), **how: Any) -> None:
        asked.extend(more or invocation().overrides)

    monkeypatch.setattr(job_commands, "run_and_print", run)
    result = CliRunner().invoke(cli, [*words, "--set", "grace=1s", "--hang-timeout", "2m"])
    assert (result.exit_code, asked) == (0, ["grace=1s", "hang_timeout=120.0"]), result.output


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (
            "--node-rank 0 torchrun --nnodes 2 --node-rank 1 --master-addr a t.py",
            {"node_rank": 0, "rendezvous": "a:30500"},
        ),
        (
            "--rendezvous b:1 torchrun --nnodes 2 --node-rank 1 --master-addr a t.py",
            {"node_rank": 1, "rendezvous": "b:1"},
        ),
        ("--only-rank 0 torchrun --local-ranks-filter 1 t.py", {"only_rank": 0, "only_local_ranks": None}),
        ("torchrun --redirects 3 t.py", {"quiet": True}),
        ("--quiet torchrun t.py", {"quiet": True}),
    ],
)
def test_options_of_gpurun_have_precedence_over_the_line(
    words: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(job_commands, "run_and_print", lambda *_, **how: asked.update(how))
    result = CliRunner().invoke(cli, words.split())
    assert result.exit_code == 0, result.output
    assert {name: asked.get(name) for name in flags} == flags


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_node_of_a_line_has_the_rank_that_a_scheduler_says_and_with_static_0_by_default(
    scheduled: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(job_commands, "run_and_print", lambda *_, **how: asked.update(how))
    if scheduled:
        monkeypatch.setitem(SCHEDULERS, "slurm", replace(SCHEDULERS["slurm"], node_rank=lambda environ: 1))
    line = ("torchrun", "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "a:7", "t.py")
    result = CliRunner().invoke(cli, line)
    if scheduled or backend == "static":
        assert (result.exit_code, asked["node_rank"]) == (0, None if scheduled else 0)
    else:
        assert "add --node-rank to each line" in str(result.exception)


@pytest.mark.parametrize("error", [StepsError, VariantError])
def test_a_line_without_a_required_step_has_an_exit_code_of_its_own(
    error: type[VariantError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **how: Any) -> None:
        raise error("no step was timed")

    monkeypatch.setattr(job_commands, "run_and_print", run)
    result = CliRunner().invoke(cli, ["--require-steps", "torchrun", "train.py"])
    ours = result.exception.exit_code if isinstance(result.exception, StepsError) else result.exception
    assert ours == (4 if error is StepsError else None)


def test_init_names_a_workload_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is read, and not run; `check` asks for what the function needs."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('run')\n\ndef build(width: int = 8): ...\n")
    assert CliRunner().invoke(cli, ["init", "--workload", "train.py:build"]).exit_code == 0
    job = Path("job.yaml").read_text()
    assert "\nworkload: train.py:build\n" in job
    assert "it takes width" in job
    Path("my net.py").write_text("def build(): ...\n")
    assert CliRunner().invoke(cli, ["init", "net.yaml", "--workload", "my net.py:build"]).exit_code == 0
    assert '\nworkload: "my net.py:build"\n' in Path("net.yaml").read_text()
    assert CliRunner().invoke(cli, ["check", "job.yaml"], catch_exceptions=False).exit_code == 0
    refused = CliRunner().invoke(cli, ["init", "other.yaml", "--workload", "train.py:other"])
    assert isinstance(refused.exception, SpecError)
    assert not Path("other.yaml").exists()


def test_a_path_that_is_no_run_is_answered_with_the_runs_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("gpt", "mlp")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "latest").write_text("2026-01-01_00-00-00")
        os.utime(tmp_path / "runs" / name / "latest", (at, at))

    def end_of(path: str) -> str:
        return ended(monkeypatch, capsys, "report", path).rstrip().partition("; ")[2]

    every = "the newest runs are runs/mlp/latest and runs/gpt/latest"
    assert [end_of(path) for path in ("runs", "nope", "runs/lstm/latest")] == [every] * 3
    near = "did you mean runs/gpt/latest?"
    alike = ("runs/gpt/lastest", "runs/GPT/latest", "runs/gtp/latest", "gpt", "gtp", "gpt/latest")
    assert [end_of(path) for path in alike] == [near] * len(alike)
    (tmp_path / "runs/gpt/latest").unlink()
    assert end_of("nope") == "the newest run is runs/mlp/latest"


def test_examples_are_listed_shown_and_copied_with_the_programs_that_they_name(tmp_path: Path) -> None:
    def output_of(*words: str) -> str:
        result = CliRunner().invoke(cli, ["examples", *words])
        assert result.exit_code == 0, result.exception
        return result.output

    assert "\nquickstart.yaml " in output_of()
    assert output_of("script").rstrip() == (EXAMPLES / "script.yaml").read_text().rstrip()
    assert output_of("script", "own_model", "--copy", str(tmp_path / "a")).startswith("wrote 3 files; next:")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"script.yaml", "train.py", "own_model.py"}
    assert output_of("--copy", str(tmp_path / "b")).endswith("/b/quickstart.yaml\n")
    assert output_of("own_model", "--copy", str(tmp_path / "c")) == "wrote 1 file\n"
    assert (tmp_path / "b" / "frameworks" / "hf_model.py").is_file()
    assert (tmp_path / "b" / "quickstart.yaml").read_bytes() == (EXAMPLES / "quickstart.yaml").read_bytes()
    assert output_of("own_model", "--copy", str(tmp_path / "c")) == "wrote 0 files\n"  # a checkout has them
    (tmp_path / "c/own_model.py").write_text("mine")
    mine = CliRunner().invoke(cli, ["examples", "own_model", "--copy", str(tmp_path / "c")])
    assert "own_model.py exists with another content" in str(mine.exception)
    again = CliRunner().invoke(cli, ["examples", "quickstar", "--copy", str(tmp_path / "b")])
    assert "did you mean quickstart" in str(again.exception)


def test_help_is_a_word_too_and_every_value_has_a_name() -> None:
    def output_of(*words: str) -> str:
        return CliRunner().invoke(cli, words, terminal_width=80).output

    assert output_of("help") == help_of()
    assert output_of("help", "report") == help_of("report")
    for name in COMMANDS:
        assert not re.search(r" (INTEGER|TEXT|FLOAT)\b|\[x|\[\d+<=", help_of(name)), name


def test_options_of_submit_come_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one scheduler has is in its line of the table."""
    queue = known(SCHEDULERS["slurm"].queue)
    other = replace(queue, command="bsub")
    monkeypatch.setitem(SCHEDULERS, "lsf", replace(SCHEDULERS["slurm"], name="LSF", queue=other))
    module = importlib.reload(importlib.import_module("gpurun.launcher.cli.commands.submit"))
    try:
        shown = CliRunner().invoke(module.submit, ["--help"], terminal_width=200).output
    finally:
        monkeypatch.undo()
        importlib.reload(module)
    assert re.search("1-12:00:00 .slurm, .*, lsf", shown)
    assert re.search("--bsub OPTION .* option of bsub", shown)
    assert re.search("Partition .*slurm, lsf", shown)


class ClosedTerminal(io.StringIO):
    """What stdout is after SIGHUP."""

    def __init__(self, number: int, file: IO[bytes]) -> None:
        super().__init__()
        self.number, self.file = number, file

    def write(self, text: str) -> int:
        raise OSError(self.number, "gone")

    def fileno(self) -> int:
        return self.file.fileno()


def test_a_closed_terminal_is_no_error_and_a_full_disk_is() -> None:
    """So that SIGHUP ends a run with 130, as every other interruption does."""
    with tempfile.TemporaryFile() as file:
        stream = Cleaned(ClosedTerminal(errno.EIO, file), is_needed=True)
        stream.write("the table")
        assert stream.is_reader_gone
        with pytest.raises(MachineError, match="can't write the output"):
            Cleaned(ClosedTerminal(errno.ENOSPC, file), is_needed=True).write("the table")


def test_only_text_and_colours_reach_the_terminal() -> None:
    shown = io.StringIO()
    stream = Cleaned(shown, is_needed=True)
    stream.write("\x1b[32mgreen\x1b[0m \x1b]0;title\x07\x1b[2J\x9b1Ma\tb\r\n")
    stream.write("\x1b")
    stream.write("]52;c;Y3VybA==\x07\u202egnp.exe\u061c\u200e\u200f\u2028\u2067")
    assert shown.getvalue() == "\x1b[32mgreen\x1b[0m 1Ma\tb\n]52;c;Y3VybA==gnp.exe"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("err", [False, True])
def test_no_encoding_lets_more_through(encoding: str, err: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """click writes to the bytes below a stream whose encoding is ASCII."""
    below = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(below, encoding=encoding, errors="surrogateescape"))
    prepare_streams()
    click.echo("a\x1b]52;c;Y3VybA==\x07b\x1b[2J\u202e \udc9b2J ±", err=err)
    shown = below.getvalue()
    assert shown.decode("latin-1" if encoding == "latin-1" else "utf-8") == "ab \\udc9b2J ±\n"
    for way_around in ("buffer", "detach", "writelines", "reconfigure"):
        assert not hasattr(sys.stderr if err else sys.stdout, way_around)


def test_the_list_of_examples_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_pipe = CliRunner().invoke(cli, ["examples"]).output
    monkeypatch.setattr(job_file, "line_width", lambda: 80)
    on_a_terminal = CliRunner().invoke(cli, ["examples"]).output
    assert max(map(len, on_a_terminal.splitlines())) <= 80 < max(map(len, in_a_pipe.splitlines()))
    assert on_a_terminal.split() == in_a_pipe.split()


def test_json_keeps_characters_that_a_terminal_would_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    """As those of a context line of a diff, which then still applies."""
    value = {"diff": " a\u202bb\u2028c\x7f\x9b\r\n"}
    show_json(value)
    shown = capsys.readouterr().out
    assert clean(shown) == shown
    assert json.loads(clean(shown)) == value


def test_a_file_name_that_is_no_text_is_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"paths": (os.fsdecode(b"\xff.json"),), "speed": float("nan")})
    assert json.loads(capsys.readouterr().out) == {"paths": [r"\udcff.json"], "speed": None}


ZSH = """\
path=($PWD $path); typeset -A compstate
compdef() { : }; _describe() { : }; compadd() { print -r -- "$@" ${(P)@[-1]} }
words=(gpurun job.yaml --set steps.); CURRENT=4
source lines; _gpurun_completion
"""
"""zsh's own functions are only there in a terminal: these print what they are given."""


@pytest.mark.skipif(bool(reason := without("zsh")), reason=reason)
def test_zsh_puts_no_space_after_the_equals_sign_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text(lines_for(cli, "zsh"))
    answers = "plain\\nsteps.rounds=\\n_\\nplain\\njob.yaml\\n_\\n"
    (tmp_path / "gpurun").write_text(f"#!/bin/sh\nprintf '{answers}'\n")
    (tmp_path / "gpurun").chmod(0o755)
    done = subprocess.run(["zsh", "-f", "-c", ZSH], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "-U -V unsorted -a completions job.yaml",
        "-U -S  -V unsorted -a values steps.rounds=",
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("run tra", ["train.py"]),
        ("run train.py --devices c", ["cpu:2", "cuda"]),
        ("selftest --devices a", ["auto"]),
        ("workloads resnet5", ["resnet50", "resnet56"]),
        ("examples resn", ["resnet50.yaml"]),
        ("examples frameworks/hf_m", ["frameworks/hf_model.yaml", "frameworks/hf_model.py"]),
    ],
)
def test_names_are_completed(
    line: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "train.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_WORDS", f"gpurun {line}")
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ") + 1))
    assert suggestions(cli, "bash_complete").splitlines() == [f"plain,{name}" for name in found]


def test_no_name_in_a_strangers_run_is_suggested_that_the_shell_would_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("docs/runs/balanced", tmp_path / "run")
    for name in ("0$(id)", "0`id`", "0;id", "0\nid", "0 id", "0\x1b[2J"):
        (tmp_path / "run/launches" / name).mkdir()
    run = tmp_path / "run"
    for words, found in ((f"logs {run} --launch=0", True), (f"logs {run} --launch ", False)):
        monkeypatch.setenv("COMP_WORDS", f"gpurun {words}")
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))
        shown = suggestions(cli, "bash_complete").splitlines()
        own = sorted(each.name for each in Path("docs/runs/balanced/launches").glob("0*"))
        assert shown == [f"plain,{name}" for name in own if found]


def test_the_page_of_a_run_that_others_own_goes_to_a_file_that_is_named(tmp_path: Path) -> None:
    run, page = str(tmp_path / "run"), tmp_path / "page.html"
    shutil.copytree(Path(__file__).parents[3] / "docs/runs/balanced", run)
    wrong = {
        ("--output", str(page)): "--output is for html",
        ("--format", "html", "--output", str(tmp_path / "missing" / "page.html")): "create it",
    }
    for options, message in wrong.items():
        assert message in str(CliRunner().invoke(cli, ["report", run, *options]).output)
    assert CliRunner().invoke(cli, ["report", run, "--format", "html", "--output", str(page)]).exit_code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert not list(Path(run).rglob("*.html"))


@pytest.mark.parametrize("options", [["--json", "--format", "table,html"], ["--format", "json,html"]])
def test_a_page_is_written_beside_the_json(options: list[str], tmp_path: Path) -> None:
    run, page = str(tmp_path / "run"), tmp_path / "page.html"
    shutil.copytree(Path(__file__).parents[3] / "docs/runs/balanced", run)
    result = runner().invoke(cli, ["report", run, *options, "--output", str(page)])
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["schema"] == 3
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_little_is_imported_before_ctrl_c_is_answered() -> None:
    """Until then it brings Python's own traceback."""
    code = "import sys, gpurun.launcher.cli.interrupt; print({'typing', 'enum'} & {*sys.modules})"
    path = os.pathsep.join(each for each in sys.path if each)
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# `gpurun runs` lists what other commands take, and deletes only what is named


DOCS = Path(__file__).parents[3] / "docs/runs"
OLD, NEW = "runs/gpt/2026-11-20_10-00-00", "runs/gpt/2026-11-21_10-00-00"


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`gpurun runs` where `runs/` has two runs of a job."""
    monkeypatch.chdir(tmp_path)
    for at, (path, source) in enumerate(((OLD, "gpt-splits"), (NEW, "balanced"))):
        shutil.copytree(DOCS / source, path)
        os.utime(Path(path) / "comparison.json", (at, at))
    Path("runs/gpt/latest").write_text(f"{Path(NEW).name}\n")

    def called(*words: str) -> Result:
        return runner().invoke(cli, ["runs", *words])

    return called


def test_the_newest_run_is_first_with_its_conclusion(call: Callable[..., Result]) -> None:
    lines = call().stdout.splitlines()
    assert [line.split()[0] for line in lines[1::2]] == [NEW, OLD]
    assert lines[2::2] == [
        f"    {read_json(Path(path, 'comparison.json'), Comparison).headline}" for path in (NEW, OLD)
    ]
    assert call(OLD).stdout.splitlines()[1].split()[0] == OLD
    assert call("runs/gpt/latest", "runs").stdout.count(NEW) == 1


def test_a_run_of_which_all_failed_says_so_and_why(call: Callable[..., Result]) -> None:
    path = Path(NEW, "comparison.json")
    found = json.loads(path.read_text())
    for variant in found["variants"]:
        variant |= {"status": "timeout", "reason": "rank 1 hangs\n    more", "step_ms": None}
    path.write_text(json.dumps(found))
    row, headline, *_ = call(NEW).stdout.splitlines()[1:]
    assert " failed " in row
    assert headline.endswith("rank 1 hangs")
    found["variants"][0]["status"] = "unsteady"
    path.write_text(json.dumps(found))
    assert " done " in call(NEW).stdout.splitlines()[1]


def test_the_runs_of_a_self_test_are_not_listed(call: Callable[..., Result]) -> None:
    shutil.copytree(DOCS / "balanced", "runs/selftest/2026-11-22_10-00-00/measuring")
    Path("runs/selftest/2026-11-22_10-00-00/selftest.json").write_text("{}")
    assert "selftest" not in call().stdout


def test_the_list_for_a_program_has_exact_figures(call: Callable[..., Result]) -> None:
    newest, _ = json.loads(call("--json").stdout)
    files = [path for path in Path(NEW).rglob("*") if path.is_file()]
    assert newest["run"] == NEW
    assert newest["status"] == "done"
    assert newest["changed_s"] == 1
    assert newest["num_bytes"] == sum(path.stat().st_size for path in files)


def test_a_run_that_is_measured_now_is_said_to_run_and_is_not_deleted(call: Callable[..., Result]) -> None:
    Path(NEW, "comparison.json").unlink()
    assert json.loads(call(NEW, "--json").stdout)[0]["status"] == "stopped"
    with claimed(RunDir(Path(NEW))):
        assert json.loads(call(NEW, "--json").stdout)[0]["status"] == "running"
        refused = call("--delete", NEW)
        assert isinstance(refused.exception, SpecError)
        assert "in use by process" in str(refused.exception)
    assert Path(NEW, "plan.json").exists()


def test_latest_names_a_run_that_is_there(call: Callable[..., Result]) -> None:
    assert "deleted" in call("--delete", "runs/gpt/latest").stderr
    assert not Path(NEW).exists()
    assert Path("runs/gpt/latest").read_text() == f"{Path(OLD).name}\n"
    assert call("--delete", OLD).exit_code == 0
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    ["runs/gpt", "runs", "nothing", "runs/link", f"{OLD}/latest", "search/latest", f"file://{{}}/{OLD}"],
)
def test_nothing_is_deleted_but_the_runs_that_are_named(
    wrong: str, call: Callable[..., Result], tmp_path: Path
) -> None:
    Path("runs/link").symlink_to(Path(NEW).absolute())
    Path("search").mkdir()
    Path("search/improve.json").write_text("{}")
    assert isinstance(call("--delete", OLD, wrong.format(tmp_path)).exception, SpecError)
    assert isinstance(call("--delete").exception, SystemExit)
    assert Path(OLD, "plan.json").exists()
    assert Path(NEW, "plan.json").exists()
    assert Path("search/improve.json").exists()


def test_a_directory_with_a_plan_of_another_program_is_no_run(
    call: Callable[..., Result], tmp_path: Path
) -> None:
    """Neither is it deleted, nor does it keep runs from being made below it."""
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "mine.py").write_text("pass")
    for words in ((".",), (str(tmp_path),), ("runs/latest/..",)):
        assert isinstance(call("--delete", *words).exception, SpecError), words
    assert (tmp_path / "mine.py").exists()
    check_free(Path("runs/gpt/new"))
    with pytest.raises(SpecError, match="lies inside of the run"):
        check_free(Path(OLD) / "new")


def test_a_search_of_improve_is_deleted_with_its_runs_and_nothing_else(call: Callable[..., Result]) -> None:
    search = Path("runs/train-improve")
    shutil.copytree(OLD, search / "1-original")
    (search / "improve.json").write_text("{}")
    (search / "train.py").write_text("mine")
    assert isinstance(call("--delete", str(search)).exception, SpecError)
    (search / "train.py").unlink()
    assert "deleted" in call("--delete", str(search)).stderr
    assert not search.exists()


def test_latest_names_a_search_that_is_there(call: Callable[..., Result]) -> None:
    old, new = (Path("runs/train-improve", name) for name in ("1", "2"))
    for search in (old, new):
        search.mkdir(parents=True)
        (search / "improve.json").write_text("{}")
    (latest := old.parent / "latest").write_text("2\n")
    assert "deleted" in call("--delete", str(latest)).stderr
    assert not new.exists()
    assert latest.read_text() == "1\n"


def test_what_a_run_links_to_is_not_deleted(call: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.pt").write_text("weights")
    Path(OLD, "launches/link").symlink_to(tmp_path / "mine")
    call("--delete", OLD)
    assert not Path(OLD).exists()
    assert (tmp_path / "mine/model.pt").exists()


def test_where_there_is_no_run_the_list_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = runner().invoke(cli, ["runs"])
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "gpurun JOB.yaml" in shown.stderr


@pytest.mark.parametrize(
    ("status", "fails"), [("ok", True), ("unsteady", True), ("failed", False), ("timeout", False)]
)
def test_a_program_without_timed_steps_fails_on_request(status: Status, fails: bool) -> None:
    comparison: Any = compare_run(RunDir(DOCS / "balanced"))
    workloads = comparison.variants
    check_steps(replace(comparison, variants=tuple(replace(each, step_ms=None) for each in workloads)))
    program = replace(workloads[0], strategy="script", status=status, step_ms=None)
    found = replace(comparison, variants=(*workloads, program))
    if not fails:  # the failure itself is the error
        check_steps(found)
        return
    with pytest.raises(VariantError, match="no step was timed"):
        check_steps(found)


def test_a_share_is_not_taken_for_a_percentage(call: Callable[..., Result]) -> None:
    said = runner().invoke(cli, ["diff", OLD, NEW, "--fail-slower", "0.03"]).stderr
    assert "'0.03' may be a share or a percentage; write 3% or 0.03%" in said
    for percent in ("0.03%", "1", "0", "0.5"):
        assert "a percentage" not in runner().invoke(cli, ["diff", OLD, NEW, "--fail-slower", percent]).stderr


# `gpurun run --compare` makes the job that a job file would, and says what is wrong with its values


def plan_of(directory: Path, args: str, *compare: str) -> Plan:
    (directory / "train.py").touch()
    text = program_job("train.py", None, args.split(), "cpu:2", compared(compare))
    return build_plan(load_text(text, "", (), directory), FakeMachine())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("workers=0,2", {"options": [{"workers": "0"}, {"workers": "2"}]}),
        ("--workers=0, 2", {"options": [{"workers": "0"}, {"workers": "2"}]}),
        ("amp=on,off", {"options": [{"amp": "on"}, {"amp": "off"}]}),
        ("+model.width=64,128", {"options": [{"+model.width": "64"}, {"+model.width": "128"}]}),
        ("env:OMP_NUM_THREADS=1,2", {"env": [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}]}),
        ('sizes=["1,2","3,4"]', {"options": [{"sizes": "1,2"}, {"sizes": "3,4"}]}),
        ('lr=[0.1, ""]', {"options": [{"lr": 0.1}, {"lr": ""}]}),
        ("where=a=b,c", {"options": [{"where": "a=b"}, {"where": "c"}]}),
        ("env=dev,prod", {"options": [{"env": "dev"}, {"env": "prod"}]}),
    ],
)
def test_each_form_is_what_a_job_file_has(text: str, wanted: dict[str, Any]) -> None:
    assert compared([text]) == wanted


def test_every_combination_is_a_variant_that_is_called_by_what_differs(tmp_path: Path) -> None:
    compare = ("workers=0,2", "amp=on,off", "env:A=1,2")
    plan = plan_of(tmp_path, "--epochs 1 --workers=4 data", *compare)
    assert [variant_label(variant) for variant in plan.variants] == [
        f"workers={workers} amp={amp} A={a}" for workers in "02" for amp in ("on", "off") for a in "12"
    ]
    assert plan.variants[0].id == "script-2-workers-0-amp-on-A-1"
    lines = [variant.line for variant in plan.variants]
    assert lines[0] == ("--epochs", "1", "--workers=0", "data", "--amp")
    assert lines[-1] == ("--epochs", "1", "--workers=2", "data")
    assert plan.launches[0].processes[0].env["A"] == "1"
    assert plan_of(tmp_path, "", "+model.width=1,2").variants[0].id == "script-2-model.width-1"


def test_a_job_file_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: train\nscript: train.py\nargs: [--epochs, 1]\ndevices: cpu:2\n"
        "compare: {options: [{workers: 0}, {workers: 2, amp: true}]}\nbaseline: {options: {amp: on}}\n"
    )
    plan = plan_of(tmp_path, "--epochs 1", "workers=0,2")
    written = build_plan(load_job(tmp_path / "job.yaml"), FakeMachine())
    assert written.variants[0] == plan.variants[0]
    assert written.variants[1].line == ("--epochs", "1", "--workers", "2", "--amp")
    assert written.baseline == written.variants[1].id


MISTAKES = (
    *("workers", "workers=", "workers=2", "amp=on", "workers=0,,2", "workers=2,2", "sizes=[]"),
    *("a b=1,2", "=1,2", "~x=1,2", "++model.x=1,2", "2=1,2"),
    *('sizes=["1,2"]', "sizes=[1,2],[3,4]", 'sizes=["1,2"', "sizes=[[1],[2]]", "sizes=[null,1]"),
    *("+model.x=64", "--workers=2", "env=OMP_NUM_THREADS=1,2"),
    *("env:1X=1,2", "env:=1,2", "env:A B=1,2", "env:RANK=0,1", "env:A=", "env:HF_TOKEN=hidden"),
)


def test_every_mistake_says_what_to_write_instead(wording: Wording) -> None:
    for text in MISTAKES:
        with wording.raises(SpecError) as caught:
            compared([text])
        assert all(problem.hint for problem in caught.value.problems)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("again", ["num_workers=4,8", "num-workers=4,8", "+num_workers=4,8"])
def test_a_key_has_all_its_values_at_once(again: str, wording: Wording) -> None:
    with wording.raises(SpecError):
        compared(["num_workers=0,2", again])
    assert compared(["a=0,2", "env:a=0,2", "env:A=0,2"]).keys() == {"options", "env"}


def test_mistakes_in_several_are_said_together() -> None:
    with pytest.raises(SpecError) as caught:
        compared(["a", "b=1", "c=1,2"])
    assert len(caught.value.problems) == 2
