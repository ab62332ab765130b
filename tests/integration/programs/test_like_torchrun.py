"""What programs do that torchrun's users rely on: they can't tell the difference."""

import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from gpurun.launcher.machine.process_tree import start_ticks
from tests import forkserver
from tests.integration.command import TIMEOUT_S, Result, free_port, gpurun, write

STEPS = """
    import os, signal, subprocess, sys, time
    import torch
    import torch.distributed as dist

    def trained(steps, pause_s=0.0):
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(steps):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_s)
        return model
"""
ONE = ("--devices", "cpu:1", "--out", "run")
TWO = ("--devices", "cpu:2", "--out", "run")


def details(result: Result) -> str:
    return gpurun(result.directory, "report", "run", "--details").ended(0).out


def log(directory: Path, rank: int = 0) -> str:
    """What a rank has written, without the lines of torch's profiler."""
    (path,) = (directory / "run" / "launches").glob(f"*/log/rank{rank}.log")
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("USDT:"))


VARIABLES = """
    import importlib.util, os, sys
    print("begins with", os.environ.get("OMP_NUM_THREADS"))
    os.environ["OMP_NUM_THREADS"] = "3"
    os.environ["TORCH_LOGS"] = "recompiles"
    os.environ.setdefault("NEW_PATHS", "")
    os.environ["NEW_PATHS"] += ":one"
    os.environ["WANDB_MODE"] = "offline"
    os.chdir("/")
    assert importlib.util.find_spec("torch")  # no import: torch reads what is set until that
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    {imports}
    import torch
    import torch._logging._internal as logging

    print("logs", sorted(logging.log_state.artifact_names))
    print("paths", os.environ["NEW_PATHS"], sys.argv[1:])
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("imports", ["", "from torch.nn import Linear"])
def test_variables_that_are_set_before_torch_is_imported_are_obeyed(tmp_path: Path, imports: str) -> None:
    write(tmp_path, "train.py", VARIABLES.replace("{imports}", imports))
    result = gpurun(tmp_path, "run", "train.py", *ONE, "--", "--epochs", "1").ended(0)
    lines = log(tmp_path).splitlines()
    assert lines[-2:] == ["logs ['recompiles']", "paths :one ['--epochs', '1']"]
    (begun,) = (line for line in lines if line.startswith("begins"))
    assert begun != "begins with 3"  # its text says what it sets
    said = "sets OMP_NUM_THREADS, TORCH_LOGS and TORCH_SHOW_CPP_STACKTRACES before it imports torch"
    assert said in " ".join(details(result).split())
    assert result.variant("script-1")["step_ms"] is not None
    assert "rank0.pt.trace.json.gz" in str(result.variant("script-1")["ranks"])


COMPUTED = """
    import os, sys
    print("begins", sys.stdin.read().strip())
    os.mkdir("made")
    {sets}
    import torch, torch._logging._internal as logging
    print(*sorted(logging.log_state.artifact_names))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    sys.exit(len(sys.argv) - 1)
"""
BY_EXEC = "exec(\"os.environ['TORCH_LOGS'] = 'recompiles'\")"
IN_A_MODULE = {"settings.py": "import os\nos.environ['TORCH_LOGS'] = 'recompiles'\n"}


@pytest.mark.parametrize(
    ("sets", "modules", "name"),
    [
        ("os.environ['TORCH_LOGS'] = ','.join(['recompiles'])", {}, "train.py"),
        ("import settings", IN_A_MODULE, "train.py"),
        ("import settings", IN_A_MODULE, "app"),
    ],
)
def test_a_computed_variable_is_obeyed_and_nothing_runs_twice(
    tmp_path: Path, sets: str, modules: dict[str, str], name: str
) -> None:
    directory = tmp_path / "app" if name == "app" else tmp_path
    directory.mkdir(exist_ok=True)
    write(directory, "__main__.py" if name == "app" else name, COMPUTED.replace("{sets}", sets))
    for module, text in modules.items():
        (directory / module).write_text(text)
    (tmp_path / "given").write_text("with what it was given\n")
    line = f"{shlex.quote(sys.executable)} -m gpurun --out run torchrun {name} < given"
    argv = ["sh", "-c", line]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "begins with what it was given\nrecompiles\n"
    report = gpurun(tmp_path, "report", "run", "--json").ended(0)
    assert report.variant("script-1")["step_ms"] is not None
    assert "rank0.pt.trace.json.gz" in str(report.variant("script-1")["ranks"])
    said = " ".join(details(report).split())
    assert "sets TORCH_LOGS before it imports torch, so each rank began anew" in said
    assert "twice" not in said


def test_a_seeded_program_begins_twice_without_a_promise(tmp_path: Path) -> None:
    """Its random numbers are seeded before its first line, and torch is imported for that."""
    write(tmp_path, "train.py", COMPUTED.replace("{sets}", BY_EXEC).replace("mkdir", "path.exists"))
    write(tmp_path, "job.yaml", "script: train.py\nargs: [fail]\nseed: 3\ndevices: cpu:1\n")
    failed = gpurun(tmp_path, "job.yaml", "--out", "run").ended(4)
    assert "what is above `import torch` ran twice, since it sets TORCH_LOGS\n" in log(tmp_path)
    assert "the next run" not in failed.err


def test_what_no_text_tells_makes_only_the_first_run_begin_twice(tmp_path: Path) -> None:
    write(tmp_path, "train.py", COMPUTED.replace("{sets}", BY_EXEC).replace("mkdir", "path.exists"))
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    failed = gpurun(tmp_path, "run", "train.py", *ONE, "--", "fail", env=env).ended(4)
    begun = [line.strip() for line in log(tmp_path).splitlines()]
    assert begun[:3] == ["begins", "begins", "recompiles"]
    said = (
        "what is above `import torch` ran twice, since it sets TORCH_LOGS; the next run of this file runs it"
    )
    assert said in failed.err
    gpurun(tmp_path, "run", "train.py", "--devices", "cpu:1", "--out", "again", env=env).ended(0)
    (again,) = (tmp_path / "again/launches").glob("*/log/rank0.log")
    lines = [line.strip() for line in again.read_text().splitlines() if not line.startswith("USDT:")]
    assert lines == ["begins", "recompiles"]


SETS = """
    import os, sys
    print("begins with", os.environ.get("TORCH_DISTRIBUTED_DEBUG"))
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    {more}
    import torch
    import gpurun.launcher.worker.base.preload as preload
    print(torch.distributed.get_debug_level().name, dict(preload.IMPORTED_WITH), sys.argv[1:])
