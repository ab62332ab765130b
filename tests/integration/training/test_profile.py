"""Captures of `torch.profiler`: the steps asked for, complete files, replicas' threads included."""

import gzip
import json
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profiler as torch_profiler

from gpurun.launcher.errors import MachineError
from gpurun.launcher.rundir.records import ProfileConfig
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.worker.profiling import capture, memory_history, new_profiler
from gpurun.launcher.worker.strategies.dp import CpuDataParallel

SLEEP_S = 0.02


def traced(path: Path, config: ProfileConfig) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    model = CpuDataParallel(nn.Linear(4, 4))
    capture(lambda: model(torch.ones(6, 4), (4, 2)).sum().backward(), config, path, all_threads=True)
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_a_trace_holds_the_steps_and_all_replicas(tmp_path: Path) -> None:
    path = tmp_path / "variants" / "v" / "rank0.pt.trace.json.gz"
    events = traced(path, ProfileConfig(2, shapes=True))
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
    linear = [event for event in events if event.get("name") == "aten::linear"]
    assert steps == {"ProfilerStep#1", "ProfilerStep#2"}
    assert len(linear) == 2 * 2
    assert {tuple(event["args"]["Input Dims"][0]) for event in linear} == {(4, 4), (2, 4)}
    assert list(path.parent.iterdir()) == [path]


class Sleeping(nn.Linear):
    """Waits in its forward pass and in its backward pass, outside of any operator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S)
        input.register_hook(lambda _: time.sleep(SLEEP_S))
        return super().forward(input)


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_sleeping_model_does_not_compute_under_any_strategy(tmp_path: Path, strategy: str) -> None:
    torch.set_num_threads(1)
    model, path = Sleeping(4, 4), tmp_path / "rank0.json.gz"
    replicas = CpuDataParallel(model)

    def step() -> None:
        inputs = torch.ones(6, 4, requires_grad=True)
        outputs = replicas(inputs, (4, 2)) if strategy == "dp" else model(inputs)
        outputs.sum().backward()

    capture(step, ProfileConfig(1), path, all_threads=True)
    (rank,) = analyse_paths([path]).ranks
    assert rank.steps[0].idle_us >= SLEEP_S * 1e6, "of two; replicas don't sleep at the very same time"


def test_a_second_trace_of_a_process_is_no_reason_for_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_profiler, "_warn_once", warnings.warn)
    profiler = new_profiler(ProfileConfig(steps=1), all_threads=False)
    for _ in range(2):  # torch 2.11 warns at the first one too
        profiler.prepare_trace()


def test_a_trace_that_cannot_be_written_says_so_and_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "taken" / "rank0.pt.trace.json.gz"
    (tmp_path / "taken").write_text("a file, not a directory")
    with pytest.raises(MachineError, match="can't write the trace"):
        traced(path, ProfileConfig(1))
    assert (tmp_path / "taken").read_text() == "a file, not a directory"


def test_modules_are_named_where_they_are_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for modules in (False, True):
        path = tmp_path / f"{modules}.json.gz"
        capture(lambda: model(torch.ones(2, 4)).sum().backward(), ProfileConfig(1, modules=modules), path)
        (rank,) = analyse_paths([path]).ranks
        assert [row.name for row in rank.modules] == (["Linear_0"] if modules else [])


def test_ranks_are_aligned_after_the_recording_starts_and_before_the_first_step(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    ones = torch.ones(4)

    def align() -> None:
        ones.sum()

    capture(lambda: None, ProfileConfig(1), path, align=align)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    aligned = [event for event in events if event.get("name") == "aten::sum"]
    (step,) = [event for event in events if event.get("name") == "ProfilerStep#1"]
    assert aligned
    assert all(event["ts"] + event["dur"] <= step["ts"] for event in aligned)


def test_a_memory_snapshot_holds_the_recorded_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake of CUDA's allocator, which records what it was asked for."""
    asked: list[str] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        memory, "_record_memory_history", lambda enabled="all", **_: asked.append(str(enabled))
    )
    monkeypatch.setattr(memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))
    snapshot = tmp_path / "v" / "rank0.memory.pickle"
    with memory_history(snapshot):
        assert asked == ["all"]
    assert asked == ["all", "None"]
    assert [path.name for path in snapshot.parent.iterdir()] == ["rank0.memory.pickle"]
    with memory_history(None):
        assert len(asked) == 2


def test_the_cpu_has_no_memory_snapshot(tmp_path: Path) -> None:
    with memory_history(tmp_path / "none"):
        pass
    assert torch.cuda.is_available() or not list(tmp_path.iterdir())
