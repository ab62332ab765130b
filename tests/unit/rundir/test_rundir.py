"""Files that outlive crashes and full disks."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.launcher.errors import MachineError, SpecError, unwritable
from gpurun.launcher.rundir.files import RunDir, append_lines, read_json, read_lines, write_json
from gpurun.launcher.rundir.paths import check_writable, refuse_links
from gpurun.launcher.rundir.rank_files import write_error
from gpurun.launcher.rundir.records import Event, VariantFacts, elapsed_s
from tests.wording import Wording


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = [Event(1, "start"), Event(2, "round", "ddp-2-even", 3, 28)]
    append_lines(path, events)
    with path.open("ab") as file:
        file.write(b'{"time_ns": 3, "sta')
    assert list(read_lines(path, Event)) == events
    append_lines(path, [Event(4, "done")])
    assert list(read_lines(path, Event)) == [*events, Event(4, "done")]


def test_a_replaced_file_is_whole_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a" / "facts.json"
    write_json(path, VariantFacts(gradient_error=1e-7))
    write_json(path, VariantFacts(warnings=("BatchNorm",)))
    assert read_json(path, VariantFacts) == VariantFacts(warnings=("BatchNorm",))
    assert [file.name for file in path.parent.iterdir()] == ["facts.json"]


def test_the_wall_clock_may_be_set_during_a_launch() -> None:
    hour_ns = 3_600 * 10**9
    events = [
        Event(hour_ns, "start", monotonic_ns=5_000_000_000),
        Event(0, "done", monotonic_ns=7_000_000_000),
    ]
    assert elapsed_s(events) == 2.0
    assert elapsed_s([Event(1_000_000_000, "start"), Event(4_000_000_000, "done")]) == 3.0  # an older run
    assert elapsed_s([]) == 0.0


def test_a_failed_write_keeps_the_old_content_and_says_where(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    write_json(path, VariantFacts(gradient_error=1e-7))
    blocked = path / "below-a-file.json"
    with pytest.raises(MachineError, match=r"below-a-file\.json"):
        write_json(blocked, {})
    assert read_json(path, VariantFacts).gradient_error == 1e-7


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = RunDir(tmp_path).plan
    path.write_text('{"warnings": 3}')
    with pytest.raises(MachineError, match=r"plan\.json"):
        read_json(path, VariantFacts)


def test_lines_that_only_fit_in_part_are_not_kept_and_the_reason_is_the_systems(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    append_lines(path, ["one"])
    with files_up_to(10), pytest.raises(MachineError, match=os.strerror(errno.EFBIG)):
        append_lines(path, ["two", "three"])
    assert path.read_text() == '"one"\n'


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_whose_files_hold_nothing_is_refused_before_a_run(tmp_path: Path) -> None:
    with files_up_to(0), pytest.raises(MachineError, match=r"can't write .*runs: "):
        check_writable(tmp_path / "runs")
    check_writable(tmp_path / "runs")


def test_a_directory_that_no_record_can_name_is_refused_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"/d\\udcff/runs isn't UTF-8"):
        check_writable(tmp_path / "d\udcff" / "runs")


def test_a_dead_link_and_a_place_that_takes_no_files_are_named(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    for path in (link, link / "run"):
        text = str(unwritable(path, FileExistsError(errno.EEXIST, "File exists")))
        assert text.endswith(f"File exists; the link {link} leads to gone, which is not there")
    with pytest.raises(MachineError) as error:
        check_writable(Path("/proc/x"))
    assert "can't write /proc/x: No such file or directory; no files can be made in /proc\n" in str(
        error.value
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_every_reason_has_its_own_remedy(number: int, wording: Wording) -> None:
    text = str(unwritable(Path("runs/a"), OSError(number, os.strerror(number))))
    wording(text)
    assert ("space" in text) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert "--out" not in text  # not every file belongs to a run


def test_a_missing_file_is_named_once(tmp_path: Path, wording: Wording) -> None:
    with wording.raises(MachineError):
        read_json(tmp_path / "plan.json", VariantFacts)


def test_links_are_refused_but_where_a_program_saves_for_itself(tmp_path: Path) -> None:
    saved = tmp_path / "launches" / "01-script-2" / "files"
    saved.mkdir(parents=True)
    (saved / "last.ckpt").symlink_to("step-10.ckpt")
    refuse_links(tmp_path)
    (saved.parent / "launch.json").symlink_to("elsewhere")
    with pytest.raises(SpecError, match="is a symbolic link"):
        refuse_links(tmp_path)


def test_restarts_go_on_from_what_was_saved_but_not_by_other_software(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    saved = {name: run.program_files(name) for name in ("01-program-2", "01-program-2~2", "01-program-2~12")}
    assert set(saved.values()) == {tmp_path / "launches/01-program-2/files"}
    write_json(run.replaced, ["01-program-2", "01-program-2~2", "03-program-2"])
    for name in ("01-program-2~3", "01-program-2~4"):
        assert run.program_files(name) == tmp_path / "launches/01-program-2~3/files"
    assert run.program_files("02-program-2~2") == tmp_path / "launches/02-program-2/files"


@pytest.mark.parametrize(
    ("written", "copied"),
    [
        ('{"message": {"a": 1}}', '{"message": {"a": 1, "errorCode": 7}}'),
        ('{"message": "x"}', '{"message": "x"}'),
        ('["x"]', '["x"]'),
        ("{", None),
        ("[" * 9999, None),
    ],
)
def test_an_error_file_may_hold_anything(tmp_path: Path, written: str, copied: str | None) -> None:
    own, target = tmp_path / "own", tmp_path / "target"
    own.write_text(written)
    write_error(str(own), str(target), 7)
    assert (target.read_text() if target.exists() else None) == copied
