"""`pytest --workers N` reports what pytest alone would, and a process that breaks off too."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.command import write
from tests.integration.processes.test_leaks import command_of

ONE = """
    import os

    import pytest


    @pytest.fixture(scope="module")
    def shared():
        yield os.getpid()


    @pytest.mark.parametrize("number", range(3))
    def test_passes(shared, number):
        assert shared == os.getpid()


    def test_fails(shared):
        assert shared == "what it isn't"
"""
OTHER = """
    import os


    def test_breaks_off():
        os._exit(7)
"""


def pytest_in(directory: Path, *options: str) -> tuple[int, str]:
    argv, env = command_of(directory, ONE)
    done = subprocess.run(
        [*argv[:-1], *options, "."], cwd=directory, env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


ALONE = """
    import os
    from pathlib import Path

    import pytest

    HERE = Path(__file__).parent

    @pytest.mark.alone
    @pytest.mark.parametrize("number", range(2))
    def test_has_the_machine_when_all_others_have_ended(number):
        others = [file.read_text() for file in HERE.glob("*.pid")]
        assert len(others) == 3
        assert not [pid for pid in others if pid != str(os.getpid()) and Path("/proc", pid).exists()]

    def test_has_company():
        Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
"""


@pytest.mark.slow
def test_what_is_marked_alone_comes_last(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        write(tmp_path, name, ALONE)
    code, said = pytest_in(tmp_path, "--workers", "3", "--ignore", "test_nested.py")
    assert (code, "9 passed" in said) == (0, True), said


THREADED = """
    import threading

    import pytest

    @pytest.fixture(scope="module")
    def thread():
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def test_leaves_a_thread(thread):
        assert threading.active_count() > 1
"""
SPLITTING = """
    import threading

    def test_has_no_thread():
        assert threading.active_count() == 1
"""


def test_what_splits_its_process_comes_before_all_that_may_leave_a_thread(tmp_path: Path) -> None:
    for letter in "abcdef":  # a process has the next file before it is done with one
        write(tmp_path, f"test_{letter}.py", THREADED)
    (tmp_path / "tests/integration/processes").mkdir(parents=True)
    write(tmp_path, "tests/integration/processes/test_g.py", SPLITTING)
    code, said = pytest_in(tmp_path, "--workers", "2", "--ignore", "test_nested.py")
    assert (code, "7 passed" in said) == (0, True), said


def test_all_is_reported_once_and_a_process_that_breaks_off_fails_its_test(tmp_path: Path) -> None:
    write(tmp_path, "test_other.py", OTHER)
    write(tmp_path, "test_third.py", "def test_is_run():\n    pass\n")
    code, said = pytest_in(tmp_path, "--workers", "2")
    assert code == 1, said
    assert "2 failed, 4 passed" in said
    assert "test_other.py::test_breaks_off" in said
    assert "the process of the test broke off, wait status 1792" in said
    assert "what it isn't" in said

    code, said = pytest_in(tmp_path, "--workers", "2", "--maxfail", "1")
    assert code == 1, said
    assert re.search("stopping after [12] failures", said), said  # both workers may be at a test that fails
