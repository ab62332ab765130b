"""Unchanged programs on GPUs: without `set_device`, with loader workers, skipped steps, graphs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import Devices, Report
from tests.integration.command import gpurun, write

COMMON = """
    import os, sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    layers = torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        return loss
"""
NO_SET_DEVICE = """
    for _ in range(60):
        step(torch.randn(512, 256))
"""
WORKERS = """
    data = TensorDataset(torch.randn(640, 256))
    for epoch in range(3):
        for (x,) in DataLoader(data, batch_size=32, num_workers=2):
            step(x)
        with torch.no_grad():
            for (x,) in DataLoader(data, batch_size=32, num_workers=2):
                model(x.to(device))
"""
SKIPPED = """
    scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
    for number in range(60):
        optimizer.zero_grad()
        factor = float("inf") if number == 5 else 1.0
        scaler.scale(model(torch.randn(32, 256, device=device)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
"""
GRAPH = """
    x = torch.randn(512, 256, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.device(device), torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    import gpurun
    for _ in range(60):
        with gpurun.step():
            graph.replay()
    assert loss.isfinite()
"""


def measured(folder: Path, body: str, devices: Devices) -> list[list[dict[str, Any]]]:
    """The steps that each rank recorded."""
    write(folder, "train.py", COMMON + body)
    devices_value = devices.first(devices.count)
    write(folder, "job.yaml", f"script: train.py\ndevices: {devices_value}\nprofile: {{steps: 2}}\n")
    result = gpurun(folder, "job.yaml", "--out", "run")
    assert result.code == 0, result.err
    (variant,) = [path for path in (folder / "run/variants").iterdir() if path.is_dir()]
    files = [variant / f"rank{rank}.jsonl" for rank in range(devices.count)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def timed_ms(steps: list[dict[str, Any]]) -> list[float]:
    return [step["step_ns"] / 1e6 for step in steps if step["kind"] == "timed"]


def test_a_program_without_set_device(devices: Devices, report: Report, tmp_path: Path) -> None:
    """Ranks above 0 aren't timed on GPU 0: their memory is their own GPU's, their steps take as long."""
    ranks = measured(tmp_path, NO_SET_DEVICE, devices)
    for rank, steps in enumerate(ranks):
        times_ms = timed_ms(steps)
        mean_ms = sum(times_ms) / len(times_ms)
        report.found(f"no set_device, rank {rank}", f"{len(times_ms)} timed, {mean_ms:.3f} ms")
        assert all(step["peak_bytes"] for step in steps)


def test_loader_workers_over_three_epochs(devices: Devices, report: Report, tmp_path: Path) -> None:
    """Workers are forked after steps have begun, from processes that have events in flight."""
    ranks = measured(tmp_path, WORKERS, devices)
    report.found("loader workers", f"{[len(steps) for steps in ranks]} steps of 60")
    assert all(len(steps) == 59 for steps in ranks)


def test_a_skipped_step(devices: Devices, report: Report, tmp_path: Path) -> None:
    ranks = measured(tmp_path, SKIPPED, devices)
    assert all([step["kind"] for step in steps].count("skipped") == 1 for steps in ranks)


def test_a_captured_graph(devices: Devices, report: Report, tmp_path: Path) -> None:
    if not devices.is_gpu:
        pytest.skip("a CPU captures no graph")
    ranks = measured(tmp_path, GRAPH, devices)
    report.found("graph replays", f"{[len(timed_ms(steps)) for steps in ranks]} timed")
    assert all(timed_ms(steps) for steps in ranks)
