"""What every test is held to: it leaves nothing behind."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from gpurun.launcher.machine.process_tree import become_subreaper, start_ticks
from tests import canonical, forkserver, side_by_side, watcher
from tests.integration.command import Result
from tests.leaks import SETTLE_S, have_own_shared_memory, left_since, look_everywhere, reap
from tests.whole import IS_WHOLE
from tests.wording import Wording, WordingFile

# Hypothesis' own deadline would be a timed assertion.
settings.register_profile("gpurun", deadline=None, max_examples=100 if IS_WHOLE else 25)
settings.load_profile("gpurun")


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):  # nohup and `&` ignore them; what is tested doesn't
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # Orphans of a command that a test has killed come to us, so that a leak can be seen.
    become_subreaper()
    os.environ["GPURUN_SECRET"] = "what the nodes of all tests know"
    have_own_shared_memory()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="gpurun-test-cache-")
    watcher.watch(Path(os.environ["XDG_CACHE_HOME"]))


def pytest_collection_finish() -> None:
    forkserver.collect_seldom()


def pytest_unconfigure() -> None:
    forkserver.close()
    watcher.stop()


SNAPSHOTS = Path(__file__).parent / "snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--devices", help="what `-m gpu` runs on instead of GPUs: cpu:2 is a rehearsal")
    parser.addoption("--workers", type=int, default=1, help="processes that run tests side by side")
    parser.addoption("--update", action="store_true", help="rewrite the snapshots of whole pages")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a whole page with its file in `tests/snapshots`; `pytest --update` writes the file instead."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / name
        if request.config.getoption("--update"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no snapshot {name}: pytest --update writes it"
        assert text == path.read_text(encoding="utf-8"), f"{name}: pytest --update rewrites it"

    return check


@pytest.fixture(scope="module")
def _wording_file(request: pytest.FixtureRequest) -> Iterator[WordingFile]:
    file = WordingFile(request.module, request.config.getoption("--update"))
    yield file
    if file.update:
        file.write()


@pytest.fixture
def wording(request: pytest.FixtureRequest, _wording_file: WordingFile) -> Iterator[Wording]:
    """Compares what messages say with the section of the test in `tests/snapshots/wording`."""
    directory = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    said = Wording(_wording_file, request.node.name, directory)
    failures = request.session.testsfailed
    yield said
    if request.session.testsfailed == failures and not _wording_file.update:
        assert said.is_complete, "fewer texts than in the snapshot; pytest --update rewrites it"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_workers = session.config.getoption("workers")
    if num_workers == 1 or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    side_by_side.run(session, num_workers)
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of which `-m` deselects all tests."""
    chosen = config.option.markexpr
    if not chosen or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.+)$", collection_path.read_text(), re.M)
    excluded = marks and any(f"not {mark}" in chosen for mark in re.findall(r"mark\.(\w+)", marks[1]))
    return excluded or None


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves what `tests.leaks` looks for, temporary files or a changed environment."""
    directory = tmp_path_factory.getbasetemp() / "tmpdir"  # one for all: a numbered one takes a look at all
    directory.mkdir(exist_ok=True)
    old_files = set(directory.iterdir())
    old_directory, tempfile.tempdir = tempfile.tempdir, str(directory)
    old_variable = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(directory)
    reap()
    before = look_everywhere()
    environment = _environment()
    yield
    changed = {key for key, _ in environment.items() ^ _environment().items()}
    tempfile.tempdir = old_directory
    _set_variable("TMPDIR", old_variable)
    leaks = left_since(before)
    leaks += [
        f"temporary file {path.name}" for path in {*directory.iterdir()} - old_files if not _is_torchs(path)
    ]
    leaks += [f"environment variable {key}" for key in sorted(changed)]
    assert not leaks, f"left behind: {', '.join(leaks)}"


def _is_torchs(path: Path) -> bool:
    """A user's directory for compilations, which torch._dynamo makes; or the one that a process of a
    DataLoader leaves now and then, whose thread still sends a batch while the process ends."""
    return path.name.startswith(("torchinductor_", "pymp-"))


def _environment() -> dict[str, str]:
    # The profiler has torch set the second, and the first use of a GPU the third.
    passing = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "CUDA_MODULE_LOADING"}
    return {key: value for key, value in os.environ.items() if key not in passing}


def _set_variable(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


@pytest.fixture(scope="session")
def canonical_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are that all tests share."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if side_by_side.is_worker else base) / "canonical"


@pytest.fixture
def canonical_run(canonical_root: Path) -> Iterator[Callable[[str], Result]]:
    """A run of `tests.canonical` by its name: made once in a session, and not to be changed."""
    with ExitStack() as stack:

        def run(name: str) -> Result:
            result = canonical.made(canonical_root, name)
            stack.enter_context(canonical.unchanged(result.directory / "run"))
            return result

        yield run


@pytest.fixture
def all_gone() -> Callable[[list[int]], list[int]]:
    """Waits until processes have ended; returns those that live longer than the time they are granted."""

    def wait(pids: list[int]) -> list[int]:
        deadline = time.monotonic() + SETTLE_S
        while (left := [pid for pid in pids if start_ticks(pid) is not None]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    return wait
