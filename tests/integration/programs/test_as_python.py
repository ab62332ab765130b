"""What Python itself does for a program: its forked children, modules, loggers and streams."""

import json
import os
import re
import shlex
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from gpurun.launcher.worker.program.import_time import OWN_MODULES
from tests.integration.command import gpurun, write

CHILDREN = """
    import atexit, os, sys
    {above}
    rank, parent = os.getpid(), os.getpid()
    atexit.register(lambda: os.write(1, b"parent ends\\n" if os.getpid() == rank else b"child ends\\n"))
    for how in ("exit", "text", "raise", "end"):
        pid = os.fork()
        if pid:
            print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            print(open(how).read())
            continue
        left_open = open(how, "w")
        left_open.write("data of " + how)
        if how == "exit":
            sys.exit(3)
        if how == "text":
            sys.exit("bad")
        if how == "raise":
            raise ValueError("in the child")
        break
    facts = f"{os.environ['GPURUN_LAUNCH_DIR']}/../facts.json"
    assert how == "end" and not os.path.exists(facts)
"""


SETS_COMPUTED = "os.environ['TORCH_LOGS'] = ','.join(['recompiles'])"
"""A variable whose value no text shows: the program runs without torch until it imports torch."""


@pytest.mark.parametrize("above", ["", SETS_COMPUTED])
def test_forked_children_end_as_python_ends_them(tmp_path: Path, above: str) -> None:
    write(tmp_path, "train.py", CHILDREN.replace("{above}", above))
    result = gpurun(tmp_path, "torchrun", "train.py").ended(0)
    ended = [f"child ends\n{how} {code}\ndata of {how}\n" for how, code in ENDS.items()]
    assert result.out == "".join(ended) + "parent ends\n"
    trace = 'Traceback (most recent call last):\n  File "{}", line {}, in <module>\n'
    lines = (tmp_path / "train.py").read_text().splitlines()
    line = 1 + lines.index('        raise ValueError("in the child")')
    failed = trace.format(tmp_path / "train.py", line) + '    raise ValueError("in the child")\n'
    assert f"bad\n{failed}ValueError: in the child\n" in result.err


ENDS = {"exit": 3, "text": 1, "raise": 1, "end": 0}


SHADOWS = """
    import os, sys
    {above}
    names = {names!r}
    assert not names & sys.modules.keys(), names & sys.modules.keys()
    import {first}
    assert {first}.KEY == "the program's own"
    import torch
    for name in names:
        assert __import__(name).KEY == "the program's own", name
    import gpurun
    for _ in range(40):
        with gpurun.step():
            torch.ones(100, 100) @ torch.ones(100, 100)
"""


PUBLIC = {name for name in OWN_MODULES if not name.startswith("_")} - {"faulthandler"}


@pytest.mark.parametrize(
    ("above", "names"),
    [
        ("", PUBLIC),
        (SETS_COMPUTED, {"msgspec", "resource", "yaml"}),  # torch's profiler imports the others
    ],
)
def test_modules_of_the_program_are_not_shadowed_by_those_that_gpurun_needs(
    tmp_path: Path, above: str, names: set[str]
) -> None:
    app = tmp_path / "app"
    app.mkdir()
    for name in names:
        (app / f"{name}.py").write_text('KEY = "the program\'s own"\n')
    filled = SHADOWS.replace("{names!r}", repr(names)).replace("{first}", "yaml")
    write(app, "train.py", filled.replace("{above}", above))
    result = gpurun(tmp_path, "run", "app/train.py", "--devices", "cpu:1", "--out", "run").ended(0)
    assert "no more steps" not in result.err
    assert result.variant("script-1")["step_ms"] is not None
    assert "rank0.pt.trace.json.gz" in str(result.variant("script-1")["ranks"])


def test_a_program_gets_the_same_module_as_gpurun_where_it_has_none_of_its_own(tmp_path: Path) -> None:
    text = """
        import sys, fractions, yaml, resource, faulthandler
        import gpurun.launcher.rundir.files as ours
        assert sys.modules["fractions"] is fractions and yaml.nodes is sys.modules["yaml.nodes"]
        import statistics
        assert statistics.fmean is ours.fmean and "sysconfig" not in sys.modules
    """
    write(tmp_path, "train.py", text)
    gpurun(tmp_path, "torchrun", "train.py").ended(0)


def test_no_other_module_is_there_than_python_and_torch_import(tmp_path: Path) -> None:
    text = """
        import sys
        seen = {name.partition(".")[0] for name in sys.modules}
        import torch
        print(*sorted(seen - {"gpurun"} | {name.partition(".")[0] for name in sys.modules} - {"gpurun"}))
    """
    write(tmp_path, "train.py", text)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    there = cold(tmp_path, "torchrun", "train.py").stdout.split()
    others = {*there} - {*plain.stdout.split()}
    assert {name for name in others if not re.search("cython|_sysconfigdata", name)} == set()