"""
SHARED = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.mark.parametrize(
    ("more", "shared", "anew"),
    [
        ("", SHARED, ""),
        ("os.environ['MKL_NUM_THREADS'] = '3'", {}, "MKL_NUM_THREADS and TORCH_DISTRIBUTED_DEBUG"),
        ("if sys.argv: os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'", {}, "TORCH_DISTRIBUTED_DEBUG"),
        ("if sys.argv: del os.environ['TORCH_DISTRIBUTED_DEBUG']", {}, "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_torch_is_imported_with_what_the_program_sets_once_for_all_ranks_where_that_is_possible(
    tmp_path: Path, more: str, shared: dict[str, str], anew: str
) -> None:
    write(tmp_path, "train.py", SETS.replace("{more}", more))
    env = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    result = gpurun(tmp_path, "run", "train.py", *TWO, "--", "--x", env=env).ended(0)
    level = "INFO" if "INFO" in more else "OFF" if "del" in more else "DETAIL"
    for rank in range(2):
        *begun, last = log(tmp_path, rank).splitlines()
        assert begun == ["begins with OFF"]
        assert last == f"{level} {shared} ['--x']"
    said = f"sets {anew} before it imports torch, so each rank began anew"
    assert (said in " ".join(details(result).split())) == bool(anew)


THREADS = """
    import os
    {sets}
    import numpy, torch
    import ctypes
    (path,) = {line.split()[5] for line in open("/proc/self/maps") if "openblas" in line}
    blas = ctypes.CDLL(path)
    assert (numpy.ones((300, 300)) @ numpy.ones((300, 300)) == 300).all()
    print(torch.get_num_threads(), blas.scipy_openblas_get_num_threads64_())
    print(os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize("sets", ["", "os.environ['OMP_NUM_THREADS'] = '2'"])
@pytest.mark.parametrize("blas", [{}, {"OPENBLAS_NUM_THREADS": "2"}])
def test_threads_are_those_that_the_program_and_the_shell_say(
    tmp_path: Path, sets: str, blas: dict[str, str]
) -> None:
    """The server, which imports numpy and torch, has none; the ranks' share is a thread each."""
    write(tmp_path, "train.py", THREADS.replace("{sets}", sets))
    env = {**blas, "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "train.py"]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, check=True)
    gpurun(tmp_path, "run", "train.py", *TWO, env=env).ended(0)
    assert log(tmp_path).encode() == done.stdout


def test_everything_that_is_written_is_kept(tmp_path: Path) -> None:
    """torchrun starts ranks with `python -u`."""
    program = "import os, subprocess, sys\nsys.stdout.write('a')\nsubprocess.run(['echo', 'b'])\n"
    (tmp_path / "train.py").write_text(f"{program}sys.stdout.write('c')\nos._exit(0)\n")
    gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert log(tmp_path) == "ab\nc"


def test_a_program_may_remove_its_directory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, shutil\nos.mkdir('x')\nos.chdir('x')\nos.rmdir('../x')\n")
    gpurun(tmp_path, "run", "train.py", *ONE).ended(0)


FAILS = """
    import os, sys, time
    for number in range(31):
        print(f"line {number}", file=sys.stderr)
    printed = "printed" + os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1":
        while not os.path.exists(printed):
            time.sleep(0.01)
        time.sleep(1 if printed == "printed0" else 0)
        import no_such_package
    open(printed, "w").close()
    time.sleep(2)
"""


def test_streams_are_encoded_as_the_shell_says(tmp_path: Path) -> None:
    write(tmp_path, "streams.py", "import sys\nprint(sys.stdout.encoding, sys.stdout.errors)")
    result = gpurun(tmp_path, "torchrun", "streams.py", env={"PYTHONIOENCODING": "latin-1"}).ended()
    assert result.out == "iso8859-1 strict\n"  # as Python calls it


def test_notice_of_a_preemption_ends_no_program_and_python_knows_no_handler(tmp_path: Path) -> None:
    """Lightning adds its own, which saves a checkpoint, only where there is none."""
    write(
        tmp_path,
        "notice.py",
        """
        import os, signal
        before = signal.getsignal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        print("alive", before == signal.SIG_DFL)
        """,
    )
    assert gpurun(tmp_path, "torchrun", "notice.py").ended().out == "alive True\n"


def test_sigusr1_ends_a_program_where_its_line_says_so(tmp_path: Path) -> None:
    """So that a batch job which is queued again after a failure goes on from what was saved."""
    write(
        tmp_path,
        "notice.py",
        """
        import os, signal, sys
        def save(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGUSR1, save)
        launcher = int(sys.argv[1])
        os.kill(launcher, signal.SIGUSR1)
        while True:
            signal.pause()
        """,
    )
    line = '"--signals-to-handle", "SIGUSR1,SIGTERM", "notice.py", str(os.getpid())'
    begin = f'import os, sys\nos.execv(sys.executable, [sys.executable, "-m", "gpurun", "torchrun", {line}])'
    result = subprocess.run([sys.executable, "-c", begin], cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, result.stdout.splitlines()[0]) == (1, "saved"), result.stderr
    assert "SIGUSR1" in result.stderr


def test_under_torchrun_all_lines_are_shown_and_every_failure_is_tried_again(tmp_path: Path) -> None:
    write(tmp_path, "train.py", FAILS)
    line = ("torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    result = gpurun(tmp_path, "--devices", "cpu:2", *line).ended(1)
    assert result.err.count("line 30") == 4  # of two ranks, twice
    assert "the last lines of its log" not in result.err


def test_a_rank_whose_variables_are_read_later_begins_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train.py",
        """
        import os
        print("begins")
        os.environ["MASTER_PORT"] = os.environ["MASTER_PORT"]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import importlib.util
        assert importlib.util.find_spec("torch").submodule_search_locations
        import torch.nn.functional as F
        import torch
        assert torch.__spec__.origin == torch.__file__
        print(F.relu(torch.ones(1)))
        """,
    )
    gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert log(tmp_path).splitlines() == ["begins", "tensor([1.])"]


OTHER = """
    import os, sys
    print("begins")
    sys.path.insert(0, os.path.abspath("vendored"))
    import torch
    print(torch.__file__)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


def test_a_program_gets_the_torch_that_it_puts_first(tmp_path: Path) -> None:
    write(tmp_path, "train.py", OTHER)
    (tmp_path / "vendored").mkdir()
    own = tmp_path / "vendored" / "torch"
    own.symlink_to(Path(torch.__file__).parent)
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert log(tmp_path).splitlines() == ["begins", "begins", f"{own}/__init__.py"]
    assert result.variant("script-1")["step_ms"] is not None


WARNS = """
    import warnings
    import torch

    def warn():
        warnings.warn("seen once")

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(60):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        warn()
"""


def test_a_trace_shows_no_warning_again(tmp_path: Path) -> None:
    write(tmp_path, "train.py", WARNS)
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert "rank0.pt.trace.json.gz" in str(result.variant("script-1")["ranks"])
    assert log(tmp_path).count("seen once") == 1 + log(tmp_path).count('warnings.warn("seen once")')


def test_a_program_that_starts_its_own_ranks_is_told_so(tmp_path: Path) -> None:
    program = (
        "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=1)\n"
    )
    (tmp_path / "train.py").write_text(program)
    said = " ".join(gpurun(tmp_path, "run", "train.py", *ONE).ended(0).out.split())
    assert (
        "no steps were timed: the program starts processes of its own (mp.spawn), which aren't seen" in said
    )
    assert "Next train in the process that gpurun starts for each device, without mp.spawn" in said


def test_steps_before_os_exit_are_recorded(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STEPS + "\n    trained(40)\n    os._exit(0)\n")
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    lines = (tmp_path / "run/variants/script-1/rank0.jsonl").read_text().splitlines()
    assert len(lines) >= 39
    assert result.variant("script-1")["step_ms"] is not None


def test_steps_of_threads_are_recorded_until_these_end(tmp_path: Path) -> None:
    thread = "\n    import threading\n    threading.Thread(target=trained, args=(40, 0.01)).start()\n"
    write(tmp_path, "train.py", STEPS + thread)
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert result.variant("script-1")["step_ms"] is not None


UPLOAD = (
    STEPS
    + """
    trained(40)
    how = {"start_new_session": True} if sys.argv[1] == "detached" else {}
    command = ["nohup", "sleep", sys.argv[2]] if sys.argv[1] == "nohup" else ["sleep", sys.argv[2]]
    if sys.argv[1] == "shell":
        command = ["sh", "-c", f"until [ -e {sys.argv[2]} ]; do sleep 0.1; done"]
    if sys.argv[1] == "daemon":
        if os.fork() == 0:
            os.setsid()
            if (pid := os.fork()) == 0:
                time.sleep(100)
            open("pid", "w").write(str(pid))
            os._exit(0)
        os.wait()
        sys.exit()
    child = subprocess.Popen(command, **how)
    while sys.argv[1] == "nohup" and "nohup" in open(f"/proc/{child.pid}/comm").read():
        time.sleep(0.01)  # nohup has not yet done what it is for
    open("pid", "w").write(str(child.pid))
"""
)


@pytest.mark.parametrize(
    ("how", "what"),
    [("detached", "`sleep 100`"), ("nohup", "`sleep 100`"), ("daemon", "a fork of the program")],
)
def test_a_process_that_has_left_its_rank_goes_on_after_the_end(
    tmp_path: Path, how: str, what: str, all_gone: Callable[[list[int]], list[int]]
) -> None:
    write(tmp_path, "train.py", UPLOAD)
    result = gpurun(tmp_path, "run", "train.py", *ONE, "--", how, "100").ended(0)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert start_ticks(pid) is not None
        assert f"process {pid} ({what}) goes on" in result.err
        report = gpurun(tmp_path, "report", "run", "--details").ended(0).out
        assert f"Process {pid} ({what}) goes on" in " ".join(report.split())
    finally:
        os.kill(pid, signal.SIGKILL)
    assert all_gone([pid]) == []


def test_a_process_that_a_rank_has_left_is_waited_for(tmp_path: Path) -> None:
    program = UPLOAD + "\n    open('ready0', 'w').close()\n    open('ready1', 'w').close()\n"
    write(tmp_path, "train.py", program)
    with training(tmp_path, *ONE, "--", "shell", "go") as process:
        assert process.stderr is not None
        while "waiting for process" not in (said := process.stderr.readline()):
            assert process.poll() is None
        (tmp_path / "go").touch()
        _, err = process.communicate()
    assert process.returncode == 0, err
    pid = int((tmp_path / "pid").read_text())
    assert start_ticks(pid) is None
    command = "sh -c 'until [ -e go ]; do sleep 0.1; done'"
    assert f"waiting for process {pid} (`{command}`), which the program has left" in said
    assert "waiting for" not in err


@pytest.mark.parametrize("how", ["detached", "attached"])
def test_ci_can_have_such_processes_ended(
    tmp_path: Path, how: str, all_gone: Callable[[list[int]], list[int]]
) -> None:
    write(tmp_path, "train.py", UPLOAD)
    result = gpurun(tmp_path, "run", "train.py", *ONE, "--set", "leftover=stop", "--", how, "100").ended(0)
    pid = int((tmp_path / "pid").read_text())
    assert f"process {pid} (`sleep 100`), which the program has left, is ended" in result.err
    assert all_gone([pid]) == []


def test_ctrl_c_ends_what_is_left_of_a_run_that_is_complete(
    tmp_path: Path, all_gone: Callable[[list[int]], list[int]]
) -> None:
    program = UPLOAD + "\n    open('ready0', 'w').close()\n    open('ready1', 'w').close()\n"
    write(tmp_path, "train.py", program)
    with training(tmp_path, *ONE, "--", "attached", "100") as process:
        assert process.stderr is not None
        while "waiting for process" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 0, err
    assert "Ctrl-C: what the program has left is ended" in err
    assert all_gone([int((tmp_path / "pid").read_text())]) == []


@contextmanager
def training(directory: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`gpurun run train.py` in the background, once each rank has written `ready`."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    argv = ("gpurun", "run", "train.py", *args)
    with forkserver.start(*argv, cwd=directory, stdout=pipe, stderr=pipe, stdin=null) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while len([*directory.glob("ready*")]) < 2:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


SAVES = (
    STEPS
    + """
    rank = os.environ["RANK"]
    try:
        open(f"ready{rank}", "w").close()
        trained(100000, 0.01)
    except KeyboardInterrupt:
        print("ended early", flush=True)
    finally:
        open(f"saved{rank}", "w").close()
"""
)


def test_ctrl_c_is_a_keyboard_interrupt_in_the_program(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SAVES)
    with training(tmp_path, *TWO) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert (
        "Ctrl-C: the ranks end and may save; they get SIGTERM after 15 s; they are killed after 30 s" in err
    )
    assert err.count("ended early") == 2
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    said = "Ctrl-C stopped 01-script-2; its ranks ended with exit code 0"
    assert said in err
    assert said in " ".join(details(Result(0, "", "", tmp_path)).split())


MEETS = (
    STEPS
    + """
    rank = os.environ["RANK"]

    def save(*_):
        dist.barrier(dist.new_group())
        sys.exit(open(f"saved{rank}", "w").close())

    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, save)
    open(f"ready{rank}", "w").close()
    trained(100000, 0.01)
"""
)


def test_ranks_that_save_may_make_a_group(tmp_path: Path) -> None:
    write(tmp_path, "train.py", MEETS)
    with training(tmp_path, *TWO) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}, err


DEAF = (
    STEPS
    + """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: open("asked" + os.environ["RANK"], "w").close())
    open("ready" + os.environ["RANK"], "w").close()
    trained(100000, 0.01)
