"""What is submitted to Ray runs on two nodes of a Ray, and SkyPilot itself reads what is submitted to it."""

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
from gpurun.launcher.processes.guard import SECRET_VARIABLE
from gpurun.launcher.schedulers.ray import LAST_CALL_S
from tests.integration.command import ENGINES, gpurun, write
from tests.integration.nodes.hosts import await_file
from tools.system_packages import ALL_TESTS

pytestmark = pytest.mark.skipif(
    not (ENGINES.exists() or os.environ.get(ALL_TESTS)), reason="needs Ray and SkyPilot: make engines"
)

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
            done = subprocess.run([ENGINES, path], env=env, capture_output=True, text=True, timeout=120)
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
        assert job.wait(timeout=120) == NodesError.exit_code
    text = (tmp_path / "said").read_text()
    assert re.search(r"(?m)^node \d \(\S+\) is lost: Ray can't reach its actor$", text)
    assert TRACEBACK not in text
    # Ray sends SIGKILL to what its actor has started, or the kernel is first with SIGTERM.
    assert re.search(r"node \d \(\S+\)( is lost|: interrupted)", text)


SKYPILOT = """
import json, os, sys
import yaml
from sky import Task
from sky.skylet import constants

config = yaml.safe_load(sys.stdin)
try:
    Task.from_yaml_config(config | {"no_such_key": 1})
except ValueError as error:
    refused = str(error)
task = Task.from_yaml_config(config, secrets_overrides=[(sys.argv[1], "known")])
(resources,) = task.resources
print(json.dumps({
    "refused": refused,
    "nodes": task.num_nodes,
    "accelerators": resources.accelerators,
    "image": resources.image_id,
    "run": task.run,
    "secrets": list(task.secrets),
    "variables": [
        constants.SKYPILOT_NODE_RANK, constants.SKYPILOT_NODE_IPS, constants.SKYPILOT_NUM_NODES,
        constants.TASK_ID_ENV_VAR,
    ],
}))
"""
"""Reads a task as `sky launch` does."""
VARIABLES = ["SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_TASK_ID"]
"""Those that nodes get, as `test_node_facts` has gpurun read them."""


def test_skypilot_reads_a_task_as_it_is_meant_and_gives_nodes_these_variables(tmp_path: Path) -> None:
    write(tmp_path, "job.yaml", JOB)
    wanted = ("--gpu", "H100", "--gpus-per-node", "8", "--image", "reg/me:1", "--set", "seed=3")
    task = gpurun(tmp_path, "submit", "job.yaml", "--to", "skypilot", "--dry-run", *wanted).out
    done = subprocess.run(
        [ENGINES, "-c", SKYPILOT, SECRET_VARIABLE],
        env=os.environ | {"HOME": str(tmp_path)},
        input=task,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    assert "no_such_key" in read.pop("refused")
    assert read == {
        "nodes": 2,
        "accelerators": {"H100": 8},
        "image": {"null": "docker:reg/me:1"},
        "run": 'exec gpurun job.yaml --set seed=3 --out "runs/two/$SKYPILOT_TASK_ID"',
        "secrets": [SECRET_VARIABLE],
        "variables": VARIABLES,
    }
