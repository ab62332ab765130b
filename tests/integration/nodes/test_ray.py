"""What is submitted to Ray runs on two nodes of a Ray."""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from gpurun.launcher.errors import TRACEBACK, NodesError
from gpurun.launcher.nodes.rendezvous import DEFAULT_PORT
from gpurun.launcher.schedulers.ray import LAST_CALL_S
from tests.integration.command import ENGINES, gpurun, write
from tests.integration.nodes.hosts import await_file
from tools.system_packages import ALL_TESTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ENGINES.exists() or os.environ.get(ALL_TESTS)), reason="needs Ray: make engines"),
]

JOB = """
name: two
workload: mlp
devices: cpu:1
nodes: 2
global_batch: 8
gradient_check: false
steps: {rounds: 1, launches: 1, warmup: 0}
profile: {steps: 0}
"""
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

each = {"num_cpus": 1, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
second = cluster.add_node(**each)
print(cluster.address, flush=True)
if sys.stdin.readline():
    cluster.remove_node(second, allow_graceful=False)
    print("killed", flush=True)
    sys.stdin.readline()
cluster.shutdown()
"""
"""A Ray of two nodes, of which the second is killed at a line of input; it ends with its input."""


@contextmanager
def ray_of_two_nodes() -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process that keeps it, and the environment in which it is found."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # the paths of its sockets have to be short
    (directory / "ray").mkdir()
    own = dict.fromkeys(("HOME", "RAY_TMPDIR", "TMPDIR"), str(directory)) | {"RAY_USAGE_STATS_ENABLED": "0"}
    env = os.environ | own
    with subprocess.Popen(
        [ENGINES, "-c", CLUSTER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        try:
            yield cluster, {**env, "RAY_ADDRESS": line_of(cluster.stdout)}
        finally:
            cluster.communicate(timeout=60)
            shutil.rmtree(directory)


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def driver(directory: Path, *words: str) -> tuple[Path, Path]:
    """What `gpurun submit` writes for Ray, and the run directory of the job."""
    text = gpurun(directory, "submit", "job.yaml", "--to", "ray", "--dry-run", *words).out
    path = directory / "driver.py"
    path.write_text(text)
    (label,) = (line.split("'")[-2] for line in text.splitlines() if line.startswith("COMMAND"))
    return path, directory / label


def test_a_job_runs_on_two_nodes_of_a_ray_and_ends_when_one_is_killed(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)
    with ray_of_two_nodes() as (cluster, env):
        path, run = driver(tmp_path, "--set", "nodes=2..3")  # begins with those that have room
        path.write_text(path.read_text().replace(f"LAST_CALL_S = {LAST_CALL_S}", "LAST_CALL_S = 1"))
        with suppress(OSError), socket.create_server(("", DEFAULT_PORT)):  # another job on the machine
            done = subprocess.run([ENGINES, path], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.findall(r"waiting until (\d) nodes", done.stdout) == ["3", "2"]
        (variant,) = json.loads((run / "comparison.json").read_text())["variants"]
        assert [rank["device"] for rank in variant["ranks"]] == ["cpu:0@0", "cpu:0@1"]

        path, run = driver(tmp_path, "--set", "steps.rounds=100000")
        with (tmp_path / "said").open("w") as said:
            job = subprocess.Popen([ENGINES, path], env=env, stdout=said, stderr=said)
        await_file(run / "launches" / "01-ddp-2" / "events.jsonl", '"round"')
        assert cluster.stdin is not None
        cluster.stdin.write("\n")
        cluster.stdin.flush()
        assert line_of(cluster.stdout) == "killed"
        assert job.wait(timeout=300) == NodesError.exit_code
    text = (tmp_path / "said").read_text()
    assert re.search(r"(?m)^node \d \(\S+\) is lost: Ray can't reach its actor$", text)
    assert TRACEBACK not in text
    # Ray sends SIGKILL to what its actor has started, or the kernel is first with SIGTERM.
    assert re.search(r"node \d \(\S+\)( is lost|: interrupted)", text)