"""
)


def test_ranks_that_do_not_end_in_time_are_killed_and_named(tmp_path: Path) -> None:
    write(tmp_path, "train.py", DEAF)
    with training(tmp_path, *TWO, "--set", "grace=6s") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    said = "ranks 0, 1 of 01-script-2 were killed, since 6.0 s were not enough to end (`grace`,"
    assert said in err
    assert said[1:] in " ".join(gpurun(tmp_path, "report", "run", "--details").out.split())
    assert {path.name for path in tmp_path.glob("asked*")} == {"asked0", "asked1"}


def test_ranks_that_a_second_ctrl_c_kills_are_named(tmp_path: Path) -> None:
    write(tmp_path, "train.py", DEAF)
    with training(tmp_path, *TWO) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("may save" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    said = "anks 0, 1 of 01-script-2 were killed before the time to end was over"
    assert said in err
    assert said in " ".join(details(Result(0, "", "", tmp_path)).split())


RAISES = (
    STEPS
    + """
    import tempfile
    from torch.multiprocessing import spawn

    def work(index):
        raise ValueError("bad shard")

    if __name__ == "__main__":
        tempfile.tempdir = os.getcwd()  # torch leaves a file there
        print(os.environ["ROLE_NAME"], os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"])
        spawn(work)
"""
)


def test_what_a_spawned_process_raises_is_said_without_a_line_of_ours(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RAISES)
    line = ("torchrun", "--role", "rank", "--tee", "3", "--nproc-per-node", "1", "train.py")
    result = gpurun(tmp_path, "--devices", "cpu:1", "--out", "run", *line).ended(1)
    said = "-- Process 0 terminated with the following error: ValueError: bad shard"
    assert f"rank 0 raised ProcessRaisedException: {said}" in " ".join(result.err.split())
    assert result.out == "[rank0]:rank SIGTERM,SIGINT,SIGHUP,SIGQUIT\n"
    (said_by_rank,) = (tmp_path / "run/launches").rglob("stderr.log")
    assert "/program_rank.py" not in said_by_rank.read_text()


TOLD = (
    STEPS
    + """
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(open(signal.Signals(number).name, "w").close()))
    open("ready0", "w").close()
    open("ready1", "w").close()
    trained(100000, 0.01)
