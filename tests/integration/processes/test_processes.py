"""Starting, describing and blaming real processes."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from gpurun.launcher.errors import MachineError
from gpurun.launcher.failures.root_cause import Failure, explain, root_cause
from gpurun.launcher.inspect.snapshot import observe
from gpurun.launcher.machine.process_tree import kill_descendants, start_ticks
from gpurun.launcher.processes.guard import Guard, split_process
from gpurun.launcher.processes.pool import TORCH, WorkerPool
from gpurun.launcher.processes.protocol import SERVICE_RANK, Exit, StartRequest
from gpurun.launcher.rundir.files import RunDir, write_json
from tests.known import known
from tests.launches import launch_config
from tests.whole import first

ROOT = Path(__file__).resolve().parents[3]
BODIES = {"PYTHONPATH": f"{Path(__file__).parent}:{ROOT}:{ROOT / 'src'}"}
SLOW_IMPORT = """
import os, time
from pathlib import Path
here = Path(os.environ["DIRECTORY"])
(here / "begun").touch()
while not (here / "go").exists():
    time.sleep(0.001)
(here / "imported").write_text(str(time.time_ns()))
"""
TIMES = 5
WORLD = 3


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    with split_process() as guard:
        yield guard


@pytest.fixture(scope="module")
def torch_pool(guard: Guard) -> Iterator[WorkerPool]:
    """A server with torch; many launches share it, as in a run."""
    with WorkerPool(guard, TORCH, BODIES) as pool:
        yield pool


@pytest.fixture
def pool(guard: Guard) -> Iterator[WorkerPool]:
    """A server without torch: there in 0.1 s."""
    with WorkerPool(guard, (), BODIES) as pool:
        yield pool


def request(
    directory: Path, rank: int, body: str, *args: str, env: dict[str, str] | None = None
) -> StartRequest:
    log = str(directory / "log" / f"rank{rank}.log")
    return StartRequest(
        rank, (str(directory), str(rank), *args), env or {}, log, str(directory), f"process_bodies:{body}"
    )


def until_all_ended(pool: WorkerPool, count: int) -> list[Exit]:
    exits: list[Exit] = []
    deadline = time.monotonic() + 30
    while len(exits) < count and time.monotonic() < deadline:
        exits += pool.poll(1.0)
    assert len(exits) == count
    return exits


def wait_for(pool: WorkerPool, *files: Path) -> None:
    """Waits for files, and for the pool to know of the ranks that wrote `readyN`: its word may come later."""
    deadline = time.monotonic() + 120
    ranks = {int(file.name.removeprefix("ready")) for file in files if file.name.startswith("ready")}
    while not (all(file.exists() for file in files) and ranks <= pool.pids().keys()):
        assert time.monotonic() < deadline
        pool.poll(0.01)


def config_in(directory: Path, launch: str) -> Path:
    config = launch_config(
        launch=launch,
        run_dir=str(directory),
        job_dir=str(directory),
        strategy="ddp",
        devices=("cpu",) * WORLD,
        backend="gloo",
        warmup=0,
    )
    path = RunDir(directory).launch_config(launch)
    write_json(path, config)
    return path


def launch(directory: Path, name: str, body: str, *args: str) -> list[StartRequest]:
    """All ranks of a launch with a run directory."""
    config = str(config_in(directory, name))
    run = RunDir(directory)
    return [
        StartRequest(
            rank,
            (config, str(rank), *args),
            {},
            str(run.log(name, rank)),
            str(directory),
            f"process_bodies:{body}",
        )
        for rank in range(WORLD)
    ]


def test_a_rank_inherits_nothing_it_should_not(pool: WorkerPool, tmp_path: Path) -> None:
    env = {"GPURUN_TEST": "yes"}
    pool.start([request(tmp_path, rank, "describe_self", env=env) for rank in range(2)])
    exits = until_all_ended(pool, 2)
    facts = [json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(2)]
    assert [exit_.returncode for exit_ in exits] == [0, 0]
    assert facts[0]["random"] != facts[1]["random"]
    for rank, fact in enumerate(facts):
        assert fact["stdin"] == ""
        assert fact["sid"]
        assert fact["sigterm"]
        assert fact["variable"] == "yes"
        assert fact["cwd"] == str(tmp_path)
        log = str(tmp_path / "log" / f"rank{rank}.log")
        assert set(fact["fds"]) <= {"/dev/null", log}
        assert Path(log).read_text() == "to stdout\nto stderr\n"
    assert "GPURUN_TEST" not in os.environ


def test_forks_of_torch_differ_and_can_compute(torch_pool: WorkerPool, tmp_path: Path) -> None:
    torch_pool.start([request(tmp_path, rank, "describe_torch") for rank in range(2)])
    assert [exit_.returncode for exit_ in until_all_ended(torch_pool, 2)] == [0, 0]
    first, second = (json.loads((tmp_path / f"facts{rank}").read_text()) for rank in range(2))
    assert first["torch"] != second["torch"]
    assert first["numpy"] != second["numpy"]
    assert first["tasks"] == 1  # A server with threads must not fork.
    assert first["sum"] == 1e6


@pytest.mark.parametrize(
    ("fault", "returncode"),
    first(
        4,
        [
            ("none", 0),
            ("raise", 1),
            ("hard exit", 3),
            ("segfault", -11),
            ("exit", 3),
            ("kill", -9),
            ("abort", -6),
        ],
    ),
)
def test_every_end_is_reported_and_the_log_is_complete(
    pool: WorkerPool, tmp_path: Path, fault: str, returncode: int
) -> None:
    pool.start([request(tmp_path, 0, "end_with", fault)])
    (exit_,) = until_all_ended(pool, 1)
    assert exit_.returncode == returncode
    log = (tmp_path / "log" / "rank0.log").read_text()
    assert log.startswith("last words\n")
    assert ("a loss of 7" in log) == (fault == "raise")
    assert ("Segmentation fault" in log) == (fault == "segfault")


EXPECTED = {
    "raise": ("exception", "raised ValueError: a loss of 7 is too much"),
    "hard exit": ("exit", "exit code 3"),
    "early exit": ("early_exit", "exit code 0"),
    "kill": ("signal", "killed by SIGKILL"),
    "exit": ("exit", "exit code 3"),
    "segfault": ("signal", "killed by SIGSEGV"),
    "abort": ("signal", "killed by SIGABRT"),
    "import": ("exception", "raised ModuleNotFoundError"),
    "loader-raise": ("exception", "raised ValueError: Caught ValueError in DataLoader worker"),
    "loader-kill": ("exception", "DataLoader worker"),
    "startup segfault": ("signal", "killed by SIGSEGV"),
    "end exit": ("exit", "exit code 3"),
}


@pytest.mark.parametrize("fault", first(2, EXPECTED))
def test_the_rank_that_began_is_blamed(torch_pool: WorkerPool, tmp_path: Path, fault: str) -> None:
    kind, words = EXPECTED[fault]
    for attempt in range(TIMES):
        faulty = attempt % WORLD
        failure, log = failure_of(torch_pool, tmp_path, str(attempt), faulty, fault)
        assert (failure.rank, failure.kind) == (faulty, kind), failure
        assert words in failure.headline
        assert not failure.secondary
        assert faulty not in failure.victims
        text = explain(failure, log.read_text(), str(log))
        assert words in text
        assert str(log) in text


def failure_of(pool: WorkerPool, directory: Path, name: str, faulty: int, fault: str) -> tuple[Failure, Path]:
    pool.start(launch(directory, name, "all_reduce_until_fault", str(faulty), fault))
    exits = pool.poll(30.0)
    deadline = time.monotonic() + 0.5
    while len(exits) < WORLD and time.monotonic() < deadline:
        exits += pool.poll(0.1)
    stopped_ns = time.time_ns()
    pool.stop(0.2)
    exits += pool.poll(0)
    assert sorted(exit_.rank for exit_ in exits) == list(range(WORLD))
    run = RunDir(directory)
    failure = root_cause(exits, run.read_failures(name), stopped_ns)
    return failure, run.log(name, failure.rank)


def test_the_group_listens_on_loopback_only(torch_pool: WorkerPool, tmp_path: Path) -> None:
    torch_pool.start(launch(tmp_path, "l", "describe_listeners"))
    assert [exit_.returncode for exit_ in until_all_ended(torch_pool, WORLD)] == [0] * WORLD
    for rank in range(WORLD):
        addresses = json.loads((tmp_path / f"listeners{rank}").read_text())
        assert addresses
        assert set(addresses) == {"0100007F"}


def test_stop_ends_what_ignores_it_and_what_ran_away(
    pool: WorkerPool, tmp_path: Path, all_gone: Callable[[list[int]], list[int]]
) -> None:
    bodies = ["hold_the_gil", "leave_grandchild", "ignore_sigterm", "sleep_for_ever"]
    pool.start([request(tmp_path, rank, body) for rank, body in enumerate(bodies)])
    wait_for(pool, *(tmp_path / f"ready{rank}" for rank in range(4)))
    grandchild = int((tmp_path / "grandchild1").read_text())
    pids = [*pool.pids().values(), grandchild]
    pool.stop(0.2)
    assert all_gone(pids) == []
    exits = {exit_.rank: exit_ for exit_ in pool.poll(0)}
    assert exits[2].returncode == -9
    assert exits[3].returncode == -15
    assert all(exit_.stopped for exit_ in exits.values())
    pool.start([request(tmp_path, 0, "end_with", "none")])  # It still serves.
    assert until_all_ended(pool, 1)[0].returncode == 0


def test_a_rank_that_has_just_begun_gets_its_grace_too(pool: WorkerPool, tmp_path: Path) -> None:
    """The command has not read yet that it has begun."""
    pool.start([request(tmp_path, 0, "sleep_for_ever")])
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pool.stop(30.0)
    assert [exit_.returncode for exit_ in pool.poll(0)] == [-15]


def test_the_store_of_ranks_outlives_their_grace(pool: WorkerPool, tmp_path: Path) -> None:
    """Those that save may make a group, for which they meet there."""
    store = request(tmp_path, SERVICE_RANK, "end_and_say_so")
    pool.start([store, request(tmp_path, 0, "sleep_for_ever")])
    wait_for(pool, tmp_path / "ready0")
    while not (tmp_path / f"ready{SERVICE_RANK}").exists():
        pool.poll(0.01)
    pool.stop(30.0)
    assert [exit_.returncode for exit_ in pool.poll(0)] == [-15]
    assert not (tmp_path / "asked to end").exists()
    assert pool._running == {}


def test_a_process_that_begins_while_the_others_are_listed_is_found(
    monkeypatch: pytest.MonkeyPatch, all_gone: Callable[[list[int]], list[int]]
) -> None:
    """One pass misses it if its parent, such as that of a daemon, has ended before it is looked at."""
    listings: list[list[str]] = []

    def listed(path: str) -> list[str]:
        names = [entry.name for entry in os.scandir(path)]
        listings.append([name for name in names if len(listings) > 1 or name != begins])
        return listings[-1]

    argv = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        begins = parent.stdout.readline().strip()
        monkeypatch.setattr(os, "listdir", listed)
        assert kill_descendants(parent.pid) == []
        assert all_gone([int(begins)]) == []


def test_stacks_are_no_preemption_to_a_program(pool: WorkerPool, tmp_path: Path) -> None:
    start = request(tmp_path, 0, "save_at_sigusr2")
    pool.start([msgspec.structs.replace(start, control=str(tmp_path / "control"))])
    wait_for(pool, tmp_path / "ready0")
    (sight,) = observe(tmp_path / "control")
    assert sight.threads[0].frames[0].function == "sleep_for_ever"
    assert not (tmp_path / "saved").exists()


def test_a_rank_shows_its_stacks_while_c_code_holds_the_gil(pool: WorkerPool, tmp_path: Path) -> None:
    start = request(tmp_path, 0, "hold_the_gil")
    pool.start([msgspec.structs.replace(start, control=str(tmp_path / "control"))])
    wait_for(pool, tmp_path / "ready0")
    (sight,) = observe(tmp_path / "control")
    (main,) = sight.threads
    assert (sight.rank, sight.pid) == (0, pool.pids()[0])
    assert main.frames[0].function == "hold_the_gil"
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_fifo_is_read_to_its_end(pool: WorkerPool, tmp_path: Path, has_ended: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader), (tmp_path / "fifo").open("w") as writer:
        writer.write("given")
        writer.flush()
        if has_ended:
            writer.close()
        start = request(tmp_path, 0, "describe_self")
        pool.start([msgspec.structs.replace(start, stdin=f"/proc/{os.getpid()}/fd/{reader}")])
        while not has_ended and not pool.pids():
            pool.poll(0.01)
        writer.close()
        until_all_ended(pool, 1)
    assert json.loads((tmp_path / "facts0").read_text())["stdin"] == "given"


def test_a_log_takes_what_no_reader_of_a_fifo_does(pool: WorkerPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    start = request(tmp_path, 0, "describe_self")
    pool.start([msgspec.structs.replace(start, stdout=str(tmp_path / "fifo"))])
    assert until_all_ended(pool, 1)[0].returncode == 0
    assert Path(start.log).read_text() == "to stdout\nto stderr\n"


def test_the_command_itself_needs_no_thread_of_numpys(tmp_path: Path) -> None:
    """Where no more processes are allowed, BLAS sends an interrupt to whoever imports it."""
    code = (
        "import os; from gpurun.launcher.processes.guard import split_process\n"
        "with split_process(): import numpy; print(len(os.listdir('/proc/self/task')))"
    )
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("what", ["the supervising process", "the server that starts the ranks", "rank 1"])
def test_a_stopped_process_is_named_and_ends_with_the_run(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Neither says anything itself; a stopped server reports no end of a rank either."""
    monkeypatch.setattr("gpurun.launcher.processes.pool._LOOK_EVERY_S", 0.0)
    said: list[str] = []
    with WorkerPool(guard, (), BODIES, say=said.append) as pool:
        pool.start([request(tmp_path, rank, "sleep_for_ever") for rank in range(2)])
        wait_for(pool, *(tmp_path / f"ready{rank}" for rank in range(2)))
        while not (found := [pid for pid, name in pool._processes().items() if name == what]):
            pool.poll(0.05)  # a rank may be ready before the server has said that it started
        (pid,) = found
        os.kill(pid, signal.SIGSTOP)
        for _ in range(100):
            pool.poll(0.0 if said else 0.05)
        assert [text.partition(" was stopped")[0] for text in said] == [f"{what} (process {pid})"]
        assert said[0].endswith(f"to continue it: kill -CONT {pid}")
        pool.stop(grace_s=30.0)
        assert {exit_.returncode for exit_ in pool.poll(0.0)} == {-signal.SIGTERM}


