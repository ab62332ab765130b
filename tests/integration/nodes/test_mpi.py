"""`gpurun submit --to mpi` with the real `mpirun` of Open MPI and of MPICH, over two hosts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.command import write
from tests.integration.nodes.hosts import NAMES, TIMEOUT_S, Hosts, await_file
from tools.system_packages import without

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason := without("iproute2", "openmpi-bin", "mpich")), reason=reason),
]

JOB = """
name: two
script: train.py
devices: cpu:1
nodes: 2
profile: {steps: 0}
"""
TRAIN = """
import time
import torch

torch.distributed.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(20):
    (parameter * 2).sum().backward()
    torch.distributed.all_reduce(parameter.grad)
    BODY
    optimizer.step()
torch.distributed.destroy_process_group()
"""
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


def agent(directory: Path, hosts: Hosts) -> Path:
    """A program that `mpirun` calls instead of ssh."""
    cases = "".join(
        f'{name}) exec {" ".join(map(quoted, hosts.entering(host)))} sh -c "$*" ;;\n'
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


@contextmanager
def submitted(mpi: str, body: str, directory: Path, hosts: Hosts) -> Iterator[subprocess.Popen[str]]:
    """The command that carries out a job whose ranks do this in every step."""
    write(directory, "train.py", TRAIN.replace("BODY", body))
    write(directory, "job.yaml", JOB)
    mpirun = executable(directory / "bin" / "mpirun", f'#!/bin/sh\nexec mpirun.{mpi} "$@"\n')
    options = [f"--mpirun={word}" for word in (*OPTIONS[mpi], str(agent(directory, hosts)))]
    command = [*hosts.entering(0), sys.executable, "-m", "gpurun", "submit", "job.yaml"]
    with subprocess.Popen(
        [*command, "--to", "mpi", *options],
        cwd=directory,
        env={**os.environ, **AS_ROOT, "PATH": f"{mpirun.parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process


WAITS = "if step == 15: open(f'waits-{torch.distributed.get_rank()}', 'w').close(); time.sleep(60)"


@pytest.mark.parametrize(("mpi", "is_cancelled"), [("openmpi", False), ("mpich", True)])
def test_a_job_by_mpirun_runs_on_both_hosts(
    mpi: str, is_cancelled: bool, tmp_path: Path, hosts: Hosts
) -> None:
    with submitted(mpi, WAITS if is_cancelled else "pass", tmp_path, hosts) as command:
        if is_cancelled:
            for rank in range(2):
                await_file(tmp_path / f"waits-{rank}")
            command.send_signal(signal.SIGINT)  # only to the command: what it has started is elsewhere
        said, _ = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == (130 if is_cancelled else 0), said
    assert said.endswith("gpurun: interrupted by Ctrl-C\n") == is_cancelled, said
    (run,) = (tmp_path / "runs" / "two").glob("mpi-*")
    comparison = json.loads((run / "comparison.json").read_text())
    assert comparison["complete"] != is_cancelled
    (variant,) = comparison["variants"]
    assert [rank["host"] for rank in variant["ranks"]] == list(NAMES)
    assert all(path.stat().st_size for path in run.glob("variants/*/rank?.jsonl"))