"""
)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_program_gets_the_signal_that_the_command_gets(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path, "train.py", TOLD)
    with training(tmp_path, *ONE) as process:
        process.send_signal(number)
        process.communicate()
    assert process.returncode == 130
    assert (tmp_path / number.name).exists()


TOGETHER = (
    STEPS
    + """
    rank = os.environ["RANK"]
    script = f"trap 'touch told{rank}; exit' TERM; echo; sleep 100 & wait"
    child = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(child.wait()))
    child.stdout.readline()
    open(f"ready{rank}", "w").close()
    trained(100000, 0.01)
"""
)


def test_what_a_rank_has_started_gets_the_signal_as_well(tmp_path: Path) -> None:
    """torchrun sends it to the rank's process group."""
    write(tmp_path, "train.py", TOGETHER)
    with training(tmp_path, *TWO) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert {path.name for path in tmp_path.glob("told*")} == {"told0", "told1"}
    said = " ".join(gpurun(tmp_path, "report", "run", "--details").ended(0).out.split())
    assert "SIGTERM stopped 01-script-2; its ranks ended with exit code" in said  # that of a shell


STOPPED = (
    STEPS
    + """
    trained(8, 0.01)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    open("ready0", "w").close()
    open("ready1", "w").close()
    while True:
        signal.pause()
"""
)