def test_what_an_optimizer_imports_does_not_shadow_modules_of_the_program(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    (app / "sympy.py").write_text("KEY = 1\n")
    said = "open('said', 'a').write(f'{sympy.KEY} {\"torch._dynamo\" in sys.modules} ')"
    write(app, "train.py", f"import sympy, sys, torch, torch.optim\n{said}\n")
    cold(tmp_path, "run", "app/train.py", "--devices", "cpu:1", "--set", "steps.launches=2")
    assert (tmp_path / "said").read_text().endswith("1 True ")


def cold(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The program after a command in a new interpreter, which knows what `import torch` imports."""
    line = [sys.executable, "-m", "gpurun", *words]
    return subprocess.run(line, cwd=directory, capture_output=True, text=True, check=True)


LOGGERS = """
    import logging.config, sys
    set_before = logging.getLogger("torch._dynamo")
    set_before.setLevel(logging.ERROR)
    print(*sorted(name for name in logging.root.manager.loggerDict if name != "torch"))
    logging.config.dictConfig(
        {
            "version": 1,
            "handlers": {"h": {"class": "logging.StreamHandler"}},
            "loggers": {"torch.distributed": {"level": "INFO"}},
            "root": {"handlers": ["h"], "level": "INFO"},
        }
    )
    import asyncio, torch, torch.distributed
    loggers = {name: each for name, each in logging.root.manager.loggerDict.items()}
    print(*sorted(name for name, each in loggers.items() if getattr(each, "disabled", False)))
    torch.distributed.distributed_c10d.logger.warning("about a group")
    assert set_before is logging.getLogger("torch._dynamo"), "torch's own"
    logging.config.dictConfig({"version": 1})
    print(torch.distributed.distributed_c10d.logger.disabled, logging.getLogger("asyncio").disabled)
"""


def test_loggers_of_torch_are_unknown_until_the_program_imports_it(tmp_path: Path) -> None:
    """`logging.config` disables the loggers that exist."""
    write(tmp_path, "train.py", LOGGERS)
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    result = gpurun(tmp_path, "torchrun", "train.py").ended(0)
    assert result.out == plain.stdout
    assert plain.stderr.endswith("about a group\n")
    assert "about a group\n" in result.err


ORDERED = r"""
    import os, sys, time
    for number in range(3000):
        print(f"out {number}", flush=True)
        print(f"err {number}", file=sys.stderr, flush=True)
    sys.stderr.write("x" * 400_000 + "\n")
    print(f"{10 * 'ab'}\rbar", end="\r")
    sys.stdout.buffer.write(b"\xff\x1b[2J\n")
    print("no newline", end="")
"""


def test_stdout_and_stderr_keep_their_order_in_one_file(tmp_path: Path) -> None:
    write(tmp_path, "train.py", ORDERED)
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=True,
    )
    for line in ("> all 2>&1", "2>&1 | cat > all"):
        words = f"{shlex.quote(sys.executable)} -m gpurun --out run torchrun train.py {line}; rm -r run"
        subprocess.run(["sh", "-c", words], cwd=tmp_path, check=True)
        printed = (tmp_path / "all").read_bytes()
        assert plain.stdout in printed


SHOWS = """
    import os, sys, inner
    print(sys.argv, sys.orig_argv[1:], sys.path[0], __name__, repr(__package__), __file__)
    print(__spec__.name, type(__loader__).__name__, os.path.basename(inner.__file__))
"""


@pytest.mark.parametrize("kind", ["directory", "archive", "link"])
def test_a_directory_or_archive_with_a_main_runs(tmp_path: Path, kind: str) -> None:
    app = tmp_path / "app"
    app.mkdir()
    write(app, "__main__.py", SHOWS)
    write(app, "inner.py", "")
    name = {"directory": "app", "archive": "app.zip", "link": "link"}[kind]
    zipapp.create_archive(app, tmp_path / "app.zip")
    (tmp_path / "link").symlink_to("app")
    line = [sys.executable, "-u", name, "--x"]
    plain = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert gpurun(tmp_path, "torchrun", name, "--x").ended(0).out == plain.stdout


NAMES = """
    print(list(globals()), __annotations__)
    import sys
    print(__file__, sys.path[0], (lambda: 0).__code__.co_filename)
"""


@pytest.mark.parametrize("name", ["link/../train.py", "./train.py"])
def test_a_script_has_the_names_that_python_gives_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "other/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("other/inner")
    write(tmp_path, "train.py", NAMES)
    write(tmp_path / "other", "train.py", NAMES)
    line = [sys.executable, name]
    plain = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert gpurun(tmp_path, "torchrun", name).ended(0).out == plain.stdout


def test_a_program_that_cant_begin_has_failed_for_torchrun(tmp_path: Path) -> None:
    write(tmp_path, "broken.py", "print(")
    (tmp_path / "empty").mkdir()
    write(tmp_path, "train.py", "")
    package = tmp_path / "package"
    package.mkdir()
    write(package, "__init__.py", "")
    for words in ("broken.py", "-m package.inner.none", "empty", "missing.py"):
        assert gpurun(tmp_path, "torchrun", *words.split()).code == 1
    assert gpurun(tmp_path, "--set", "nothing=1", "torchrun", "train.py").code == 2


CALLS = """
    import sys, warnings
    import torch, gpurun
    names = set()
    def note(frame, event, argument):
        if event == "call" and "gpurun" in frame.f_code.co_filename:
            names.add(frame.f_code.co_name)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(40):
        if number == 5:  # before, torch imports more, which finders of gpurun's see
            {begin}(note)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    {begin}(None)
    print(*sorted(names))
"""


@pytest.mark.parametrize("begin", ["sys.setprofile", "sys.settrace"])
def test_what_records_calls_in_a_program_sees_one_of_gpurun(tmp_path: Path, begin: str) -> None:
    write(tmp_path, "train.py", CALLS.replace("{begin}", begin))
    assert gpurun(tmp_path, "torchrun", "train.py").ended(0).out == "guarded\n"


def test_a_file_is_read_again_where_a_program_begins_anew(tmp_path: Path) -> None:
    """From where the shell has come to."""
    hidden = "exec(\"os.environ['TORCH_LOGS'] = 'recompiles'\")"
    write(tmp_path, "train.py", f"import os, sys\nprint(sys.stdin.readline())\n{hidden}\nimport torch\n")
    (tmp_path / "given").write_text("title\nline one\nline two\n")
    line = f"{{ read title; {shlex.quote(sys.executable)} -m gpurun torchrun train.py; }} < given"
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == 2 * "line one\n\n"


def test_the_error_that_record_has_written_is_copied_with_the_exit_code(tmp_path: Path) -> None:
    text = """
        import os
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            if os.environ["RANK"] == "1":
                raise RuntimeError("recorded")
        main()
    """
    write(tmp_path, "train.py", text)
    found = []
    for words in ("-m torch.distributed.run", "-m gpurun torchrun"):
        env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "TMPDIR": str(tmp_path)}
        line = [sys.executable, *words.split(), "--nproc-per-node", "2", "train.py"]
        subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, check=False)
        error = json.loads((tmp_path / "error.json").read_bytes())["message"]
        del error["extraInfo"]["timestamp"]
        found.append(error)
        (tmp_path / "error.json").unlink()
    assert found[0] == found[1]
    assert found[0]["errorCode"] == 1


STREAMS = r"""
    import sys
    {above}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        assert stream is getattr(sys, f"__{name}__")
        print(name, type(stream), type(stream.buffer), stream.buffer.name, stream.fileno(), file=sys.stderr)
        facts = ("encoding", "errors", "name", "mode", "newlines", "line_buffering", "write_through")
        print([getattr(stream, fact) for fact in facts], file=sys.stderr)
    try:
        print(repr(sys.stdin.read()))
        print("\udcff \u20ac")
    except ValueError as error:
        print(type(error), file=sys.stderr)
    {import_torch}
"""


@pytest.mark.parametrize(
    ("env", "above"),
    [
        ({"LC_ALL": "C.UTF-8"}, ""),
        ({"PYTHONIOENCODING": "latin-1:replace"}, ""),
        ({"LC_ALL": "C.UTF-8"}, SETS_COMPUTED),
    ],
)
def test_the_standard_streams_are_those_of_python(tmp_path: Path, env: dict[str, str], above: str) -> None:
    text = STREAMS.replace("{above}", f"import os; {above}").replace(
        "{import_torch}", above and "import torch"
    )
    write(tmp_path, "train.py", text)
    (tmp_path / "given").write_bytes(b"a\r\nb\xff\n")
    ends = {}
    for name, words in {"plain": "-u", "ours": "-m gpurun --out run torchrun"}.items():
        line = f"{shlex.quote(sys.executable)} {words} train.py < given > {name}.out 2> {name}.err"
        subprocess.run(["sh", "-c", line], cwd=tmp_path, env={**os.environ, **env}, check=True)
        ends[name] = (tmp_path / f"{name}.out").read_bytes()
    assert ends["ours"] == ends["plain"]
    assert (tmp_path / "plain.err").read_text() in (tmp_path / "ours.err").read_text()
