"""`gpurun submit` on a real Slurm of two nodes: jobs run, fail, are cancelled, requeued, or out of time."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpurun.launcher.rundir.records import MEASURED
from tests import watcher
from tests.integration.command import gpurun, write
from tests.slurm.cluster import SlurmCluster
from tools.system_packages import without

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason := without("slurm-wlm", "munge")), reason=reason),
]

JOB = """
name: two
script: train.py
devices: cpu:DEVICES
nodes: NODES
profile: {steps: 0}
"""
TRAIN = """
import os, signal, time
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
signal.signal(signal.SIGUSR1, lambda *_: open(f"noticed-{rank}", "w").close())
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
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(watcher.own_directory() / "cluster") as cluster:
        yield cluster


def submitted(
    directory: Path, slurm: SlurmCluster, body: str, *options: str, devices: int = 1, nodes: int | str = 2
) -> int:
    """The id of a job whose program does this in every step, on so many devices of each node."""
    write(directory, "train.py", TRAIN.replace("BODY", body))
    write(directory, "job.yaml", JOB.replace("DEVICES", str(devices)).replace("NODES", str(nodes)))
    result = gpurun(directory, "submit", "job.yaml", "--slurm", *options, env=slurm.env).ended()
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
    assert variant["status"] in MEASURED  # other tests use the cores too
    assert variant["devices"] == ["cpu:0@0", "cpu:1@0", "cpu:0@1", "cpu:1@1"]
    assert [rank["rank"] for rank in variant["ranks"] if rank["step_ms"]] == [0, 1, 2, 3]
    assert "node 1 of 2" in (directory / f"slurm-{job_id}.out").read_text()


def check_limit(directory: Path, job_id: int) -> None:
    """Both ranks were warned, what was measured is kept, and it is said how to continue."""
    assert {path.name for path in directory.glob("noticed-*")} == {"noticed-0", "noticed-1"}
    said = (directory / f"slurm-{job_id}.out").read_text()
    assert "interrupted by SIGTERM" in said
    run = f"runs/two/slurm-{job_id}"
    assert f"start all nodes as before, node 0 with `--resume {run}`" in " ".join(said.split())
    assert f"scontrol requeue {job_id}" in said
    comparison = json.loads((directory / run / "comparison.json").read_text())
    assert not comparison["complete"]
    assert all((directory / run / f"variants/script-2/rank{rank}.jsonl").stat().st_size for rank in (0, 1))


def check_array(directory: Path, job_id: int) -> None:
    """Each element has a run of its own; the one that was queued again has continued it."""
    runs = directory / "runs" / "two"
    names = {path.parent.name: len(list(path.parent.glob("launches/*"))) for path in runs.glob("*/plan.json")}
    assert names == {f"slurm-{job_id}_0": 1, f"slurm-{job_id}_1": 2}
    for name in names:
        comparison = json.loads((runs / name / "comparison.json").read_text())
        assert comparison["complete"], name
        assert (directory / f"{name}.out").exists()


def await_files(directory: Path, pattern: str, number: int) -> None:
    """Returns when there are so many."""
    deadline = time.monotonic() + JOB_S
    while len(list(directory.glob(pattern))) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


IS_FIRST = "os.environ['SLURM_ARRAY_TASK_ID'] == '1' and 'SLURM_RESTART_COUNT' not in os.environ"
WAITS = f"if step == 5 and {IS_FIRST}: open('waits', 'w').close(); time.sleep(60)"
"""Element 1 does, until it is queued again."""
ARRAY = ("--sbatch=--array=0-1", "--sbatch=--nodelist=ci0")
"""On one node, since on another one it would begin a run of its own."""


def test_jobs_end_in_every_way(tmp_path: Path, slurm: SlurmCluster) -> None:
    # Side by side: most of a job's time it waits for Slurm.
    directories = {name: tmp_path / name for name in ("cancelled", "failed", "ok", "limited", "array")}
    for directory in directories.values():
        directory.mkdir()
    limited = submitted(directories["limited"], slurm, "time.sleep(3)", "--time", "9m")
    endless = submitted(directories["cancelled"], slurm, "time.sleep(60)")
    array = submitted(directories["array"], slurm, WAITS, *ARRAY, nodes=1)
    failing = submitted(directories["failed"], slurm, "assert rank != 1 or step < 5, 'no such thing'")
    fine = submitted(directories["ok"], slurm, "pass", devices=2, nodes="2..3")

    await_files(directories["limited"], "began-*", 2)
    slurm.run("scontrol", "update", f"JobId={limited}", "EndTime=now+100")  # Slurm looks every 30 s
    await_files(directories["cancelled"], "began-*", 2)
    slurm.run("scancel", str(endless))
    await_files(directories["array"], "waits", 1)
    slurm.run("scontrol", "requeue", f"{array}_1")
    slurm.await_state(f"{array}_1", "PENDING", JOB_S)
    slurm.run("scontrol", "update", f"JobId={array}_1", "StartTime=now")
    await_files(directories["limited"], "noticed-*", 2)
    slurm.run("scontrol", "update", f"JobId={limited}", "EndTime=now+1")
    slurm.await_state(failing, "FAILED", JOB_S)
    slurm.await_state(fine, "COMPLETED", JOB_S)
    slurm.await_state(endless, "CANCELLED", JOB_S)
    slurm.await_state(limited, "TIMEOUT", JOB_S)
    slurm.await_state(f"{array}_1", "COMPLETED", JOB_S)
    for job_id in (endless, failing, fine, limited, array):
        slurm.await_over(job_id, JOB_S)
    check_success(directories["ok"], fine)
    said = (directories["failed"] / f"slurm-{failing}.out").read_text()
    assert "rank 1 raised AssertionError: " in said
    check_limit(directories["limited"], limited)
    check_array(directories["array"], array)
