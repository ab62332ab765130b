"""Run directories in stores: a store that is away, a copy that breaks off, a full disk. Nothing is lost."""

import errno
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fsspec.asyn import get_loop
from fsspec.implementations.memory import MemoryFileSystem

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import Interrupted, MachineError, SpecError
from gpurun.launcher.run.find import find_run, traces_of
from gpurun.launcher.run.job import check_store
from gpurun.launcher.run.open import (
    check_free,
)
from gpurun.launcher.rundir import paths as urls
from gpurun.launcher.rundir import store as stores
from gpurun.launcher.rundir.claim import claimed
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.paths import Url, as_url
from gpurun.launcher.rundir.store import (
    INTERRUPTED_S,
    Copier,
    Store,
    cache_directory,
    copied,
    fetched,
    keep_at,
    kept_at,
    refreshed,
    refuse_taken,
    refuse_unwritable,
    source_of,
    stamps,
)
from gpurun.launcher.tensorboard_plugin.answers.runs import runs_answer
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.trace.analysis import discover
from tests.s3 import S3Server
from tests.wording import Wording

HERE = Url("memory://bucket/run")
pytestmark = pytest.mark.usefixtures("empty")
Files = dict[str, bytes]


@dataclass
class Clock:
    """Simulated seconds."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module", autouse=True)
def s3() -> Iterator[S3Server]:
    """The server. The threads with which s3fs waits for it, one each, stay until Python ends."""
    loop, executor = get_loop(), ThreadPoolExecutor(1)
    executor.submit(int).result()
    loop.call_soon_threadsafe(loop.set_default_executor, executor)
    with S3Server() as server:
        yield server


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Url:
    if request.param != "s3":
        return HERE if request.param == "memory" else Url(f"file://{tmp_path}/there/run")
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    core = import_module("s3fs.core")
    for each in (core.S3FileSystem, core.S3File):
        monkeypatch.setattr(each, "retries", 1)
    for limit in ("connect_timeout", "read_timeout"):  # a busy machine is no outage
        monkeypatch.setattr(core.S3FileSystem, limit, 120)
    store = Store(Url("s3://bucket/run"))
    for name in store.versions():
        store.remove(name)
    return store.url


def contents(directory: Path) -> Files:
    return {name: (directory / name).read_bytes() for name in stamps(directory)}


def in_store(url: Url) -> Files:
    store = Store(url)
    return {name: store.fs.cat_file(f"{store.root}/{name}") for name in store.versions()}


def test_a_run_is_copied_as_it_grows_and_read_back(run: Path, url: Url) -> None:
    said: list[str] = []
    copier = Copier(run, Store(url), said.append)
    assert list(copier.outdated())[-1] == "plan.json"
    assert copier.step()
    assert in_store(url) == contents(run)
    with (run / "variants/ddp-2/rank0.jsonl").open("ab") as file:
        file.write(b"2\n")
    (run / "comparison.json").write_bytes(b"{}")
    assert copier.step()
    assert in_store(url) == contents(run)
    copy = fetched(url)
    assert contents(copy) == contents(run)
    assert kept_at(copy) == url  # whoever continues the copy writes there too
    (run / "comparison.json").unlink()
    assert copier.step()
    assert contents(fetched(url)) == contents(run) == in_store(url)
    assert (fetched(url), said) == (copy, [])


def may_not_look(*_: object, **__: object) -> bool:
    raise PermissionError("403")


def test_no_run_is_kept_inside_of_another(run: Path, url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lists what is there would see the outer one alone."""
    (run / "invocation.json").write_text("{}")
    assert Copier(run, Store(url), lambda text: None).step()
    with pytest.raises(SpecError, match="lies inside of the run"):
        refuse_taken(Url(f"{url}/team/one"))
    refuse_taken(Url(f"{url}-two/team"))
    monkeypatch.setattr(Store(url).fs.__class__, "exists", may_not_look)
    refuse_taken(Url(f"{url}/team/one"))  # credentials for that part of the bucket only
    monkeypatch.undo()
    with pytest.raises(SpecError, match="lies inside of the run"):
        check_free(run / "team/one")
    check_free(run.parent / "another")


def test_only_what_has_changed_is_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier(run, Store(HERE), print)
    copier.step()
    fetched(HERE)
    (run / "plan.json").write_bytes(b"{ }")
    copier.step()
    read = noted(monkeypatch, "get", lambda store, name, target: name)
    fetched(HERE)
    assert read == ["plan.json"]