def test_what_a_stopped_program_has_done_in_its_warm_up_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STOPPED)
    with training(tmp_path, *ONE) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    said = " ".join(gpurun(tmp_path, "report", "run", "--details").ended(0).out.split())
    assert "ms per step" in said
    assert "Only 7 steps were recorded" in said
    assert "No trace: the program ended before step" in said
    assert "--details` says" not in said


SPAWNS = """
    import os, time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 100000

        def __getitem__(self, index):
            time.sleep(0.005)
            return torch.ones(1000)

    if __name__ == "__main__":
        model = torch.nn.Linear(1000, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for batch in DataLoader(Data(), 4, num_workers=1, multiprocessing_context="spawn"):
            model(batch).mean().backward()
            optimizer.step()
            open("ready" + os.environ["RANK"], "w").close()
"""


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    """The trackers of workers end by themselves, once all others have ended."""
    write(tmp_path, "train.py", SPAWNS)
    before = set(os.listdir("/dev/shm"))
    with training(tmp_path, *TWO) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 130
    assert set(os.listdir("/dev/shm")) - before == set()


MARKS = (
    STEPS
    + """
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    ended = profile(activities=[ProfilerActivity.CPU])
    for _ in range(60):
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
        time.sleep(0.005)
        with torch.profiler.record_function("ProfilerStep#7"):
            time.sleep(0.005)
"""
)


def test_steps_are_those_of_our_marks(tmp_path: Path) -> None:
    """A program may make such marks, too, at any time."""
    write(tmp_path, "train.py", MARKS)
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    trace = result.variant("script-1")["ranks"][0]["trace"]
    shown = gpurun(tmp_path, "trace", f"run/{trace}", "--json").json
    assert [step["step"] for step in shown["ranks"][0]["steps"]] == [1, 2, 3]
    assert all(step["span_us"] > 10_000 for step in shown["ranks"][0]["steps"])


def test_nothing_but_the_program_is_shown(tmp_path: Path) -> None:
    """torch's profiler announces itself, in the middle of a progress bar."""
    bar = "\n    sys.stderr.write('half')\n    trained(40)\n    sys.stderr.write(' done')\n"
    write(tmp_path, "train.py", STEPS + bar)
    result = gpurun(tmp_path, "run", "train.py", *ONE).ended(0)
    assert gpurun(tmp_path, "logs", "run").out == "[rank 0] half done\n"
    assert "[rank 0] half done\n" in result.err


