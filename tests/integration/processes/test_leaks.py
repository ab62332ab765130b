"""The fixture that looks for leaks finds them, and takes none of other tests for its own."""

import os
import subprocess
import sys
from pathlib import Path

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
    assert "ERROR test_leaking.py::test_that_leaves_everything" in said
    (report,) = (line for line in said.splitlines() if line.startswith("E ") and "left behind: " in line)
    port = said.split("port: ")[1].split()[0]
    for leak in ("left-orphan", "(left-thread)", f"port {port}", "shared memory left-segment"):
        assert leak in report
    assert "temporary file left-file" in report
    assert "environment variable LEFT_VARIABLE" in report
    if os.geteuid() == 0:  # which a view of its own needs
        assert "segments: ['left-segment']" in said
        assert not (SHARED_MEMORY / "left-segment").exists()


def run_pytest(directory: Path) -> str:
    """What pytest says of the leaking tests, held to what all tests here are held to."""
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-rA", "--basetemp=tmp")
    argv = [sys.executable, "-m", "pytest", *options, str(write(directory, "test_leaking.py", LEAKING))]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "COLUMNS": "500", "GPURUN_SETTLE_S": "3"}
    return subprocess.run(argv, cwd=directory, env=env, capture_output=True, text=True, check=False).stdout