def noted(monkeypatch: pytest.MonkeyPatch, method: str, what: Callable[..., Any]) -> list[Any]:
    """What each call of a method of `Store` is about, from now on."""
    found: list[Any] = []
    own = getattr(Store, method)

    def noting(*arguments: Any) -> Any:
        found.append(what(*arguments))
        return own(*arguments)

    monkeypatch.setattr(Store, method, noting)
    return found


@pytest.mark.parametrize("where", ["here", "in the copy"])
def test_a_run_that_is_resumed_is_copied_only_as_far_as_it_has_changed(
    run: Path, url: Url, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = noted(monkeypatch, "put", lambda store, source, name: name)
    (run / "old").touch()
    Copier(run, Store(url), print).step(final=True)
    resumed = run if where == "here" else fetched(url)
    copied.clear()
    assert Copier(resumed, Store(url), print).step()
    assert copied == []
    (resumed / "comparison.json").write_bytes(b"{}")
    (resumed / "old").unlink()
    assert Copier(resumed, Store(url), print).step(final=True)
    assert copied == ["comparison.json"]
    Store(url).remove("plan.json")  # by someone else
    with (resumed / "comparison.json").open("ab") as file:
        file.write(b"\n")
    assert Copier(resumed, Store(url), print).step()
    assert copied == ["comparison.json"] * 2 + ["plan.json"]
    assert in_store(url) == contents(resumed)


def test_a_copy_in_which_a_run_goes_on_is_left_alone(run: Path) -> None:
    Copier(run, Store(HERE), print).step()
    copy = fetched(HERE)
    (run / "log").write_bytes(b"old")
    Copier(run, Store(HERE), print).step()
    with claimed(RunDir(copy)):
        (copy / "log").write_bytes(b"newer")
        assert (fetched(HERE) / "log").read_bytes() == b"newer"
    assert (fetched(HERE) / "log").read_bytes() == b"old"


def test_what_is_shown_of_a_url_is_kept_up_to_date(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "EVERY_S", 0.01)
    copier, said = Copier(run, Store(HERE), print), queue.SimpleQueue[str]()
    copier.step()
    copy = fetched(HERE)
    with refreshed(copy, said.put):
        MemoryFileSystem.store.clear()  # away
        assert said.get(timeout=60).startswith("there is nothing at memory://bucket/run")
        Copier(run, Store(HERE), print).step()
        assert said.get(timeout=60) == "memory://bucket/run can be read again"
        (run / "comparison.json").write_bytes(b"{}")
        copier.step()
        while not (copy / "comparison.json").exists():
            assert said.empty()
    with refreshed(run, said.put):  # which is no copy
        assert said.empty()


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_a_store_that_is_away_for_60_s_loses_nothing(
    run: Path, url: Url, s3: S3Server, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    clock, said = Clock(), list[str]()
    tries = noted(monkeypatch, "put", lambda *_: clock.now_s)
    copier = Copier(run, Store(url), said.append, clock)
    (run / "plan.json").write_bytes(b"old")
    assert copier.step()
    before = in_store(url)
    tries.clear()
    with s3.away():
        while clock.now_s < 60:
            (run / "plan.json").write_text(str(clock.now_s))  # the run goes on
            assert not copier.step()
            clock.now_s += 1
    assert tries == [0, 1, 3, 7, 15, 31]
    assert in_store(url) == before
    while not copier.step():
        clock.now_s += 1
        assert clock.now_s < 100
    assert in_store(url) == contents(run)
    begun_s = clock.now_s
    tries.clear()
    with s3.away():  # once more: the pauses are short again
        (run / "plan.json").write_bytes(b"newest")
        for _ in range(4):
            assert not copier.step()
            clock.now_s += 1
    assert tries == [begun_s, begun_s + 1, begun_s + 3]
    wording([line.partition("\n")[0] for line in said[:2]], hide=r"(?<=to )s3://[^:]*|(?<=URL: ).*|^s3:\S+")


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_copy_that_breaks_off_leaves_the_old_content(
    run: Path, url: Url, cause: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run / "log"
    log.write_bytes(b"old")
    copier = Copier(run, Store(url), print)
    copier.step()
    before = in_store(url)
    log.write_bytes(b"new" * 1000)
    monkeypatch.setattr(stores, "BLOCK_BYTES", 100)
    break_off = breaking(cause, monkeypatch)
    if isinstance(cause, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            copier.step()
    else:
        assert not copier.step()
    assert in_store(url) == before
    break_off()
    copier = Copier(run, Store(url), print)
    assert copier.step()
    assert in_store(url) == contents(run)


KILLED = """
import os, sys
from pathlib import Path
from s3fs.core import S3File
from gpurun.launcher.run.open import check_free
from gpurun.launcher.rundir.store import Copier, copied
from gpurun.launcher.rundir.store import Store
from gpurun.launcher.rundir.paths import Url
S3File.commit = lambda file: os.kill(os.getpid(), 9)
Copier(Path(sys.argv[1]), Store(Url(sys.argv[2])), print).step()
"""
"""All of a file is on the server, which doesn't know yet that this is all."""


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_a_killed_upload_leaves_the_old_content(run: Path, url: Url) -> None:
    assert Copier(run, Store(url), print).step()
    before = in_store(url)
    (run / "plan.json").write_bytes(b"new")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(run), url])
    assert killed.returncode == -signal.SIGKILL
    assert in_store(url) == contents(fetched(url)) == before
    assert Copier(run, Store(url), print).step()
    assert in_store(url) == contents(fetched(url)) == contents(run)


def breaking(cause: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the third block of every file that is written to a store fail; returns what ends that."""
    whole = Store._whole

    @contextmanager
    def whole_breaking(self: Store, path: str) -> Iterator[Any]:
        with whole(self, path) as file:
            yield Breaking(file, cause)

    monkeypatch.setattr(Store, "_whole", whole_breaking)
    return lambda: monkeypatch.setattr(Store, "_whole", whole)


class Breaking:
    """A file that takes two blocks."""

    def __init__(self, file: Any, cause: BaseException) -> None:
        self.file, self.cause, self.left = file, cause, 2

    def write(self, block: bytes) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.cause
        return int(self.file.write(block))


def test_a_read_that_breaks_off_leaves_the_old_copy(
    run: Path, url: Url, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    copier = Copier(run, Store(url), print)
    copier.step()
    before = contents(fetched(url))
    (run / "plan.json").write_bytes(b"{ }")
    copier.step()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with wording.raises(MachineError, hide=r"(?<=stores/)\w+"):
            fetched(url)
    (cached,) = (cache_directory() / "stores").glob("*/run")
    assert contents(cached) == before
    assert contents(fetched(url)) == contents(run)


def test_large_files_are_copied_again_when_they_have_grown_by_a_quarter(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurun.launcher.rundir.store.SMALL_BYTES", 100)
    log = run / "log"
    log.write_bytes(b"x" * 1000)
    copier = Copier(run, Store(HERE), print)
    copier.step()
    for size, size_there in ((1200, 1000), (1250, 1250), (1300, 1250), (900, 900)):
        log.write_bytes(b"x" * size)
        assert copier.step()
        assert len(in_store(HERE)["log"]) == size_there
    log.write_bytes(b"x" * 910)
    assert copier.step(final=True)
    assert in_store(HERE) == contents(run)


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_a_bucket_that_is_not_there_is_refused_and_of_an_outage_only_a_new_run(
    url: Url, s3: S3Server, wording: Wording
) -> None:
    with wording.raises(MachineError):
        refuse_unwritable(Url("s3://nobucket/run"))
    refuse_unwritable(url)
    assert not Store(url).fs.exists("bucket/run/.probe")
    with s3.away():
        refuse_unwritable(url)  # a run that goes on
        with wording.raises(MachineError, hide=r"(?<=URL: )\S+"):
            refuse_taken(url)  # a new one


# Mistakes about URLs, and messages about runs that are kept at one


def test_messages_name_the_url_of_a_copy_and_not_the_cache(run: Path, wording: Wording) -> None:
    for variant in ("ddp-1", "ddp-2"):
        trace = run / "variants" / variant / "rank0.pt.trace.json.gz"
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_bytes(b"")
    Copier(run, Store(HERE), print).step()
    copy = fetched(HERE)
    assert source_of(copy) == HERE
    assert source_of(copy / "variants/ddp-2") == f"{HERE}/variants/ddp-2"
    assert source_of(run) == run
    assert runs_answer(Listing(str(copy)))["logdir"] == HERE
    with wording.raises(SpecError):
        traces_of(copy)
    with wording.raises(SpecError):
        find_run(copy / "variants")
    for name in ("stacks", "capture"):
        refused = CliRunner().invoke(cli, [name, HERE])
        assert str(refused.exception).startswith(f"{HERE} is a copy; name the run directory")
    assert discover._commands([copy / "variants/ddp-2"]) == f"\n    gpurun trace {HERE}/variants/ddp-2"


def test_a_url_above_runs_names_those_below_it(run: Path, tmp_path: Path, wording: Wording) -> None:
    """And none of this machine, which are others."""
    (tmp_path / "team" / "a").mkdir(parents=True)
    run.rename(tmp_path / "team" / "a" / "slurm-42")
    Copier(tmp_path / "team", Store(HERE), print).step()
    with wording.raises(SpecError):
        find_run(fetched(HERE))


@pytest.mark.parametrize("fails", ["put", "versions", None])
def test_results_that_never_reached_the_store_are_an_error(
    run: Path, fails: str | None, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """What a store has is not known while it cannot be asked."""

    def away(*_: object) -> None:
        raise OSError("connection refused")

    said: list[str] = []
    if fails == "versions":
        Copier(run, Store(HERE), print).step(final=True)
    with monkeypatch.context() as patch:
        if fails is not None:
            patch.setattr(Store, fails, away)
        with copied(run, HERE, said.append) as copy:
            copy.limit_s = 60.0 if fails is None else 0.5  # too short for another try
    assert (copy.error is not None) == (fails is not None)
    wording([*said, str(copy.error)])


def test_a_search_is_copied_later_by_the_command_that_continues_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "put", lambda *_: 1 / 0)
    (run / "search.json").write_bytes(b"{}")
    with copied(run, HERE, print) as copy:
        copy.limit_s = 0.5
    assert f"to copy them later: gpurun tune --resume {run}\n" in str(copy.error)


def test_an_interrupted_command_waits_for_the_store_no_longer_than_a_signal_allows(run: Path) -> None:
    with pytest.raises(Interrupted), copied(run, HERE, print) as copy:
        raise Interrupted("SIGTERM")
    assert (copy.limit_s, copy.error) == (INTERRUPTED_S, None)


def test_mistakes_are_named(run: Path, wording: Wording) -> None:
    with wording.raises(SpecError):
        fetched(Url("memory://bucket/none"))
    with wording.raises(SpecError):
        as_url("simplecache::s3://bucket/run")
    for text in ("s3://", "s3:///run", "s3:/bucket/run", "file://run", "memory://", "HDFS:/run"):
        with wording.raises(SpecError):
            as_url(text)
    refuse_taken(HERE)
    Copier(run, Store(HERE), print).step()
    with wording.raises(SpecError):
        refuse_taken(HERE)
    assert kept_at(run) is None
    keep_at(run, HERE)
    assert kept_at(run) == HERE
    (run / ".store").write_text("elsewhere")
    assert kept_at(run) is None


def test_a_path_and_a_url_are_distinguished() -> None:
    for path in (
        "runs/gpt/latest",
        "C:/runs",
        "C://runs",
        "s3:",
        "a:b",
        "night:/run",
        "./s3://run",
        "a/b://c",
    ):
        assert as_url(path) is None, path
    assert as_url("S3://Bucket/run/") == "s3://Bucket/run"
    assert as_url("file:///data/run") == "file:///data/run"
    assert Store(Url("file:///data/run")).root == "/data/run"


def test_a_package_that_is_missing_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(urls, "find_spec", lambda name: None)
    with wording.raises(MachineError):
        as_url("gs://bucket/run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with wording.raises(MachineError):
        fetched(Url("hdfs:///data/run"))


def test_what_is_at_a_url_may_be_anyones(run: Path, wording: Wording) -> None:
    MemoryFileSystem().pipe("/bucket/run/../../evil", b"")
    with wording.raises(SpecError):
        fetched(Url("memory://bucket"))


def test_a_strangers_run_does_not_choose_where_files_are_written(run: Path) -> None:
    keep_at(run, HERE)
    run.chmod(0o777)
    with pytest.raises(SpecError, match="may write to"):
        check_store(None, run)
    assert not MemoryFileSystem().exists(HERE)
    run.chmod(0o755)
    check_store(None, run)
