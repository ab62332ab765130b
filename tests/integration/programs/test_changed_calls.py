"""Calls of torch in a program are changed from outside, and those of libraries aren't."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import Result, ending, gpurun, write

PROGRAM = """
    import json, os
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from library.trainer import loader_of

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 4))
    loaders = [DataLoader(data, 8, False), DataLoader(data, batch_size=8, num_workers=0), loader_of(data)]
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
    dtypes = set()
    network[0].register_forward_hook(lambda *given: dtypes.add(str(given[2].dtype)))
    model = DistributedDataParallel(network, bucket_cap_mb=1)
    dtypes.add(str(model(torch.randn(2, 4)).dtype))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = {
        "workers": [each.num_workers for each in loaders],
        "persistent": [each.persistent_workers for each in loaders],
        "fused": optimizer.defaults["fused"],
        "bucket": model.bucket_bytes_cap >> 20,
        "compiled": model.module._compiled_call_impl is not None,
        "cudnn": torch.backends.cudnn.benchmark,
        "matmul": torch.get_float32_matmul_precision(),
        "hooks": len(model._comm_hooks),
        "dtypes": sorted(dtypes),
    }
    with open(os.path.join(os.environ["GPURUN_LAUNCH_DIR"], f"found{dist.get_rank()}.json"), "w") as file:
        json.dump(found, file)
    for batch, in loaders[0]:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
LIBRARY = """
    from torch.utils.data import DataLoader


    def loader_of(data):
        return DataLoader(data, batch_size=8)
"""
CALLS = {
    "DataLoader": {"num_workers": 1, "persistent_workers": True},
    "DistributedDataParallel": {"bucket_cap_mb": 100},
    "Optimizer": {"fused": True},
    "compile": {"backend": "eager"},
    "cudnn": {"benchmark": True},
    "matmul": {"precision": "high"},
    "autocast": {"dtype": "bfloat16"},
    "comm_hook": {"compress": "fp16"},
}
AS_IT_IS = {
    "workers": [0, 0, 0],
    "persistent": [False, False, False],
    "fused": None,
    "bucket": 1,
    "compiled": False,
    "cudnn": False,
    "matmul": "highest",
    "hooks": 0,
    "dtypes": ["torch.float32"],
}
CHANGED = {
    "workers": [1, 1, 0],
    "persistent": [True, True, False],
    "fused": True,
    "bucket": 100,
    "compiled": True,
    "cudnn": True,
    "matmul": "high",
    "hooks": 1,
    "dtypes": ["torch.bfloat16", "torch.float32"],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Result:
    directory = tmp_path_factory.mktemp("calls")
    write(directory, "train.py", PROGRAM)
    package = directory / "site-packages" / "library"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    write(package, "trainer.py", LIBRARY)
    job: dict[str, Any] = {"script": "train.py", "devices": "cpu:2", "compare": {"calls": [{}, CALLS]}}
    job |= {"env": {"PYTHONPATH": str(package.parent)}, "steps": {"launches": 1}, "profile": {"steps": 0}}
    (directory / "job.yaml").write_text(json.dumps(job))
    return gpurun(directory, "job.yaml", "--out", "run", "--json")


@pytest.mark.parametrize(("number", "expected"), [(0, AS_IT_IS), (1, CHANGED)])
def test_each_call_is_changed_in_the_programs_own_files(
    ran: Result, number: int, expected: dict[str, Any]
) -> None:
    variant = ran.json["variants"][number]
    assert ending(variant) == "ok", ran.err
    (launch,) = (ran.directory / "run" / "launches").glob(f"*-{variant['id']}")
    found = [json.loads(Path(file).read_text()) for file in (launch / "files").glob("found*.json")]
    assert found == [expected, expected]
