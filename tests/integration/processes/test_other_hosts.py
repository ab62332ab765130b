"""Machines that are not like this one: another view of /proc, a file system without hard links."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.launcher.nodes.transport.credentials import find_secret
from gpurun.launcher.processes.pool import WorkerPool
from gpurun.launcher.rundir.claim import claimed, pid_namespace, read
from gpurun.launcher.rundir.files import RunDir, append_lines, read_lines
from gpurun.launcher.rundir.records import Event
from tests.integration.command import SLEEP_JOB, write
from tests.known import known

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


IN_CONTAINER = """\
import os, socket, sys
from pathlib import Path
from gpurun.launcher.machine.process_tree import descendants
from gpurun.launcher.processes.guard import split_process
from gpurun.launcher.rundir.store import cache_directory
far = os.dup2(1, 900)
ours, theirs = socket.socketpair()
leaves = "import os, time\\nif os.fork() == 0:\\n os.setsid()\\n time.sleep(60)"
with split_process() as guard:
    guard.spawn([sys.executable, "-P", "-c", leaves], {}, theirs, 2)
    print(os.getpid(), str(far) in os.listdir(f"/proc/{guard.supervisor}/fd"))
print(descendants(1), os.listdir("/proc/self/task") == ["1"])
print(cache_directory() == Path(os.environ["TMPDIR"]) / "gpurun-54321")
"""
AS_NO_ONE = ("setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups")
"""A number without a name. The capability lets it read Python, wherever that is installed."""
CAN_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")

NO_SHARED_MEMORY = """\
import errno, mmap, os, sys
from pathlib import Path
def no_mmap(*_):
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
mmap.mmap = no_mmap
from gpurun.launcher.rundir.control import read_states
from gpurun.launcher.worker.entry.zygote import make_observable
make_observable(Path(sys.argv[1]), 0)
print(dict(read_states(Path(sys.argv[1]))))
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
    assert "unshare -pf --mount-proc" in done.stderr


def test_a_claim_of_another_container_may_live(tmp_path: Path) -> None:
    """Host name and boot may be the same there; process numbers mean others."""
    done = unshared("--mount-proc", sys.executable, "-P", "-c", CLAIM, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = known(read(RunDir(tmp_path)))
    assert found.pid_namespace not in (0, pid_namespace())
    assert found.may_live
    assert not found.is_here


def test_in_a_container_we_may_be_process_1_of_a_user_without_name_and_home() -> None:
    """The supervisor keeps no file open, whatever its number, and nothing that a server left outlives it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # those of tests are closed to other users
        Path(directory).chmod(0o777)
        run = ("env", "-u", "HOME", "-u", "XDG_CACHE_HOME", f"TMPDIR={directory}", sys.executable, "-P", "-c")
        done = unshared("--mount-proc", *AS_NO_ONE, *CAN_READ, *run, IN_CONTAINER)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1 False", "[] True", "True"]


def test_a_file_system_without_shared_memory_costs_only_the_stacks(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-c", NO_SHARED_MEMORY, str(tmp_path / "control")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "{}"
    assert "stacks can't be shown" in done.stdout + done.stderr


def test_a_server_that_was_reaped_has_no_number_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the number may be that of another process."""
    monkeypatch.setattr(WorkerPool, "_start_server", lambda _: None)
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    supervisor, other = sleeping
    pool = WorkerPool(cast("Any", SimpleNamespace(supervisor=supervisor.pid)))
    pool._server = cast("Any", SimpleNamespace(pid=other.pid, close=lambda: None))
    pool._drop_server()
    try:
        assert other.poll() is None
        assert pool._server is None
    finally:
        for process in sleeping:
            process.kill()
            process.wait()


def test_neither_a_claim_nor_a_secret_needs_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "exFAT")

    monkeypatch.setattr(os, "link", link)
    run = RunDir(tmp_path)
    with claimed(run):
        found = known(read(run))
        assert found.pid == os.getpid()
    assert list(tmp_path.iterdir()) == []
    home = {"XDG_CONFIG_HOME": str(tmp_path)}  # the nodes' secret needs none either
    assert find_secret(home) == find_secret(home)
    assert stat.S_IMODE((tmp_path / "gpurun" / "secret").stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_lines(path, [Event(1, "build")])
    with path.open("ab") as file:
        file.write(b'{"time_ns": 2, "sta')
    append_lines(path, [Event(3, "done")])
    assert [event.time_ns for event in read_lines(path, Event)] == [1, 3]
