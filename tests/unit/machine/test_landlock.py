"""The kernel keeps a process, and what it starts, from writing elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.machine.landlock import can_restrict_writes
from gpurun.launcher.rundir.launch_writes import is_below, writable_places

KEPT = """
import os, subprocess, sys
from gpurun.launcher.machine.landlock import restrict_writes
restrict_writes(["own", "log", "missing", "/dev"])
for command in sys.argv[1:]:
    print(subprocess.run(command, shell=True, capture_output=True).returncode == 0)
"""


@pytest.mark.skipif(not can_restrict_writes(), reason="this kernel has no Landlock, or an older one")
def test_a_process_and_what_it_starts_writes_only_where_it_may(tmp_path: Path) -> None:
    for name in ("own", "data", "data/sub"):
        (tmp_path / name).mkdir()
    for name in ("log", "own/b", "data/a", "data/sub/a"):
        (tmp_path / name).write_text("before")
    (tmp_path / "own/link").symlink_to("../data")
    allowed = ("echo x >> own/new", "echo x >> log", "mkdir own/d", "rm own/b", "mv own/new own/d/moved",
               "cat data/a", "echo x > /dev/null")  # fmt: skip
    refused = ("echo x >> data/a", "echo x > data/new", "echo x > own/link/cp", "mkdir data/d", "rm data/a",
               "mv data/a data/b", "ln data/a data/b", "ln -s a data/b", "rm -r data/sub", "echo x > new",
               "truncate -s 0 data/a", "mv data/a own/a", "rm log", "mkdir missing")  # fmt: skip
    argv = [sys.executable, "-c", KEPT, *allowed, *refused]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    succeeded = [each == "True" for each in done.stdout.split()]
    assert dict(zip((*allowed, *refused), succeeded, strict=True)) == {
        **dict.fromkeys(allowed, True),
        **dict.fromkeys(refused, False),
    }
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["a", "sub"]
    assert (tmp_path / "data/a").read_text() == (tmp_path / "data/sub/a").read_text() == "before"


def test_a_launch_may_write_to_its_run_devices_temporary_files_and_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/fast/triton")
    found = writable_places("/home/me/project", "/home/me/project/runs/a")
    inside = (
        "/home/me/project/runs/a/launches",
        "/tmp/x",
        "/dev/null",
        "/home/me/.cache/b",
        "/fast/triton/c",
    )
    outside = ("/home/me/project/last.pt", "/home/me/notes", "/home/me/project/runs/abc", "/data", "/fast")
    assert [path for path in (*inside, *outside) if is_below(path, found)] == list(inside)
