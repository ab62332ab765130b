"""`gpurun improve` on the workload of a job file: what helps is found, proven and written into the job."""

from pathlib import Path

import pytest

from tests.integration.command import gpurun, write
from tests.integration.improve.test_improve import git, row

SLOW = """
import time, torch
from gpurun import Workload

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((8,), index / 4000), torch.zeros(1)

def build():
    return Workload(torch.nn.Linear(8, 1), loss=torch.nn.functional.mse_loss, dataset=Slow())
"""
JOB = "workload: train.py:build  # slow\r\ndevices: cpu:2\r\nglobal_batch: 16\r\ncompare: {}\r\n"


@pytest.mark.slow
def test_workers_are_kept_proven_and_written_into_the_job(tmp_path: Path) -> None:
    """Waiting for data takes most of a step: workers help, whatever else runs on the machine."""
    write(tmp_path, "train.py", SLOW)
    (tmp_path / "job.yaml").write_bytes(JOB.encode())
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "before")
    line = ("improve", "job.yaml", "--budget", "100s", "--out", "found", "--json")
    found = gpurun(tmp_path, *line, timeout_s=400).ended().json["improve"]
    workers = next(each for each in found["remedies"] if each["verdict"] == "kept")
    assert workers["code"].startswith("workers: ")
    assert (workers["applied_to"], workers["place"]) == ("workers", "job.yaml")
    assert workers["ci"][1] < 0
    assert found["gain"]["ci"][0] <= found["gain"]["percent"] <= found["gain"]["ci"][1] < 0
    assert row(found, "optimizer: fused")["verdict"] != "failed"

    said = gpurun(tmp_path, "improve", "--resume", "found").ended()  # measures nothing
    assert said.out.startswith("Faster ")
    assert "less time per step than job.yaml as it is" in said.out
    assert "1 of 3" not in said.err
    gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended()
    written = (tmp_path / "job.yaml").read_bytes().decode()
    assert written == JOB.replace("16\r\n", f"16\r\n{workers['code']}\r\n")
    again = gpurun(tmp_path, "improve", "--resume", "found", "--write", "--yes").ended()
    assert "no file is changed: the change has been written already" in again.err


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("workload: mlp\nglobal_batch: 8\ncompare: {strategy: [ddp, dp]}\n",
         "starts from one setting: remove `compare` (strategy), or take what the job says above it: "
         "--set compare=null"),
        ("workload: mlp\nglobal_batch: max\n", "needs a number for `global_batch`"),
        ("workload: matmul\n", "matmul is a micro-benchmark, which trains nothing"),
    ],
    ids=["compares", "max", "micro-benchmark"],
)  # fmt: skip
def test_a_job_that_cant_be_improved_is_refused_in_a_line(tmp_path: Path, job: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(job)
    assert said in gpurun(tmp_path, "improve", "job.yaml", "--devices", "cpu:2").ended(2).err
