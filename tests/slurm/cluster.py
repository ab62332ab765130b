"""A Slurm cluster of two nodes on one machine, without systemd: munged, slurmctld, and a slurmd per node.

The nodes are called `ci0` and `ci1` and share the machine's address, file system and cores. Needs root.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from gpurun.launcher.machine.process_tree import descendants
from tests import watcher

NODES = ("ci0", "ci1")
START_S = 30.0
CONFIG = """\
ClusterName=gpurun-tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
NodeName=ci[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] \
CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_HOSTS_LINE = f"127.0.0.1 ci0 ci1 {watcher.HOSTS_MARK}{os.getpid()}\n"


class SlurmCluster:
    """The cluster as long as the block lasts; `env` is what Slurm's commands need to find it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.env = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        (self.directory / "state").mkdir(parents=True)
        self.directory.chmod(0o755)
        port = _free_ports(3)
        text = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            directory=self.directory,
            port=port,
            first=port + 1,
            last=port + 2,
        )
        (self.directory / "slurm.conf").write_text(text)
        with watcher.HOSTS.open("a") as file:
            file.write(_HOSTS_LINE)
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        watcher.HOSTS.write_text(watcher.HOSTS.read_text().replace(_HOSTS_LINE, ""))

    def run(self, *argv: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout.strip()

    def state_of(self, job_id: int | str) -> str:
        """COMPLETED, FAILED, CANCELLED, RUNNING, …"""
        shown = self.run("scontrol", "show", "job", str(job_id))
        return shown.partition("JobState=")[2].split()[0]

    def await_state(self, job_id: int | str, wanted: str, timeout_s: float) -> None:
        """Returns when the job is in this state; fails if it ends in another one."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state_of(job_id)) != wanted:
            final = state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not final, f"job {job_id} is {state}, not {wanted}"
            assert time.monotonic() < deadline, f"job {job_id} is still {state}"
            time.sleep(0.1)

    def await_over(self, job_id: int, timeout_s: float) -> None:
        """Returns when Slurm has tidied up after a job, and the last of its processes has ended."""
        deadline = time.monotonic() + timeout_s
        while self.run("squeue", "-h", "--job", str(job_id)) or _has_step(job_id):
            assert time.monotonic() < deadline, f"processes of job {job_id} are left"
            time.sleep(0.1)

    def _start(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid",
                 "log-file": "munged.log", "seed-file": "munged.seed"}  # fmt: skip
        options = [f"--{name}={self.directory / file}" for name, file in files.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        _await(lambda: (self.directory / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        _await(self._is_idle, "Slurm")

    def _daemon(self, name: str, *args: str) -> None:
        path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        assert path, f"{name} is missing: apt-get install slurm-wlm munge"
        with (self.directory / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [path, *args],
                    env={**os.environ, **self.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _is_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.split() == ["idle"] * len(NODES)


def _has_step(job_id: int) -> bool:
    """Whether a step of the job still runs, or the `srun` that began it."""
    for pid in descendants(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if f"slurmstepd: [{job_id}." in command or (command.startswith("srun") and f"-{job_id}" in command):
            return True
    return False


def _await(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not start within {START_S:g} s"
        time.sleep(0.05)


def _free_ports(count: int) -> int:
    """The first of some neighbouring ports that are free, below those for outgoing connections."""
    for first in range(16_800, 19_800, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
