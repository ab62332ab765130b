"""Mistakes about URLs, and messages about runs that are kept at one."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

from gpurun.launcher.cli.main import cli
from gpurun.launcher.errors import Interrupted, MachineError, SpecError
from gpurun.launcher.run.find import find_run, traces_of
from gpurun.launcher.run.job import check_store
from gpurun.launcher.rundir import paths as urls
from gpurun.launcher.rundir.paths import Url, as_url
from gpurun.launcher.rundir.store import (
    INTERRUPTED_S,
    Copier,
    Store,
    copied,
    fetched,
    keep_at,
    kept_at,
    refuse_taken,
    source_of,
)
from gpurun.launcher.tensorboard_plugin.answers.runs import runs_answer
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.trace.analysis import discover
from tests.wording import Wording

HERE = Url("memory://bucket/run")
pytestmark = pytest.mark.usefixtures("empty")


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


@pytest.mark.parametrize("is_away", [True, False])
def test_results_that_never_reached_the_store_are_an_error(
    run: Path, is_away: bool, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def away(*_: object) -> None:
        raise OSError("connection refused")

    said: list[str] = []
    with monkeypatch.context() as patch:
        if is_away:
            patch.setattr(Store, "put", away)
        with copied(run, HERE, said.append) as copy:
            copy.limit_s = 0.5 if is_away else 60.0  # too short for another try
    assert (copy.error is not None) == is_away
    wording([*said, str(copy.error)])


def test_what_a_store_has_is_not_known_while_it_cannot_be_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def away(*_: object) -> None:
        raise OSError("connection refused")

    Copier(run, Store(HERE), print).step(final=True)
    said: list[str] = []
    monkeypatch.setattr(Store, "versions", away)
    with copied(run, HERE, said.append) as copy:
        copy.limit_s = 0.5  # too short for another try
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
