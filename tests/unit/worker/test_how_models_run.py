"""`compile`, `channels_last`, `threads` and several workloads: from the job to the model."""

import math
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets an environment variable
from torch import nn

from gpurun.launcher.compare.build import compare_run
from gpurun.launcher.compare.headline import is_one_task
from gpurun.launcher.errors import SpecError
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.plan.model import Plan
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.report.terminal.table import render_table
from gpurun.launcher.rundir.files import RunDir, append_lines, write_json
from gpurun.launcher.rundir.records import StepRecord, VariantConfig, VariantStatus
from gpurun.launcher.worker import profiling
from gpurun.launcher.worker.accelerators.cuda import CudaRuntime
from gpurun.launcher.worker.base.failure import UserError
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.training import gradient_check
from gpurun.launcher.worker.training.batches import IndexFeed, check_samples
from gpurun.launcher.worker.training.gradient_check import check_gradients, model_warnings, unused_notes
from gpurun.launcher.worker.training.load_workload import shown
from gpurun.launcher.worker.training.trainer import Trainer, compile_in_place, compile_threads
from gpurun.launcher.worker.training.try_out import has_batch_norm, statistics_apart
from tests.launches import launch_config
from tests.said import notes_of
from tests.unit.plan.machines import FakeGpu, FakeMachine, planned, spec_of
from tests.unit.workloads.loaded import loaded
from tests.wording import Wording


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan_of(text: str, machine: FakeMachine | None = None) -> Plan:
    return build_plan(spec_of(text), machine or FakeMachine(cpu_cores=4))


def configs(text: str) -> list[LaunchConfig]:
    plan, found = planned(spec_of(text), FakeMachine(cpu_cores=4))
    return [config for config, launch in zip(found, plan.launches, strict=True) if launch.repetition == 0]


def test_what_varies_reaches_the_worker_in_processes_of_its_own() -> None:
    found = configs(
        "workload: resnet56\ndevices: cpu:2\n"
        "compare: {channels_last: [false, true], compile: [false, true], threads: [1, auto], "
        "split: [even, '3:1']}\n"
    )
    kinds = {(config.channels_last, config.compile, config.threads) for config in found}
    assert len(found) == len(kinds) == 8
    assert {threads for *_, threads in kinds} == {1, 2}
    assert all(len(config.variants) == 2 for config in found)  # splits share processes


def test_threads_that_come_to_the_same_are_measured_once() -> None:
    plan = plan_of("workload: lstm\ndevices: cpu:4\ncompare: {threads: [1, auto]}\n")
    assert [variant.threads for variant in plan.variants] == [1]


def test_names_say_what_varies_and_a_baseline_may_ask_for_it() -> None:
    plan = plan_of(
        "workload: lstm\ndevices: cpu:1\ncompare: {compile: [false, true]}\nbaseline: {compile: true}\n"
    )
    assert [variant.id for variant in plan.variants] == [
        "ddp-1-even-compile-false",
        "ddp-1-even-compile-true",
    ]
    assert plan.baseline == "ddp-1-even-compile-true"
    assert {launch.group for launch in plan.launches} == {"ddp-1-compile-false", "ddp-1-compile-true"}


def test_what_cannot_be_is_left_out_with_its_reason(wording: Wording) -> None:
    plan = plan_of("workload: lstm\ndevices: cpu:2\ncompile: true\ncompare: {strategy: [ddp, dp]}\n")
    assert [variant.strategy for variant in plan.variants] == ["ddp"]
    wording(plan.left_out[0].reason)
    machine = FakeMachine(gpus=(FakeGpu("GPU-0"),))
    with wording.raises(SpecError):
        plan_of("workload: lstm\ndevices: cuda\nthreads: 2\n", machine)


def test_each_workload_has_its_own_batch_unless_the_job_has_one() -> None:
    text = "workload: lstm\ndevices: cpu:1\ncompare: {workload: [lstm, fcn_r]}\n"
    assert [v.global_batch for v in plan_of(text).variants] == [128, 1024]
    assert [v.global_batch for v in plan_of(f"{text}global_batch: 6\n").variants] == [6, 6]
    assert [config.workload for config in configs(text)] == ["lstm", "fcn_r"]


