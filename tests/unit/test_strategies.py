"""Strategies and kinds of job are one table each; an unknown name is an error wherever it enters."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.model import Comparison
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.kinds import JOB_KINDS, workload_kind
from gpurun.launcher.jobfile.load import load_job
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.strategies import IN_JOBS, STRATEGIES, strategy_named
from gpurun.launcher.worker.strategies.base import Hints, blocks_of, strategy_of
from gpurun.workloads.registry import BUILTINS
from tests.unit.plan import machines
from tests.unit.plan.machines import FakeMachine
from tests.wording import Wording

JOB = "workload: gpt\nglobal_batch: 8\ndevices: cpu:2\n"
UNKNOWN = "fsdpp"


@pytest.mark.parametrize(
    ("more", "overrides", "place"),
    [
        (f"strategy: {UNKNOWN}\n", (), "job.yaml:4:11"),
        ("strategy: script\n", (), "job.yaml:4:11"),  # of programs
        (f"compare: {{strategy: [ddp, {UNKNOWN}]}}\n", (), "job.yaml:4:27"),
        (f"baseline: {{strategy: {UNKNOWN}}}\n", (), "job.yaml:4:22"),
        ("", (f"strategy={UNKNOWN}",), "--set strategy"),
        ("", (f"compare.strategy=[{UNKNOWN}]",), "--set compare.strategy"),
    ],
)
def test_a_job_names_no_unknown_strategy(
    tmp_path: Path, more: str, overrides: tuple[str, ...], place: str, wording: Wording
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB + more)
    with pytest.raises(SpecError) as caught:
        load_job(path, overrides)
    assert place in str(caught.value)
    wording(str(caught.value))


def planned(tmp_path: Path) -> tuple[Plan, LaunchConfig]:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    plan, configs = machines.planned(load_job(path), FakeMachine())
    return plan, configs[0]


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (Plan, "ddp", UNKNOWN),
        (LaunchConfig, "ddp", UNKNOWN),
        (Plan, "cpu:0", "tpu:0"),
        (Plan, "fp32", "fp99"),
        (Plan, "gpt", "gptt"),
    ],
)
def test_no_file_of_a_run_is_read_back_with_a_name_that_no_table_has(
    tmp_path: Path, kind: type, old: str, new: str, wording: Wording
) -> None:
    plan, config = planned(tmp_path)
    path = tmp_path / "file.json"
    write_json(path, plan if kind is Plan else config)
    assert read_json(path, kind)
    path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))
    with wording.raises(MachineError):
        read_json(path, kind)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": UNKNOWN},
        {"compare": {"strategy": ["ddp", UNKNOWN]}},
        {"baseline": {"strategy": UNKNOWN}},
        {"precision": "fp99"},
        {"comm_hook": "zip"},
        {"workload": "gptt"},
        {"devices": "tpu:2"},
        {"devices": ["cuda:0", "tpu:1"]},
        {"compare": 3},
        {"strategy": ["ddp"]},
    ],
)
def test_no_recorded_job_has_a_name_that_no_table_has(
    tmp_path: Path, changes: dict[str, Any], wording: Wording
) -> None:
    plan, _ = planned(tmp_path)
    run = RunDir(tmp_path)
    job = load_job(tmp_path / "job.yaml").resolved()
    write_json(run.plan, plan)
    write_json(run.spec, job)
    assert compare_run(run).job == json.loads(run.spec.read_text())
    write_json(run.spec, job | changes)
    with wording.raises(MachineError):
        compare_run(run)


def test_no_comparison_is_read_back_with_an_unknown_strategy(tmp_path: Path, wording: Wording) -> None:
    plan, _ = planned(tmp_path)
    run = RunDir(tmp_path)
    write_json(run.plan, plan)
    write_json(run.comparison, compare_run(run))
    assert read_json(run.comparison, Comparison)
    run.comparison.write_text(run.comparison.read_text().replace('"ddp"', f'"{UNKNOWN}"'))
    with wording.raises(MachineError):
        read_json(run.comparison, Comparison)


def test_the_worker_refuses_an_unknown_strategy(tmp_path: Path, wording: Wording) -> None:
    _, config = planned(tmp_path)
    with wording.raises(ValueError):
        replace(config, strategy=UNKNOWN)
    object.__setattr__(config, "strategy", UNKNOWN)  # as if nothing had checked it
    with wording.raises(ValueError):
        strategy_of(None, config, 0, Hints())  # type: ignore[arg-type]


def test_a_plan_has_no_unknown_strategy(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    with wording.raises(ValueError):
        build_plan(replace(load_job(path), strategy=UNKNOWN), FakeMachine())


def test_every_strategy_of_jobs_has_a_class() -> None:
    for name in IN_JOBS:
        module, _, class_name = STRATEGIES[name].worker.partition(":")
        assert callable(getattr(importlib.import_module(module), class_name).of)
        assert strategy_named(name).summary


def test_every_built_in_workload_is_of_a_known_kind() -> None:
    assert {builtin.kind for builtin in BUILTINS.values()} <= JOB_KINDS.keys()
    assert all(workload_kind(name).name == builtin.kind for name, builtin in BUILTINS.items())
    assert all(set(builtin.strategies) <= set(IN_JOBS) for builtin in BUILTINS.values())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(2, 3), nn.Embedding(2, 3)])
        self.layers = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.Sequential(Layer()), nn.ReLU())


def test_what_repeats_is_sharded_layer_by_layer() -> None:
    body = Body()
    whole = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"body": body}), nn.Linear(3, 1))
    layers = [module for module in body.modules() if isinstance(module, Layer)]
    assert blocks_of(body) == layers
    assert blocks_of(nn.Sequential(body)) == layers  # one level further down
    assert blocks_of(whole) == [whole[0], whole[2]]  # what is next to each other at the top
    assert blocks_of(whole, [Layer]) == layers
    assert blocks_of(nn.LSTM(2, 2)) == []
    layers[0].one.weight = layers[1].one.weight
    assert blocks_of(body) == []


@pytest.mark.slow
def test_a_rank_of_ddp_does_not_import_what_zero_needs() -> None:
    """torch/distributed/optim compiles optimizers when it is imported, which takes each rank 0.4 s of CPU."""
    code = "import sys, gpurun.launcher.worker.strategies.{}; print('torch.distributed.optim' in sys.modules)"
    found = {
        name: subprocess.run(
            [sys.executable, "-c", code.format(name)], capture_output=True, text=True, check=True
        ).stdout
        for name in ("ddp", "zero1")
    }
    assert found == {"ddp": "False\n", "zero1": "True\n"}
