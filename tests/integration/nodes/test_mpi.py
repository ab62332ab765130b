"""`gpurun submit --to mpi` with the real `mpirun` of Open MPI and of MPICH, over two hosts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import write
from tests.integration.nodes.hosts import ADDRESSES, NAMES, TIMEOUT_S, Hosts
from tools.system_packages import without

pytestmark = pytest.mark.skipif(bool(reason := without("iproute2", "openmpi-bin", "mpich")), reason=reason)

JOB = """
name: two
script: train.py
devices: cpu:1
nodes: 2
profile: {steps: 0}
"""
TRAIN = """
import torch

torch.distributed.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(20):
    (parameter * 2).sum().backward()
    torch.distributed.all_reduce(parameter.grad)
    assert step < LAST or torch.distributed.get_rank() != 1, "no such thing"
    optimizer.step()
torch.distributed.destroy_process_group()
"""
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
AGENT = """\
#!/bin/sh
# Called like ssh, by mpirun.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in
"""
HOSTS = ",".join(NAMES)
OPTIONS = {
    "openmpi": ("--host", HOSTS, "--mca", "plm_rsh_agent"),
    "mpich": ("-hosts", HOSTS, "-launcher", "ssh", "-launcher-exec"),
}
"""By which each calls the agent, whose path comes last."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def entering(hosts: Hosts, host: int, names: Path) -> list[str]:
    """What runs a command on a host, which knows both by name."""
    space = ("ip", "netns", "exec", hosts.spaces[host], "unshare", "--uts", "--mount")
    return [*space, "sh", "-c", ENTER, "sh", NAMES[host], str(names)]


def agent(directory: Path, hosts: Hosts) -> Path:
    """A program that `mpirun` calls instead of ssh."""
    names = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, NAMES, strict=True))
    write(directory, "hosts", f"127.0.0.1 localhost\n{names}")
    cases = "".join(
        f'{name}) exec {" ".join(map(quoted, entering(hosts, host, directory / "hosts")))} sh -c "$*" ;;\n'
        for host, name in enumerate(NAMES)
    )
    return executable(directory / "agent", f"{AGENT}{cases}esac\n")


def quoted(word: str) -> str:
    return f"'{word}'"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def submitted(mpi: str, last_step: int, directory: Path, hosts: Hosts) -> tuple[int, str]:
    """The exit code and the output of a job whose rank 1 fails after this step."""
    write(directory, "train.py", TRAIN.replace("LAST", str(last_step)))
    write(directory, "job.yaml", JOB)
    mpirun = executable(directory / "bin" / "mpirun", f'#!/bin/sh\nexec mpirun.{mpi} "$@"\n')
    options = [f"--mpirun={word}" for word in (*OPTIONS[mpi], str(agent(directory, hosts)))]
    command = [*entering(hosts, 0, directory / "hosts"), sys.executable, "-m", "gpurun", "submit", "job.yaml"]
    done = subprocess.run(
        [*command, "--to", "mpi", *options],
        cwd=directory,
        env={**os.environ, **AS_ROOT, "PATH": f"{mpirun.parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("mpi", "is_fine"), [("openmpi", True), ("mpich", False)])
def test_a_job_by_mpirun_runs_on_both_hosts(mpi: str, is_fine: bool, tmp_path: Path, hosts: Hosts) -> None:
    code, said = submitted(mpi, 99 if is_fine else 5, tmp_path, hosts)
    assert (code == 0) == is_fine, said
    assert ("no such thing\n" in said and "on hostb" in said) != is_fine, said
    (run,) = (tmp_path / "runs" / "two").glob("mpi-*")
    (variant,) = json.loads((run / "comparison.json").read_text())["variants"]
    assert (variant["status"] != "failed") == is_fine
    assert [rank["host"] for rank in variant["ranks"]] == list(NAMES)