def test_workloads_are_not_compared_with_each_other(tmp_path: Path, wording: Wording) -> None:
    plan = plan_of(
        "workload: lstm\ndevices: cpu:1\ncompare: {workload: [lstm, fcn_r]}\nsteps: {launches: 1}\n"
    )
    run = RunDir(tmp_path)
    write_json(run.plan, plan)
    for variant, launch in zip(plan.variants, plan.launches, strict=True):
        steps = [StepRecord(launch.id, n, 0, 0, "timed", 10**7, {}, None, 3 * 10**6) for n in range(1, 9)]
        append_lines(run.steps(variant.id, 0), steps)
        write_json(run.status(variant.id), VariantStatus("ok"))
    comparison = compare_run(run)
    assert not is_one_task(plan)
    assert comparison.fastest is None
    assert comparison.variants[1].vs_baseline is None
    assert comparison.variants[1].samples_per_s == pytest.approx(102_400)
    wording(comparison.headline)
    assert "of its step; 1 other variant likewise: these times depend on other load." in "".join(
        notes_of(comparison)
    )
    assert comparison.findings[0].text in render_table(comparison, 100, True)


def config(split: tuple[int, ...], **changes: object) -> LaunchConfig:
    return launch_config(VariantConfig("v", split, 1), **{"strategy": "dp", "precision": "fp64", **changes})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("alexnet_r", {}),
        ("lstm", {"length": 3}),
        ("gpt", {"preset": "tiny", "layers": 1, "width": 16, "context": 8}),
    ],
)
def test_any_split_of_a_new_workload_has_the_gradient_of_one_device(
    name: str, params: dict[str, object]
) -> None:
    workload = loaded(name, params)
    launch = config((5, 3))
    trainer = Trainer(workload, launch, 0)
    assert check_gradients(trainer, launch, 0)["v"]["gradient_error"] < 1e-12
    assert trainer.trial.flops_per_sample is not None
    assert trainer.trial.bytes_per_sample > 0


@pytest.mark.parametrize(("shape", "is_said"), [((7, 4, 3), True), ((7, 3), False), ((7,), False)])
def test_samples_that_come_second_are_put_first(shape: tuple[int, ...], is_said: bool) -> None:
    with pytest.raises(UserError) as wrong:
        check_samples("inputs", torch.zeros(shape), 4, "batch(4, generator)", None)
    assert ("put samples first, and transpose in the model" in str(wrong.value)) is is_said


def test_a_batch_of_numpy_arrays_has_no_tensors() -> None:
    with pytest.raises(UserError) as refused:
        check_samples("inputs", torch.zeros(4, 2).numpy(), 4, "batch(4, generator)", None)
    said = str(refused.value)
    assert "batch(4, generator) has no tensors" in said
    assert "inputs of type ndarray" in said
    assert "torch.from_numpy" in said


def test_a_value_is_shown_in_one_line_that_names_its_class_once() -> None:
    adam = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    assert [shown(value) for value in (adam, 3)] == ["an object of Adam", "int 3"]


def test_a_model_with_batch_norm_is_distinguished() -> None:
    trainer = Trainer(loaded("resnet56", {}), config((2, 1), channels_last=True, precision="fp32"), 0)
    (warning,) = model_warnings(trainer)
    assert warning.startswith("the model has BatchNorm")
    step = trainer.prepare(VariantConfig("v", (2, 1), 1), 0).load()
    assert step.micro_batches[0].inputs.is_contiguous(memory_format=torch.channels_last)
    convolution = next(m for m in trainer.model.modules() if isinstance(m, nn.Conv2d) and m.in_channels > 3)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_of_a_model_without_images_is_reported() -> None:
    trainer = Trainer(loaded("mlp", {"width": 4}), config((2, 1), channels_last=True), 0)
    assert "changes nothing" in model_warnings(trainer)[0]


@pytest.mark.parametrize("unused", [("head.bias",), ("head.weight", "head.bias")])
def test_an_option_of_ddp_that_a_loop_of_ones_own_needs_is_named(
    unused: tuple[str, ...], wording: Wording
) -> None:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    trial = SimpleNamespace(unused=unused)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(model=wrapped), trial=trial)
    vars(wrapped)["find_unused_parameters"] = True
    wording(*unused_notes(trainer))
    vars(wrapped)["find_unused_parameters"] = False  # with `static_graph`, or where all are used
    assert unused_notes(trainer) == []


