"""The built-in workloads: real text, known durations, and finite gradients."""

import itertools
import sysconfig
from pathlib import Path

import pytest
import torch

from gpurun import Workload, device_index, on_device
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.workloads.gpt import corpus, random_windows
from gpurun.workloads.registry import BUILTINS
from gpurun.workloads.sleep import Sleep

SMALL = {"gpt": {"layers": 1, "width": 16, "heads": 2, "context": 8}, "mlp": {"width": 8}, "sleep": {}}
TRAINING = sorted(name for name, builtin in BUILTINS.items() if builtin.kind == "training")
LARGE = {"fcn_s", "alexnet_s", "vit_b16", "resnet50"}
"""Tens of millions of parameters: their shapes are checked on the meta device, which holds nothing."""


@pytest.mark.parametrize("name", [name for name in TRAINING if name not in LARGE])
def test_every_builtin_trains(name: str, tmp_path: Path) -> None:
    workload = load_workload(name, SMALL.get(name, {}), tmp_path)
    assert isinstance(workload, Workload)
    assert workload.batch is not None
    assert workload.loss is not None
    inputs, targets = workload.batch(5, torch.Generator().manual_seed(0))
    workload.loss(workload.model(inputs), targets).backward()
    gradients = [parameter.grad for parameter in workload.model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert any(gradient is not None and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", [name for name in TRAINING if name not in LARGE])
def test_a_batch_depends_on_its_generator_alone(name: str, tmp_path: Path) -> None:
    workload = load_workload(name, SMALL.get(name, {}), tmp_path)
    assert isinstance(workload, Workload)
    assert workload.batch is not None
    torch.manual_seed(1)
    first = workload.batch(3, torch.Generator().manual_seed(7))
    torch.manual_seed(2)
    again = workload.batch(3, torch.Generator().manual_seed(7))
    other = workload.batch(3, torch.Generator().manual_seed(8))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_the_text_is_the_standard_librarys() -> None:
    first = min(Path(sysconfig.get_path("stdlib")).glob("*.py")).read_bytes()
    assert bytes(corpus()[: len(first)].tolist()) == first


def test_targets_of_gpt_are_the_next_bytes(tmp_path: Path) -> None:
    workload = load_workload("gpt", SMALL["gpt"], tmp_path)
    assert isinstance(workload, Workload)
    assert workload.batch is not None
    inputs, targets = workload.batch(4, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_windows_reach_the_end_of_the_text() -> None:
    length = len(corpus())
    assert torch.equal(random_windows(1, length, torch.Generator(), corpus())[0], corpus().long())


def test_gpt_sees_no_future(tmp_path: Path) -> None:
    workload = load_workload("gpt", SMALL["gpt"], tmp_path)
    assert isinstance(workload, Workload)
    model = workload.model
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_sleep_lasts_alpha_plus_beta_b_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("gpurun.workloads.sleep.time.sleep", slept.append)
    model = Sleep([10.0, 20.0], 0.5)
    for index, samples in itertools.product((0, 1), (1, 4)):
        with on_device(index):
            model(torch.zeros(samples, 1))
    assert slept == pytest.approx([0.0105, 0.012, 0.0205, 0.022])
    Sleep(0.0, 0.0)(torch.zeros(4, 1))
    assert len(slept) == 4


def test_sleep_says_when_its_list_is_too_short() -> None:
    with on_device(2), pytest.raises(ValueError, match="times for 2 devices"):
        Sleep([1.0, 2.0], 0.0)(torch.zeros(1, 1))


def test_device_index_comes_back() -> None:
    with on_device(3):
        with on_device(1):
            assert device_index() == 1
        assert device_index() == 3
    assert device_index() == 0
