"""Which files of a job's directory change."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpurun.launcher.improve.job_files import JobFiles, changed_files, files_of


def files(directory: Path) -> JobFiles:
    return files_of(directory, directory / "found")


def names(paths: list[str]) -> list[str]:
    return [Path(path).name for path in paths]


def write(directory: Path, *paths: str, text: str = "before") -> None:
    for name in paths:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def test_files_that_are_new_gone_or_other_ones_have_changed(tmp_path: Path) -> None:
    write(tmp_path, "same", "other", "gone", "renamed", ".git/index", "env/pyvenv.cfg", "env/a", "found/log")
    before = files(tmp_path)
    assert {Path(path).name for path in before.own} == {"same", "other", "gone", "renamed"}
    write(tmp_path, "other", "new", ".git/index", "env/a", "found/log", "log", text="it is longer now")
    (tmp_path / "gone").unlink()
    (tmp_path / "renamed").rename(tmp_path / "renamed to")
    with (tmp_path / "log").open("a"):  # as that of this command's own output
        changed = changed_files(before, files(tmp_path))
    assert names(changed) == ["gone", "new", "other", "renamed", "renamed to"]


def test_runs_and_searches_of_gpurun_are_no_files_of_the_users(tmp_path: Path) -> None:
    """Also those that begin, or end, meanwhile."""
    write(tmp_path, "train.py", "plan.json", "runs/a/1/.invocation.json.0f", "runs/a/2/invocation.json")
    before = files(tmp_path)
    write(tmp_path, "runs/a/1/invocation.json", "runs/a/1/plan.json", "runs/a/2/plan.json")
    (tmp_path / "runs/a/1/.invocation.json.0f").unlink()
    write(tmp_path, "runs/b-improve/1/improve.json", "runs/b-improve/1/1-original/launches/1/log")
    write(tmp_path, "runs/a/latest", "runs/a/.latest.0123", "runs/selftest/selftest.json")
    write(tmp_path, "plan.json", text="the user's own")
    assert names(changed_files(before, files(tmp_path))) == ["plan.json"]


def test_a_directory_that_cant_be_searched_is_left_out() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name).resolve()
        directory.chmod(0o755)
        write(directory, "train.py", "pgdata/base")
        (directory / "pgdata").chmod(0)
        child = os.fork()
        if not child:
            code = 1
            try:
                if not os.getuid():
                    os.setuid(65534)
                code = list(files(directory).own) != [f"{directory}/train.py"]
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        (directory / "pgdata").chmod(0o755)


def test_files_outside_are_seen_where_links_lead_to_them(tmp_path: Path) -> None:
    job, data = tmp_path / "job", tmp_path / "data"
    write(tmp_path, "data/a", "data/sub/b", "best.pt", "others/c", "job/train.py")
    for name, target in (("ln", "../data"), ("best", "../best.pt"), ("none", "missing"), ("loop", ".")):
        (job / name).symlink_to(target)
    before = files(job)
    write(tmp_path, "data/new", "data/sub/b", "best.pt", "others/c", text="it is longer now")
    (job / "none").unlink()
    assert changed_files(before, files(job)) == sorted(
        map(str, (tmp_path / "best.pt", data / "new", data / "sub/b", job / "none"))
    )


CHANGES: list[Callable[[Path], object]] = [
    lambda path: path.chmod(0o640),
    lambda path: os.setxattr(path, "user.a", b"b"),
    lambda path: path.write_text("other!") and os.utime(path, ns=(10**18, 10**18)),  # type: ignore[func-returns-value]
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_modes_attributes_and_contents_with_their_old_time_are_seen(tmp_path: Path, number: int) -> None:
    write(tmp_path, "best.pt")
    os.utime(tmp_path / "best.pt", ns=(10**18, 10**18))
    before = files(tmp_path)
    CHANGES[number](tmp_path / "best.pt")
    assert names(changed_files(before, files(tmp_path))) == ["best.pt"]


def test_where_launches_cant_write_only_modes_and_owners_can_be_theirs(tmp_path: Path) -> None:
    """All else has the user changed, who may go on working."""
    write(tmp_path, "a", "b", "free/c", "d")
    before = files(tmp_path)
    write(tmp_path, "a", "free/c", "new", text="it is longer now")
    (tmp_path / "b").chmod(0o600)
    (tmp_path / "d").unlink()
    changed = changed_files(before, files(tmp_path), reachable=(str(tmp_path / "free"),))
    assert names(changed) == ["b", "c"]


def test_commits_and_tags_are_seen(tmp_path: Path) -> None:
    def git(*args: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "job").mkdir()
    before = files(tmp_path / "job")
    git("pack-refs", "--all")  # as git does by itself
    assert changed_files(before, files(tmp_path / "job")) == []
    git("commit", "-q", "--allow-empty", "-m", "second")
    git("tag", "best")
    expected = ["HEAD of git", "refs/heads/main of git", "refs/tags/best of git"]
    assert changed_files(before, files(tmp_path / "job")) == expected
    assert changed_files(before, files(tmp_path / "job"), reachable=("/dev",)) == []