def test_every_shape_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, object] = {}
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: said.update(how))
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    monkeypatch.setattr(torch._dynamo.config, limit, 8)
    compile_in_place(nn.Linear(1, 1), 5)
    assert said == {"dynamic": False}
    assert getattr(torch._dynamo.config, limit) == 20


@pytest.mark.parametrize(
    ("device", "cores", "share", "num"),
    [("cpu", 64, 32, 1), ("cuda", 64, 8, 8), ("cuda", 8, 8, 8), ("cuda", 2, 1, 1), ("cuda", 512, 512, 32)],
)
def test_gpus_leave_the_cores_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, share: int, num: int
) -> None:
    """With `bind: cores`, the rank's own cores are its share already."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert compile_threads(torch.device(device), share) == num


class Torch26Dynamo:
    """`torch._dynamo.config` of torch 2.6, as far as it is used."""

    cache_size_limit = 8


class Torch26ProfilerConfig:
    """`_ExperimentalConfig` of torch 2.6, by its signature."""

    def __init__(self, verbose: bool = False, enable_cuda_sync_events: bool = False) -> None: ...


def compile_five() -> bool:
    compile_in_place(nn.Linear(1, 1), 5)
    return Torch26Dynamo.cache_size_limit == 20


def allow_tf32() -> bool:
    CudaRuntime().allow_tf32(True)
    return bool(torch.backends.cuda.matmul.allow_tf32)


@pytest.mark.parametrize(
    ("name", "older", "works"),
    [
        ("torch._dynamo.config", Torch26Dynamo, compile_five),
        (
            f"{profiling.__name__}._ExperimentalConfig",
            Torch26ProfilerConfig,
            lambda: isinstance(profiling._experimental_config(all_threads=True), Torch26ProfilerConfig),
        ),
        ("torch.backends.cuda.matmul", SimpleNamespace(allow_tf32=False), allow_tf32),
        ("torch._C._distributed_c10d._dump_fr_trace_json", None, lambda: profiling.collective_calls(0) == []),
    ],
)
def test_what_torch_26_lacks_is_done_without(
    monkeypatch: pytest.MonkeyPatch, name: str, older: object, works: Callable[[], bool]
) -> None:
    """All that torch 2.6 has otherwise, but for its store; found by running the tests of training with it."""
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # put back afterwards
    if older is None:
        monkeypatch.delattr(name, raising=False)
    else:
        monkeypatch.setattr(name, older)
    assert works()


def test_sync_batch_norm_waits_for_no_rank_where_a_device_computes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    expected = nn.BatchNorm1d(3)(inputs)
    model = nn.Sequential(nn.SyncBatchNorm(3))
    assert has_batch_norm(model)  # without a process group it is one like others
    # A CPU counts as the kind of device that synchronizes; there is no group to ask, so torch would fail.
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="process group"):
        model(inputs)
    with statistics_apart(model):
        torch.testing.assert_close(model(inputs), expected)
    assert model[0].process_group is None
    assert not has_batch_norm(model)
    assert has_batch_norm(nn.Sequential(model, nn.BatchNorm1d(3)))


@pytest.mark.parametrize(
    ("error", "warns"), [(None, False), (1e-9, False), (0.5, True), (math.nan, True), (math.inf, True)]
)
def test_only_gradients_that_agree_pass(
    error: float | None, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_check, "model_warnings", lambda trainer: [])
    monkeypatch.setattr(gradient_check, "likely_reason", lambda *given: "its loss")
    trainer = Mock(precision=PRECISIONS["fp32"], strategy=Mock(compression=None))
    found = gradient_check.warnings(trainer, error, Mock())
    assert (found["gradient_warning"] is not None) == warns


def test_each_epoch_has_an_order_of_its_own_and_all_samples() -> None:
    feed = IndexFeed(8, seed=1, devices=(0,))
    first, second = ([feed.global_indices(4, step) for step in steps] for steps in ((0, 1), (2, 3)))
    assert first != second
    assert all(sorted(chain(*epoch)) == list(range(8)) for epoch in (first, second))
