"""Another user's traces are opened: no code of theirs runs, and nothing outside is read or replaced."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpurun.launcher.cli.main import cli
from gpurun.launcher.tensorboard_plugin.answers.requested import merges
from gpurun.launcher.tensorboard_plugin.logdir import Listing
from gpurun.launcher.tensorboard_plugin.timeline.format import Index
from gpurun.launcher.tensorboard_plugin.timeline.index_store import Traces, find
from gpurun.launcher.tensorboard_plugin.timeline.indexing import Indexes
from gpurun.launcher.tensorboard_plugin.view import open_view
from tests.integration.tensorboard.test_tab import get, of, trace
from tests.known import known
from tests.whole import first

STANDARD_MODULES = ("ctypes", "gzip", "json", "pickle", "signal", "tempfile")
OWN_INDEX = ".gpurun-timeline"
MERGED = "merged.pt.trace.json.gz"


def plant(directory: Path) -> Path:
    """Files named like modules that our processes import; returns what exists once one of them has run."""
    mark = directory / "code-ran"
    for name in STANDARD_MODULES:
        (directory / f"{name}.py").write_text(
            f"open({str(mark)!r}, 'w').close()\nraise SystemExit(f'ran {name}')"
        )
    return mark


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: traces of two ranks."""
    directory = tmp_path / "downloaded"
    directory.mkdir()
    for rank in (0, 1):
        trace(directory, rank, 30 * (rank == 0))
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("python_path", first(1, [":/nowhere", "", ".:"]))
def test_no_code_of_the_current_directory_runs(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch, python_path: str
) -> None:
    mark = plant(downloaded)
    monkeypatch.setenv("PYTHONPATH", python_path)
    with open_view(Path(".")) as server:
        assert get(server.url, "timeline/meta", **of("traces", "."))["state"] == "ready"
        assert get(server.url, "trace/merged", **of("traces", "."), prepare=1)["state"] == "ready"
    assert not mark.exists()


@pytest.mark.slow
def test_traces_read_by_several_processes_run_no_code_of_the_current_directory(downloaded: Path) -> None:
    mark = plant(downloaded)
    body = """\
import sys
from pathlib import Path
from gpurun.launcher.trace import parallel
parallel.PARALLEL_FROM_BYTES = 0
print(len(parallel.read_all([Path(each) for each in sys.argv[1:]], None)))
"""
    files = sorted(map(str, downloaded.glob("*.gz")))
    done = subprocess.run(
        [sys.executable, "-P", "-c", body, *files], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
    assert not mark.exists()


def traces_of(directory: Path) -> Traces:
    (listed,) = Listing(str(directory)).all().values()
    return known(listed.indexed("traces"))


def index_of(directory: Path) -> Index:
    """The index as a server makes it."""
    indexes, traces = Indexes(), traces_of(directory)
    indexes.get(traces)
    indexes.wait()
    state = indexes.get(traces)
    assert isinstance(state, Index), state
    return state


@pytest.mark.parametrize("place", first(1, ["file", "directory"]))
def test_a_link_that_was_put_in_the_place_of_a_trace_meanwhile_is_not_followed(
    downloaded: Path, place: str
) -> None:
    """Its owner swaps it after the tab has judged it, before the process opens it that reads it."""
    private, traces = downloaded.parent / "private", traces_of(downloaded)
    shutil.copytree(downloaded, private)
    if place == "directory":
        downloaded.rename(downloaded.with_name("was"))
        downloaded.symlink_to(private)
    else:
        for file in traces.files:
            file.unlink()
            file.symlink_to(private / file.name)
    indexes = Indexes()
    indexes.get(traces)
    indexes.wait()
    found = indexes.get(traces)
    assert not isinstance(found, Index)
    assert "a link that leads out of" in str(found)
    out = downloaded.parent / "merged.gz"
    assert "leads out of" in str(merges()._run(traces, out, ()))
    assert not out.exists()


@pytest.mark.slow
def test_a_planted_link_does_not_choose_which_file_the_merged_trace_replaces(downloaded: Path) -> None:
    precious = downloaded.parent / "bashrc"
    precious.write_text("precious")
    with open_view(downloaded) as server:
        version = get(server.url, "timeline/meta", **of("traces", "."))["version"]
        planted = downloaded / OWN_INDEX / version
        planted.mkdir(parents=True, exist_ok=True)
        (planted / MERGED).symlink_to(precious)
        assert get(server.url, "trace/merged", **of("traces", "."), prepare=1)["state"] == "ready"
    assert precious.read_text() == "precious"


def test_an_index_that_came_with_the_traces_is_not_used(downloaded: Path) -> None:
    """Neither a forged one nor one that another user can truncate, which would end the server by SIGBUS."""
    made = index_of(downloaded)
    forged = downloaded / OWN_INDEX / made.version
    forged.mkdir(parents=True, exist_ok=True)
    text = '{"format": 4, "forged": true}'
    (forged / "index.json").write_text(text)
    again = index_of(downloaded)
    assert again.header == made.header
    assert (forged / "index.json").read_text() == text


def test_an_index_is_in_a_directory_that_is_ours_alone(downloaded: Path) -> None:
    home = known(find(traces_of(downloaded), index_of(downloaded).version))
    assert not home.is_relative_to(downloaded)
    for directory in (home, home.parent, home.parent.parent, home.parent.parent.parent):
        status = directory.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700), directory


def test_a_cache_that_others_can_write_is_not_used(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A directory that someone has put there before us."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "gpurun").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    index_of(downloaded)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
def test_a_relative_cache_is_not_put_into_the_current_directory(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {each.name for each in downloaded.iterdir()}
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(downloaded.parent))
    index_of(downloaded)
    assert {each.name for each in downloaded.iterdir()} == before


def test_a_merged_trace_is_never_written_through_a_link(downloaded: Path) -> None:
    precious = downloaded.parent / "bashrc"
    precious.write_text("precious")
    (downloaded / "all.json.gz").symlink_to(precious)
    done = CliRunner().invoke(cli, ["trace", ".", "--merge", "all.json.gz"])
    assert done.exit_code != 0
    assert precious.read_text() == "precious"


@pytest.mark.slow
def test_making_needs_no_write_access_to_the_traces(downloaded: Path) -> None:
    downloaded.chmod(0o500)
    try:
        index_of(downloaded)
    finally:
        downloaded.chmod(0o700)
