"""What keeps nodes from coming together is said on each of them, with what to do about it."""

import platform
import socket
import subprocess
from pathlib import Path

import pytest

from tests import forkserver
from tests.integration.command import free_port, gpurun, write
from tests.integration.nodes.hosts import await_file

JOB = """
    workload: sleep
    devices: cpu:1
    nodes: 2
    global_batch: 8
"""


@pytest.fixture(autouse=True)
def _job(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)


def test_flags_without_nodes(tmp_path: Path) -> None:
    result = gpurun(tmp_path, "job.yaml", "--set", "nodes=1", "--node-rank", "0").ended(2)
    assert "job with several nodes" in result.err


@pytest.mark.slow
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = gpurun(tmp_path, "job.yaml", "--node-rank", "0", "--rendezvous", f"localhost:{port}")
    assert result.code == 3
    assert f"port {port} of node 0" in result.err
    assert f"--rendezvous localhost:{port + 1}" in result.err


def test_nodes_that_want_different_things_are_refused_on_both(tmp_path: Path) -> None:
    place = ("--rendezvous", f"localhost:{free_port()}")
    argv = ("gpurun", "job.yaml", "--node-rank", "1", *place, "--set", "global_batch=16")
    other = forkserver.start(*argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first = gpurun(tmp_path, "job.yaml", "--node-rank", "0", *place)
    _, second_err = other.communicate(timeout=60)
    assert (first.code, other.returncode) == (2, 2), first.err + second_err
    for said in (first.err, second_err):
        assert "`global_batch` is 8" in said
        assert "16 on node 1" in said


def test_a_node_that_cannot_join_keeps_no_other_waiting(tmp_path: Path) -> None:
    ports = {wrong: free_port() for wrong in (0, 1)}
    waiting = {wrong: start(tmp_path, "job.yaml", 1 - wrong, port) for wrong, port in ports.items()}
    for wrong in ports:
        await_file(tmp_path / f"stderr-{ports[wrong]}-{1 - wrong}", "waits for")
    refused = {wrong: start(tmp_path, "missing.yaml", wrong, port) for wrong, port in ports.items()}
    for wrong, port in ports.items():
        codes = [group[wrong].wait(timeout=60) for group in (waiting, refused)]
        assert codes == [2, 2]
        said = (tmp_path / f"stderr-{port}-{1 - wrong}").read_text()
        assert f"node {wrong} ({platform.node()}): " in said
        assert "missing.yaml" in said


@pytest.mark.slow
def test_only_node_0_needs_a_directory_for_the_run(tmp_path: Path) -> None:
    no_place = ("--out", "job.yaml/run")
    port = free_port()
    other = start(tmp_path, "job.yaml", 1, port, *no_place)
    await_file(tmp_path / f"stderr-{port}-1", "waits for")
    assert start(tmp_path, "job.yaml", 0, port, *no_place).wait(timeout=60) == 3
    assert other.wait(timeout=60) == 3
    for rank in range(2):
        assert "can't write job.yaml/run" in (tmp_path / f"stderr-{port}-{rank}").read_text()


def start(directory: Path, job: str, rank: int, port: int, *more: str) -> subprocess.Popen[str]:
    """A node's command, whose stderr goes to a file."""
    argv = [job, "--node-rank", str(rank), "--rendezvous", f"localhost:{port}", *more]
    with (directory / f"stderr-{port}-{rank}").open("w") as stderr:
        null = subprocess.DEVNULL
        return forkserver.start("gpurun", *argv, cwd=directory, stdout=null, stderr=stderr)
