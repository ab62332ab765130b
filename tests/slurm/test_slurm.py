"""`gpurun submit` on a real Slurm of two nodes: a job runs, fails and is cancelled there."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command import gpurun, write
from tests.slurm.cluster import SlurmCluster
from tools.system_packages import without

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(bool(reason := without("slurm-wlm", "munge")), reason=reason),
]

JOB = """
name: two
script: train.py
devices: cpu:DEVICES
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


def submitted(directory: Path, slurm: SlurmCluster, body: str, devices: int = 1) -> int:
    """The id of a job whose program does this in every step, on so many devices of each node."""
    write(directory, "train.py", TRAIN.replace("BODY", body))
    write(directory, "job.yaml", JOB.replace("DEVICES", str(devices)))
    result = gpurun(directory, "submit", "job.yaml", "--slurm", env=slurm.env)
    assert result.code == 0, result.err
    found = re.search(r"submitted two as job (\d+)", result.out)
    assert found
    assert f"squeue --job {found[1]}" in result.out
    assert f"scancel {found[1]}" in result.out
    return int(found[1])


def check_success(directory: Path, job_id: int) -> None:
    """All four ranks made steps, and node 0 has it all."""
    run = directory / "runs" / "two" / f"slurm-{job_id}"
    comparison = json.loads((run / "comparison.json").read_text())
    (variant,) = comparison["variants"]
    assert variant["status"] == "ok"
    assert variant["devices"] == ["cpu:0@0", "cpu:1@0", "cpu:0@1", "cpu:1@1"]
    assert [rank["rank"] for rank in variant["ranks"] if rank["step_ms"]] == [0, 1, 2, 3]
    assert "node 1 of 2" in (directory / f"slurm-{job_id}.out").read_text()


def test_a_job_runs_another_fails_and_one_is_cancelled(tmp_path: Path, slurm: SlurmCluster) -> None:
    # Side by side: most of a job's time it waits for Slurm.
    directories = {name: tmp_path / name for name in ("cancelled", "failed", "ok")}
    for directory in directories.values():
        directory.mkdir()
    endless = submitted(directories["cancelled"], slurm, "time.sleep(60)")
    failing = submitted(directories["failed"], slurm, "assert rank != 1 or step < 5, 'no such thing'")
    fine = submitted(directories["ok"], slurm, "pass", devices=2)

    deadline = time.monotonic() + JOB_S
    while len(list(directories["cancelled"].glob("began-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    slurm.run("scancel", str(endless))
    slurm.await_state(failing, "FAILED", JOB_S)
    slurm.await_state(fine, "COMPLETED", JOB_S)
    slurm.await_state(endless, "CANCELLED", JOB_S)
    for job_id in (endless, failing, fine):
        slurm.await_over(job_id, JOB_S)
    check_success(directories["ok"], fine)
    said = (directories["failed"] / f"slurm-{failing}.out").read_text()
    assert "rank 1 raised AssertionError: no such thing" in said
