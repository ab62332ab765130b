"""What every test is held to: it leaves nothing behind."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launcher.run.proctree import become_subreaper, descendants, is_alive

# Hypothesis' own deadline would be a timed assertion.
settings.register_profile("gpurun", deadline=None)
settings.load_profile("gpurun")

_SETTLE_S = 3.0
"""How long a process that was told to end may take."""
_SHARED_MEMORY = Path("/dev/shm")


def pytest_configure() -> None:
    # Orphans of a command that a test has killed come to us, so that a leak can be seen.
    become_subreaper()


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves a process, thread, shared memory, temporary file or changed environment."""
    folder = tmp_path_factory.mktemp("tmpdir")
    old_folder, tempfile.tempdir = tempfile.tempdir, str(folder)
    old_variable = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    before = {"process": _processes(), "thread": _threads(), "shared memory": _segments()}
    environment = _environment()
    yield
    changed = {key for key, _ in environment.items() ^ _environment().items()}
    tempfile.tempdir = old_folder
    _set_variable("TMPDIR", old_variable)
    looks: dict[str, Callable[[], set[str]]] = {
        "process": _processes,
        "thread": _threads,
        "shared memory": _unmapped_segments,
    }
    leaks = [f"{what} {name}" for what, look in looks.items() for name in _settled(look, before[what])]
    leaks += [f"temporary file {path.name}" for path in folder.iterdir() if not _is_torchs_cache(path)]
    leaks += [f"environment variable {key}" for key in sorted(changed)]
    assert not leaks, f"left behind: {', '.join(leaks)}"


def _is_torchs_cache(path: Path) -> bool:
    """torch._dynamo, which every optimizer imports, makes a folder for all compilations of a user."""
    return path.name.startswith("torchinductor_")


def _settled(look: Callable[[], set[str]], before: set[str]) -> set[str]:
    """What is still there when everything that is about to end has ended."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := look() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _processes() -> set[str]:
    found = set()
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace(chr(0), " ").strip()
        except OSError:
            continue
        # A browser starts and ends helpers as it likes; they end with it, and it is looked for.
        if "chromium --type=" not in command:
            found.add(f"{pid} ({command})")
    return found


def _threads() -> set[str]:
    return {f"{thread.ident} ({thread.name})" for thread in threading.enumerate()}


def _segments() -> set[str]:
    return {entry.name for entry in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def _unmapped_segments() -> set[str]:
    return {name for name in _segments() if _unmapped(name)}


def _unmapped(name: str) -> bool:
    """Whether nobody uses a segment: one that is in use belongs to a program that runs beside the tests."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return False
        except OSError:
            continue
    return (_SHARED_MEMORY / name).exists()


def _environment() -> dict[str, str]:
    passing = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # the profiler has torch set the second
    return {key: value for key, value in os.environ.items() if key not in passing}


def _set_variable(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


@pytest.fixture
def all_gone() -> Callable[[list[int]], list[int]]:
    """Waits until processes have ended; returns those that live longer than the 3 s they are granted."""

    def wait(pids: list[int]) -> list[int]:
        deadline = time.monotonic() + _SETTLE_S
        while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    return wait