def test_a_missing_module_is_named(guard: Guard) -> None:
    with (
        WorkerPool(guard, ("no_such_torch",)) as pool,
        pytest.raises(MachineError, match="no_such_torch can't be imp"),
    ):
        pool.poll(30.0)


@pytest.mark.parametrize(("length", "error"), [(100_000, None), (200_000, "longer than Linux allows")])
def test_an_environment_may_be_as_large_as_the_kernel_allows(
    guard: Guard, length: int, error: str | None
) -> None:
    with socket.socket() as stream, expected(error):
        guard.spawn(["/bin/true"], dict.fromkeys("ABCD", length * "x"), stream, stream.fileno())


def expected(error: str | None) -> AbstractContextManager[object]:
    return pytest.raises(MachineError, match=error) if error else nullcontext()


def test_why_the_server_has_ended_is_read_before_it_is_asked_for_more(guard: Guard) -> None:
    with WorkerPool(guard, ("no_such_torch",)) as pool:
        server = os.pidfd_open(known(pool._server).pid)
        select.select([server], [], [])  # it has ended
        os.close(server)
        with pytest.raises(MachineError, match="no_such_torch can't be imp"):
            pool.preload(("torch",))


def test_an_exception_of_the_server_is_shown_whole(guard: Guard, tmp_path: Path) -> None:
    with WorkerPool(guard, (), BODIES) as pool:
        pool.start([request(tmp_path, 0, "sleep_for_ever")])
        wait_for(pool, tmp_path / "ready0")
        pool.forward(9999)  # no signal has this number
        with pytest.raises(MachineError) as raised:
            until_all_ended(pool, 1)
    first, *trace = str(raised.value).splitlines()
    assert first == "the server that starts the ranks failed, and the ranks with it:"
    assert trace[0] == "    Traceback (most recent call last):"
    assert trace[-1] == "    OSError: [Errno 22] Invalid argument"


