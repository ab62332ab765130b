"""The OOM killer's counters, as the kernel's two cgroup versions write them."""

from pathlib import Path

import pytest

from gpurun.launcher.machine.resource_limits import _counter_files, _read_counter, oom_kills


def test_both_versions_of_cgroups_are_looked_for() -> None:
    files = [str(file) for file in _counter_files(["4:cpu,memory:/job/7", "0::/user/x:y"])]
    assert "/sys/fs/cgroup/memory/job/7/memory.oom_control" in files
    assert "/sys/fs/cgroup/memory/memory.oom_control" in files
    assert "/sys/fs/cgroup/user/x:y/memory.events" in files


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("", None),
        ("three words here\n", None),
    ],
)
def test_the_counter_is_read(tmp_path: Path, text: str, count: int | None) -> None:
    (tmp_path / "events").write_text(text)
    assert _read_counter(tmp_path / "events") == count


def test_a_process_that_is_gone_has_no_counter() -> None:
    assert oom_kills("0") is None