LINE = (
    STEPS
    + """
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    trained(40)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME")
    assert os.path.isdir(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
    shown = [[os.environ[name] for name in names], total.item(), sys.argv[1:], sys.orig_argv[1:], __name__]
    sys.stdout.write(f"{shown}\\n")  # at once: torchrun's ranks share its stdout, unbuffered
    dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("train.py --epochs 1", 0),
        ("-m train --json", 0),
        ("train.py --local-rank=${local_rank} a$$b ${no} $", 0),
    ],
)
def test_a_line_of_torchrun_does_the_same_with_gpurun_in_front(tmp_path: Path, words: str, code: int) -> None:
    write(tmp_path, "train.py", LINE)
    line = ["--standalone", "--nproc-per-node", "2", *words.split()]
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *line],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        check=False,
    )
    ours = gpurun(tmp_path, "--out", "run", "torchrun", *line)
    assert (theirs.returncode, ours.code) == (code, code), ours.err
    assert sorted(ours.out.splitlines()) == sorted(theirs.stdout.splitlines())
    assert "ms per step" in ours.err


def test_a_file_takes_what_the_program_of_a_line_prints_and_it_reads_stdin(tmp_path: Path) -> None:
    """Also where stderr goes there, too: nothing is written over anything else."""
    program = """
    import os, sys
    print(os.environ["RANK"], sys.stdin.read().strip(), flush=True)
    for number in range(200):
        print(f"out {number}", flush=True)
        print(f"err {number}", file=sys.stderr, flush=True)
    """
    write(tmp_path, "train.py", program)
    (tmp_path / "given").write_text("from a file\n")
    for redirected in (
        "> printed 2> said < given",
        "> printed 2>&1 < given",
        "2> said < given | cat > printed",
    ):
        line = f"{shlex.quote(sys.executable)} -m gpurun torchrun --nproc-per-node 1 train.py {redirected}"
        subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
        printed = (tmp_path / "printed").read_text().splitlines()
        if "2>&1" in redirected:
            assert "err 199" in printed
            assert any(each.startswith("logs: ") for each in printed)
            printed = [each for each in printed if each == "0 from a file" or each.startswith("out ")]
        else:
            assert "\nerr 199\n" in (tmp_path / "said").read_text()
        assert printed == ["0 from a file", *(f"out {number}" for number in range(200))]


@pytest.mark.parametrize("options", ["--json", "--quiet"])
def test_a_program_whose_output_is_not_shown_reads_stdin_too(tmp_path: Path, options: str) -> None:
    write(tmp_path, "train.py", "import sys\nopen('read', 'w').write(sys.stdin.read())\nprint('zebra')\n")
    (tmp_path / "given").write_text("from a file\n")
    line = f"{shlex.quote(sys.executable)} -m gpurun {options} torchrun train.py < given"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "read").read_text() == "from a file\n"
    assert "zebra" not in done.stdout


ASKS = """
    import os, sys
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        print("hello,", input("name? "), sys.stdin.isatty())
        breakpoint()
    dist.barrier()
    print("went on")
    dist.destroy_process_group()
"""


def test_a_program_may_ask_at_the_terminal(tmp_path: Path) -> None:
    """A debugger, too: what no newline ends is shown where it waits."""
    write(tmp_path, "train.py", ASKS)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        argv = [sys.executable, "-m", "gpurun", *TWO, "torchrun", "--nproc-per-node", "2", "train.py"]
        os.execv(sys.executable, argv)
    seen, answers = "", [("name? ", "Ada\n"), ("(Pdb) ", "p 6 * 7\n"), ("42", ""), ("(Pdb) ", "c\n")]
    with os.fdopen(terminal, "r+b", buffering=0) as stream, suppress(OSError):  # its end
        while part := stream.read(1 << 12):
            seen += part.decode(errors="replace")
            while answers and answers[0][0] in seen:
                waited_for, answer = answers.pop(0)
                seen = seen.partition(waited_for)[2]
                stream.write(answer.encode())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, seen
    assert seen.count("went on") == 2
    assert "name? " not in seen
    assert "name? hello, Ada True\n" in log(tmp_path)


def test_the_port_of_a_line_is_that_of_the_store(tmp_path: Path) -> None:
    """A program may be given it in another way, and as each address of the machine."""
    program = """
    import sys
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.2:{sys.argv[1]}", rank=0, world_size=1)
    dist.destroy_process_group()
    """
    write(tmp_path, "train.py", program)
    port = str(free_port())
    line = ("--master-addr", "127.0.0.2", "--master-port", port, "train.py", port)
    gpurun(tmp_path, "torchrun", *line).ended(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        said = gpurun(tmp_path, "torchrun", "--master-port", taken, "train.py", taken).ended(1).err
    assert f"master_port {taken} can't be used on 127.0.0.1: Address already in use" in said


def test_lines_of_two_nodes_have_the_port_that_they_say_and_print_what_their_ranks_do(tmp_path: Path) -> None:
    """Each node's shell says what isn't planned for all, and its line what its program gets."""
    program = """
    import os, sys
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    names = "RANK", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "MASTER_PORT"
    print(*map(os.environ.get, names), *sys.argv[1:], sys.stdin.read(), end="", flush=True)
    sys.stderr.write(f"err {os.environ['RANK']}\\n")
    dist.destroy_process_group()
    """
    write(tmp_path, "train.py", program)
    port = str(free_port())
    files = ("--local-ranks-filter", "0", "--log-dir", "logs", "--tee", "2")
    line = ("torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", *files)
    said, shown = [], []
    shells: tuple[dict[str, str], ...] = {}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    with ExitStack() as started:
        nodes = []
        for node, env in enumerate(shells):
            number = ("--node-rank", "1") if node else ()  # as under torchrun, the first needs none
            own = ("--out", f"run{node}", "--devices", "cpu:1", *line, "--master-port", port)
            argv = ("gpurun", *own, *number, "train.py", f"--out={node}")
            given = started.enter_context(write(tmp_path, f"given{node}", f"given to {node}\n").open())
            pipe = subprocess.PIPE
            process = forkserver.start(*argv, cwd=tmp_path, env=env, stdin=given, stdout=pipe, stderr=pipe)
            nodes.append(started.enter_context(process))
        for process in nodes:
            out, err = process.communicate()
            assert process.returncode == 0, err
            said.append(out)
            shown += [text for text in err.splitlines() if "]:err " in text]
    assert said == [f"0 1 {port} --out=0 given to 0\n", f"1 3 {port} --out=1 given to 1\n"]
    assert shown == ["[default0]:err 0", "[default0]:err 1"]
    written = (tmp_path / "logs").glob("*/attempt_0/0/stderr.log")
    assert sorted(path.read_text() for path in written) == ["err 0\n", "err 1\n"]


STREAMS = """
    import os, sys
    for name, file in (("out", sys.stdout), ("err", sys.stderr)):
        file.write(f"{name} {os.environ['LOCAL_RANK']}\\n")  # at once, also with PYTHONUNBUFFERED
    if "--fail" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("options", "files", "out", "err"),
    [
        ("--log-dir d --redirects 3", "0/stderr 0/stdout 1/stderr 1/stdout", "", ""),
        ("--log-dir d -r 0:3,1:1 -t 0:1", "0/stderr 0/stdout 1/stdout", "[default0]:out 0", "err 1"),
        (
            "--log-dir d -t 3 --local-ranks-filter 1",
            "0/stderr 0/stdout 1/stderr 1/stdout",
            "[default1]:out 1",
            "[default1]:err 1",
        ),
        ("--log-dir /dev/null -r 3 -t 3", "", "out 0|out 1", "err 0|err 1"),
        ("--redirects 0:1", "0/stdout", "out 1", "err 0|err 1"),
        ("--local-ranks-filter 0,1", "", "out 0|out 1", "err 0|err 1"),
        ("--local-ranks-filter 1,5", "", "out 1", "err 1"),
        ("--tee 1:3 --role r", "1/stderr 1/stdout", "[r1]:out 1|out 0", "[r1]:err 1|err 0"),
        ("", "", "out 0|out 1", "err 0|err 1"),
    ],
)
def test_streams_go_to_the_files_that_the_line_says(
    tmp_path: Path, options: str, files: str, out: str, err: str
) -> None:
    """As torchrun (torch 2.13) wrote and printed for the same lines."""
    write(tmp_path, "train.py", STREAMS)
    line = ("torchrun", "--nproc-per-node", "2", *options.split(), "train.py")
    done = gpurun(tmp_path, "--devices", "cpu:2", "--out", "run", *line).ended(0)
    found = {f"{path.parent.name}/{path.stem}": path for path in tmp_path.rglob("attempt_0/*/std*.log")}
    assert sorted(found) == files.split()
    for name, path in found.items():
        assert path.read_text() == f"{name[5:]} {name[0]}\n"
    assert "|".join(sorted(done.out.splitlines())) == out
    shown = [text for text in sorted(done.err.splitlines()) if re.search(r"^(\[\w+\]:)?err \d$", text)]
    assert "|".join(shown) == err


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [
        ("", "out 0", "err 0"),
        ("--redirects 1", "", "err 0"),
        ("--tee 3", "[default0]:out 0", "[default0]:err 0"),
    ],
)
def test_a_socket_takes_stdout_and_not_stderr(tmp_path: Path, options: str, out: str, err: str) -> None:
    """Ranks can't open it."""
    write(tmp_path, "train.py", STREAMS)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = ("gpurun", "--out", "run", "torchrun", *options.split(), "train.py")
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        with forkserver.start(*line, cwd=tmp_path, stdin=null, stdout=theirs, stderr=pipe) as process:
            theirs.close()
            _, said = process.communicate()
        with ours.makefile() as stream:
            assert stream.read().splitlines() == [out][: bool(out)]
    assert [text for text in said.splitlines() if re.search(r"(out|err) \d$", text)] == [err]
    assert "out 0" in gpurun(tmp_path, "logs", "run").out