def test_a_rank_that_can_not_begin_says_why_in_its_log(pool: WorkerPool, tmp_path: Path) -> None:
    asked = structs.replace(request(tmp_path, 0, "end_with", "none"), cwd=str(tmp_path / "gone"))
    pool.start([asked])
    assert until_all_ended(pool, 1)[0].returncode == 1
    assert "No such file or directory" in Path(asked.log).read_text()


def test_stop_does_not_wait_for_an_import(guard: Guard, tmp_path: Path) -> None:
    """Ranks that were asked for while the server still imports never come; they get no signals either."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")
    with WorkerPool(guard, ("slow_module",), {"PYTHONPATH": str(tmp_path)}) as pool:
        pool.start([request(tmp_path, 0, "end_with", "none")])
        pool.stop(5.0)
        pool.forward(signal.SIGUSR1)
        assert pool.poll(0) == []


def test_an_end_during_an_import_of_the_server_is_not_noted_later(guard: Guard, tmp_path: Path) -> None:
    """Else a rank that was killed would seem to have failed after those that it made fail."""
    (tmp_path / "slow_module.py").write_text(SLOW_IMPORT)
    paths = f"{tmp_path}:{BODIES['PYTHONPATH']}"
    with WorkerPool(guard, (), {"PYTHONPATH": paths, "DIRECTORY": str(tmp_path)}) as pool:
        pool.start([request(tmp_path, 0, "sleep_for_ever")])
        wait_for(pool, tmp_path / "ready0")
        pool.preload(("slow_module",))
        wait_for(pool, tmp_path / "begun")
        os.kill(pool.pids()[0], signal.SIGKILL)
        while start_ticks(pool.pids()[0]) is not None:
            time.sleep(0.001)
        (tmp_path / "go").touch()
        (ended,) = until_all_ended(pool, 1)
    assert ended.time_ns < int((tmp_path / "imported").read_text())


def test_a_full_log_disk_does_not_stop_a_rank(pool: WorkerPool, tmp_path: Path) -> None:
    start = request(tmp_path, 0, "end_with", "none")
    full = StartRequest(0, start.args, {}, "/dev/full", start.cwd, start.entry)
    pool.start([full])
    assert until_all_ended(pool, 1)[0].returncode in (0, 1)
