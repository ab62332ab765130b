"""Machines that are not like this one: another view of /proc, a file system without hard links."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpurun.launcher.rundir.claim import claimed, pid_namespace, read
from gpurun.launcher.rundir.files import RunDir, append_lines, read_lines
from gpurun.launcher.rundir.records import Event
from tests.integration.command import SLEEP_JOB, write

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making namespaces needs root")

HIDDEN = """\
set -e
mount -t proc -o hidepid=1 proc /proc
setpriv --reuid 1234 --regid 1234 --clear-groups sleep 60 &
until [ -e /proc/$! ] && grep -q sleep /proc/$!/comm; do :; done
exec setpriv --regid 1234 --clear-groups --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace "$@"
"""
SWEEP = """\
import os, subprocess, sys
from gpurun.launcher.machine.process_tree import become_subreaper, descendants, kill_descendants
become_subreaper()
escape = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n time.sleep(60)"
subprocess.run([sys.executable, "-c", escape], check=True)
stats = [f"/proc/{name}/stat" for name in os.listdir("/proc") if name.isdigit()]
print(sum(not os.access(stat, os.R_OK) for stat in stats))
print(len(descendants(os.getpid())), kill_descendants(os.getpid()))
"""


CLAIM = """\
import platform, sys
from pathlib import Path
from gpurun.launcher.rundir.claim import Running, boot_id, create, pid_namespace
from gpurun.launcher.rundir.files import RunDir
create(RunDir(Path(sys.argv[1])), Running(platform.node(), boot_id(), 1, 1, pid_namespace()))
"""


def unshared(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *words]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_where_proc_hides_other_users_our_own_are_still_found() -> None:
    """hidepid=1: a process that left its session is found and ended, and nothing raises."""
    done = unshared("--mount-proc", "sh", "-c", HIDDEN, "sh", sys.executable, "-P", "-c", SWEEP)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["1", "1", "[]"]


def test_a_proc_of_another_namespace_is_refused_at_once(tmp_path: Path) -> None:
    """What it shows would be ended by numbers that mean other processes here."""
    write(tmp_path, "job.yaml", SLEEP_JOB)
    done = unshared(sys.executable, "-P", "-m", "gpurun", "job.yaml", cwd=tmp_path)
    assert done.returncode == 3
    assert "mount this one's: unshare -pf --mount-proc" in done.stderr


def test_a_claim_of_another_container_may_live(tmp_path: Path) -> None:
    """Host name and boot may be the same there; process numbers mean others."""
    done = unshared("--mount-proc", sys.executable, "-P", "-c", CLAIM, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = read(RunDir(tmp_path))
    assert found is not None
    assert found.pid_namespace not in (0, pid_namespace())
    assert found.may_live
    assert not found.is_here


def test_a_claim_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "exFAT")

    monkeypatch.setattr(os, "link", link)
    run = RunDir(tmp_path)
    with claimed(run):
        found = read(run)
        assert found is not None
        assert found.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_lines(path, [Event(1, "build")])
    with path.open("ab") as file:
        file.write(b'{"time_ns": 2, "sta')
    append_lines(path, [Event(3, "done")])
    assert [event.time_ns for event in read_lines(path, Event)] == [1, 3]
