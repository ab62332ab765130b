"""The fixture that looks for leaks finds them, and takes none of other tests for its own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpurun.launcher.machine.process_tree import descendants
from tests.integration.command import write

ROOT = Path(__file__).resolve().parents[3]
SHARED_MEMORY = Path("/dev/shm")

LEAKING = """
    import os
    import socket
    import subprocess
    import sys
    import tempfile
    import threading
    from pathlib import Path

    kept = []

    def test_that_leaves_everything():
        Path("/dev/shm/left-segment").write_bytes(b"x")
        # Its orphan waits for the end of the input, which comes when this program ends.
        code = "import os, sys; os.fork() and os._exit(0); os.setsid(); sys.stdin.read()"
        kept.append(subprocess.Popen([sys.executable, "-c", code, "left-orphan"], stdin=subprocess.PIPE))
        kept[0].wait()
        kept.append(socket.create_server(("127.0.0.1", 0)))
        print("port:", kept[1].getsockname()[1])
        threading.Thread(target=threading.Event().wait, name="left-thread", daemon=True).start()
        os.close(tempfile.mkstemp(prefix="left-file")[0])
        os.environ["LEFT_VARIABLE"] = "1"

    def test_that_leaves_nothing():
        subprocess.run([sys.executable, "-c", ""], check=True)
        print("segments:", sorted(os.listdir("/dev/shm")))
        Path("/dev/shm/left-segment").unlink()
"""


def test_leaks_of_all_kinds_are_found_and_segments_of_others_not_even_seen(tmp_path: Path) -> None:
    others = SHARED_MEMORY / "of-another"
    others.write_bytes(b"x")
    try:
        said = run_pytest(tmp_path)
    finally:
        others.unlink()
    assert "2 passed, 1 error" in said, said
    assert "ERROR test_nested.py::test_that_leaves_everything" in said
    (report,) = (line for line in said.splitlines() if line.startswith("E ") and "left behind: " in line)
    port = said.split("port: ")[1].split()[0]
    for leak in ("left-orphan", "(left-thread)", f"port {port}", "shared memory left-segment"):
        assert leak in report
    assert "temporary file left-file" in report
    assert "environment variable LEFT_VARIABLE" in report
    if os.geteuid() == 0:  # which a view of its own needs
        assert "segments: ['left-segment']" in said
        assert not (SHARED_MEMORY / "left-segment").exists()


ENDLESS = """
    import subprocess
    import sys
    from pathlib import Path

    def test_that_starts_a_daemon_and_goes_on():
        code = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"
        subprocess.run([sys.executable, "-c", code], start_new_session=True)
        (daemon,) = Path("/proc/self/task").glob("*/children")
        Path("begun.new").write_text(daemon.read_text())
        Path("begun.new").rename("begun")
        subprocess.run(["sleep", "600"])
"""


def test_nothing_is_left_of_a_session_that_is_killed(
    tmp_path: Path, all_gone: Callable[[list[int]], list[int]]
) -> None:
    argv, env = command_of(tmp_path, ENDLESS)
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as session:
        while not (tmp_path / "begun").exists():
            assert session.poll() is None
            time.sleep(0.01)
        family = descendants(session.pid)
        session.kill()
    daemons = [int(pid) for pid in (tmp_path / "begun").read_text().split()]
    assert set(daemons) & set(family)
    assert all_gone(family) == []


def run_pytest(directory: Path) -> str:
    """What pytest says of the leaking tests."""
    argv, env = command_of(directory, LEAKING)
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, check=False).stdout


def command_of(directory: Path, tests: str) -> tuple[list[str], dict[str, str]]:
    """A session of pytest with these tests, held to what all tests here are held to; its environment."""
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-rA", "--basetemp=tmp")
    argv = [sys.executable, "-m", "pytest", *options, str(write(directory, "test_nested.py", tests))]
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    return argv, {**os.environ, **path, "COLUMNS": "500", "GPURUN_SETTLE_S": "3"}