def test_lines_that_are_shown_begin_as_the_shell_says(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STREAMS)
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank} ${no}> "}
    assert gpurun(tmp_path, "torchrun", "--tee", "1", "train.py", env=env).ended(0).out == (
        "<default 0 0 ${no}> out 0\n"
    )


RECORDS = """
    import os
    from torch.distributed.elastic.multiprocessing.errors import record

    names = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    found = [os.environ.get(name) for name in names]
    os.write(1, b"%r " % (found,))  # print() without a buffer writes between another rank's words

    @record
    def main():
        raise ValueError("bad shard")

    main()
"""


def test_what_record_writes_is_in_the_directory_of_logs(tmp_path: Path) -> None:
    write(tmp_path, "train.py", RECORDS)
    line = ("torchrun", "--log-dir", "d", "--max-restarts", "1", "train.py")
    gpurun(tmp_path, *line).ended(1)
    found = sorted(path.relative_to(tmp_path / "d").parts[1:] for path in tmp_path.rglob("error.json"))
    assert found == [("attempt_0", "0", "error.json"), ("attempt_1", "0", "error.json")]
    for path in tmp_path.rglob("error.json"):
        assert "ValueError: bad shard" in path.read_text()


GIVEN = {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}


@pytest.mark.parametrize("given", [{}, GIVEN])
@pytest.mark.parametrize("num", ["1", "2"])
def test_variables_of_a_line_are_torchruns(tmp_path: Path, num: str, given: dict[str, str]) -> None:
    write(tmp_path, "train.py", RECORDS.replace("    main()", ""))
    line = ["--nproc-per-node", num, "train.py"]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | given
    env["TMPDIR"] = str(tmp_path)
    argv = [sys.executable, "-m", "torch.distributed.run", *line]
    theirs = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    ours = gpurun(tmp_path, "torchrun", *line, env=given).ended(0).out
    assert ours == theirs.stdout


