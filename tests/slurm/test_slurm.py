"""`gpurun submit` on a real Slurm of two nodes: a job runs, fails and is cancelled there."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import gpurun, write
from tests.integration.hosts import lacks
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.skipif(lacks("sbatch", "slurmctld", "munged"), reason="needs root and Slurm")

JOB = """
name: two
script: train.py
devices: cpu:2
nodes: 2
profile: {steps: 0}
"""
TRAIN = """
import os, time
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
open(f"began-{rank}", "w").close()
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    BODY
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
JOB_S = 240.0
"""A job that takes longer hangs."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def submitted(folder: Path, slurm: SlurmCluster, body: str) -> int:
    """The id of a job whose program does this in every step."""
    write(folder, "train.py", TRAIN.replace("BODY", body))
    write(folder, "job.yaml", JOB)
    result = gpurun(folder, "submit", "job.yaml", "--slurm", env=slurm.env)
    assert result.code == 0, result.err
    found = re.search(r"submitted two as job (\d+)", result.out)
    assert found
    assert f"squeue --job {found[1]}" in result.out
    assert f"scancel {found[1]}" in result.out
    return int(found[1])


def test_a_job_runs_on_two_nodes(tmp_path: Path, slurm: SlurmCluster) -> None:
    job_id = submitted(tmp_path, slurm, "pass")
    slurm.await_state(job_id, "COMPLETED", JOB_S)
    slurm.await_over(job_id, JOB_S)
    run = tmp_path / "runs" / "two" / f"slurm-{job_id}"
    comparison = json.loads((run / "comparison.json").read_text())
    (variant,) = comparison["variants"]
    assert variant["status"] == "ok"
    assert variant["devices"] == ["cpu:0@0", "cpu:1@0", "cpu:0@1", "cpu:1@1"]
    assert [rank["rank"] for rank in variant["ranks"] if rank["step_ms"]] == [0, 1, 2, 3]
    output = (tmp_path / f"slurm-{job_id}.out").read_text()
    assert "node 1 of 2" in output


def test_a_job_that_fails_has_failed_for_slurm_too(tmp_path: Path, slurm: SlurmCluster) -> None:
    job_id = submitted(tmp_path, slurm, "if rank == 3 and step == 5: raise ValueError('no such thing')")
    slurm.await_state(job_id, "FAILED", JOB_S)
    slurm.await_over(job_id, JOB_S)
    assert "rank 3 raised ValueError: no such thing" in (tmp_path / f"slurm-{job_id}.out").read_text()


def test_a_cancelled_job_leaves_nothing(tmp_path: Path, slurm: SlurmCluster) -> None:
    job_id = submitted(tmp_path, slurm, "time.sleep(60)")
    slurm.await_state(job_id, "RUNNING", JOB_S)
    deadline = time.monotonic() + JOB_S
    while len(list(tmp_path.glob("began-*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    slurm.run("scancel", str(job_id))
    slurm.await_state(job_id, "CANCELLED", JOB_S)
    slurm.await_over(job_id, JOB_S)
