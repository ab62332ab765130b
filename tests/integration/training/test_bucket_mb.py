"""`bucket_mb` arrives at DistributedDataParallel, with real processes."""

import re
from pathlib import Path

from tests.integration.command import gpurun, write

JOB = """
    workload: job.py:build
    devices: cpu:2
    global_batch: 4
    compare: {bucket_mb: [1, 25, 100]}
    steps: {warmup: 15, rounds: 2, launches: 1}
    profile: {steps: 0}
    gradient_check: false
"""

WORKLOAD = """
    import gc

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from gpurun import Workload


    class Loss:
        steps = 0

        def __call__(self, outputs, targets):
            self.steps += 1
            if self.steps == 14:  # DDP logs its tenth step; it makes its buckets in the second
                (found,) = (one for one in gc.get_objects() if isinstance(one, DistributedDataParallel))
                data = found._get_ddp_logging_data()
                print(f"cap {data['bucket_cap_bytes']} sizes {data['rebuilt_bucket_sizes']}", flush=True)
            return ((outputs - targets) ** 2).mean()


    def batch(size, generator):
        return torch.randn(size, 512, generator=generator), torch.randn(size, 512, generator=generator)


    def build():
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))  # 8 MiB
        return Workload(model, batch, Loss())
"""


def buckets(directory: Path, variant: str) -> tuple[int, int]:
    """Bytes that a bucket may have, and the number of buckets, as DDP logs them on rank 0."""
    (log,) = directory.glob(f"run/launches/*{variant}/log/rank0.log")
    found = re.search(r"cap (\d+) sizes (.+)", log.read_text())
    assert found, log.read_text()
    return int(found[1]), len(found[2].split(","))


def test_buckets_have_the_size_that_the_job_gives_them(tmp_path: Path) -> None:
    write(tmp_path, "job.py", WORKLOAD)
    write(tmp_path, "job.yaml", JOB)
    result = gpurun(tmp_path, "job.yaml", "--out", "run")
    assert result.code == 0, result.err
    small, default, large = (buckets(tmp_path, f"bucket_mb-{mib}") for mib in (1, 25, 100))
    assert small[0] == 1 << 20
    assert small[1] > 4
    assert default == (25 << 20, 2)  # as without a size: the first bucket is small
    assert large == (100 << 20, 1)
    assert {v["varied"]["bucket_mb"] for v in result.comparison["variants"]} == {1, 25, 100}