def test_each_attempt_has_files_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STREAMS)
    line = "torchrun --log-dir d --redirects 3 --max-restarts 1 --rdzv-backend c10d --rdzv-id x train.py"
    gpurun(tmp_path, "--out", "run", *line.split(), "--fail").ended(0)
    (place,) = (tmp_path / "d").glob("x_*")
    assert [(place / f"attempt_{n}/0/stdout.log").read_text() for n in range(2)] == ["out 0\n"] * 2


def test_a_line_that_fails_ends_with_torchruns_exit_code(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "raise SystemExit(7)\n")
    assert "exit code 7" in gpurun(tmp_path, "torchrun", "train.py").ended(1).err
    assert "there is no file nope.py" in gpurun(tmp_path, "torchrun", "nope.py").ended(1).err
    assert "nope" in gpurun(tmp_path, "torchrun", "-m", "nope.train").ended(1).err


def test_restarts_of_a_line_are_counted_as_by_torchrun(tmp_path: Path) -> None:
    fails = (
        STEPS
        + """
    open("attempt" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first time")
    """
    )
    write(tmp_path, "train.py", fails)
    gpurun(tmp_path, "torchrun", "--max-restarts", "1", "train.py").ended(0)
    assert sorted(path.name for path in tmp_path.glob("attempt*")) == ["attempt0", "attempt1"]


def test_a_command_that_is_not_pythons_becomes_the_rank(tmp_path: Path) -> None:
    write(tmp_path, "run.sh", "#!/bin/sh\ngrep SigIgn /proc/self/status > $1$RANK\n").chmod(0o755)
    done = gpurun(tmp_path, "torchrun", "--no-python", "--nproc-per-node", "2", "./run.sh", "made").ended(0)
    assert "run.sh: ./run.sh made, on cpu:0 cpu:1" in done.err
    assert "Answer   ./run.sh on 2 devices ran" in done.err
    assert sorted(path.name for path in tmp_path.glob("made*")) == ["made0", "made1"]
    ignored = int((tmp_path / "made0").read_text().split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("torchrun --nnodes 1:2 train.py", "--nnodes 1:2 has no counterpart"),
        (
            "run torchrun --nproc-per-node 2 train.py --x 1",
            "gpurun torchrun --nproc-per-node 2 train.py --x 1",
        ),
        ("run python -m torch.distributed.run --nproc 2 t.py", "gpurun torchrun --nproc 2 t.py"),
        ("python -m torch.distributed.run --nproc 2 t.py", "gpurun torchrun --nproc 2 t.py"),
        ("run accelerate launch --num_processes 2 t.py --x 1", "torchrun --nproc-per-node 2 t.py --x 1"),
        ("accelerate launch t.py --x 1", "gpurun run t.py -- --x 1"),
        ("run --out R --devices cpu:2 torchrun --nnodes 1 t.py", "gpurun torchrun --nnodes 1 t.py"),
        ("/usr/bin/torchrun --nproc-per-node 2 t.py", "gpurun torchrun --nproc-per-node 2 t.py"),
        ("-m torch.distributed.run --nproc 2 t.py", "gpurun torchrun --nproc 2 t.py"),
        ("run train.py --epochs 1", "gpurun run train.py -- --epochs 1"),
    ],
)
def test_a_line_of_another_launcher_gets_the_one_to_write(tmp_path: Path, words: str, said: str) -> None:
    assert said in gpurun(tmp_path, *words.split()).ended(2).err


@pytest.mark.parametrize("name", ["torchrun", "explain", "help"])
def test_a_job_file_with_the_name_of_a_command_is_run_by_job(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, "workload: no_such\ndevices: cpu:1\nglobal_batch: 4\n")
    assert "no_such" in gpurun(tmp_path, "job", name).ended(2).err
    assert "no_such" in gpurun(tmp_path, f"./{name}").ended(2).err


SLOW = {
    "import": """
        import time
        import torch

        def tokenize():
            time.sleep(100)

        tokenize()
    """,
    "port": """
        import os
        import torch.distributed as dist

        os.environ["MASTER_PORT"] = "12355"
        dist.init_process_group("gloo")
    """,
    "guard": """
        import multiprocessing
        import time
        import torch

        process = multiprocessing.get_context("spawn").Process(target=print)
        if multiprocessing.current_process().name != "MainProcess":
            time.sleep(100)  # the process that was started, which ran all of this
        process.start()
        process.join()
    """,
}
WHY = {
    "import": "train.py:5 in tokenize",
    "port": "gpurun: this rank waits at 127.0.0.1:12355 for the others, and nothing listens there",
    "guard": 'runs train.py from its beginning: put what that does below `if __name__ == "__main__":`',
}


@pytest.mark.parametrize("name", SLOW)
def test_what_a_program_does_before_its_first_step_is_in_the_message(tmp_path: Path, name: str) -> None:
    write(tmp_path, "train.py", SLOW[name])
    hang = ("--hang-timeout", "8s", "--set", "grace=1s")
    result = gpurun(tmp_path, "run", "train.py", *TWO, *hang).ended(4)
    assert WHY[name] in " ".join(result.err.split())
    assert (name == "guard") == ("by spawn" in result.err)
