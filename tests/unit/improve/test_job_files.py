"""Which files of a job's directory change."""

from pathlib import Path

from gpurun.launcher.improve.job_files import changed_files, files_of


def test_files_that_are_new_gone_or_other_ones_have_changed(tmp_path: Path) -> None:
    for name in ("same", "other", "gone", "renamed", ".git/index", "env/pyvenv.cfg", "env/a", "found/log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    before = files_of(tmp_path, tmp_path / "found")
    assert {Path(path).name for path in before} == {"same", "other", "gone", "renamed"}
    for name in ("other", "new", ".git/index", "env/a", "found/log", "log"):
        (tmp_path / name).write_text("it is longer now")
    (tmp_path / "gone").unlink()
    (tmp_path / "renamed").rename(tmp_path / "renamed to")
    with (tmp_path / "log").open("a"):  # as that of this command's own output
        changed = changed_files(before, files_of(tmp_path, tmp_path / "found"))
    assert [Path(path).name for path in changed] == ["gone", "new", "other", "renamed", "renamed to"]
