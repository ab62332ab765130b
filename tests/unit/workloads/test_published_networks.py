"""The networks of Shi et al. 2016 and of today have the parameters and operations that are published."""

from pathlib import Path

import pytest
import torch
from torch import nn

from gpurun import Workload
from gpurun.launcher.jobfile.kinds import default_batch
from gpurun.launcher.worker.training.load_workload import load_workload
from gpurun.launcher.worker.training.try_out import Counting
from gpurun.workloads.classics import Bottleneck
from gpurun.workloads.gpt import corpus
from tests.whole import first

CLASSICS = {
    "fcn_s": (117_997_696, 64, 38.3),
    "alexnet_s": (62_378_344, 16, 105.6),
    "resnet50": (25_557_032, 16, 366.6),
    "fcn_r": (14_205_962, 1024, 83.9),
    "alexnet_r": (85_098, 1024, 60.9),
    "resnet56": (855_050, 128, 96.3),
    "lstm": (6_182_672, 128, 88.7),
}
"""Parameters, batch, and GFLOP of forward and backward per batch."""


def on_meta(name: str, **params: object) -> Workload:
    """A workload whose weights take no memory and no time."""
    corpus()  # the text must not be read onto the meta device
    with torch.device("cpu" if name == "lstm" else "meta"):  # an LSTM on meta makes torch import for seconds
        workload = load_workload(name, params, Path())
    assert isinstance(workload, Workload)
    return workload


def num_parameters(workload: Workload) -> int:
    return sum(parameter.numel() for parameter in workload.model.parameters())


@pytest.mark.parametrize("name", CLASSICS)
def test_classics_are_as_published(name: str) -> None:
    parameters, batch, _ = CLASSICS[name]
    assert num_parameters(on_meta(name)) == parameters
    assert default_batch(name) == batch


@pytest.mark.parametrize("name", first(2, [name for name in CLASSICS if name != "lstm"]))
def test_a_step_of_a_classic_takes_the_published_operations(name: str) -> None:
    workload = on_meta(name)
    first = next(workload.model.parameters())
    assert workload.batch is not None
    assert workload.loss is not None
    inputs, targets = workload.batch(2, torch.Generator().manual_seed(0))
    with Counting() as counting:
        workload.loss(workload.model(inputs.to(first.device)), targets.to(first.device)).backward()
    assert counting.count.known_flops is not None
    assert counting.count.known_flops / 2 * CLASSICS[name][1] / 1e9 == pytest.approx(
        CLASSICS[name][2], abs=0.06
    )


def test_a_step_of_the_lstm_takes_the_published_operations() -> None:
    workload = load_workload("lstm", {}, Path())  # on the CPU, whose recurrent operator needs our formula
    assert isinstance(workload, Workload)
    assert workload.batch is not None
    assert workload.loss is not None
    inputs, targets = workload.batch(2, torch.Generator().manual_seed(0))
    with Counting() as counting:
        workload.loss(workload.model(inputs), targets).backward()
    assert (counting.count.known_flops or 0) / 2 * 128 / 1e9 == pytest.approx(88.7, abs=0.06)


@pytest.mark.parametrize(
    ("name", "params", "parameters"),
    [
        ("gpt", {"preset": "124M"}, 124_439_808),
        ("gpt", {}, 3_323_392),
        ("vit_b16", {}, 86_567_656),
        ("resnet50", {"version": 1.5}, 25_557_032),
    ],
)
def test_modern_networks_have_their_parameters(name: str, params: dict[str, object], parameters: int) -> None:
    assert num_parameters(on_meta(name, **params)) == parameters


def test_versions_of_resnet_differ_in_where_the_stride_is() -> None:
    for version, strides in ((1.0, [2, 1, 1]), (1.5, [1, 2, 1])):
        layers = Bottleneck(256, 128, 2, version).residual
        assert [layer.stride[0] for layer in layers if isinstance(layer, nn.Conv2d)] == strides


def test_images_become_classes_in_the_vision_transformer() -> None:
    assert on_meta("vit_b16").model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_gradients_of_the_vision_transformer_lie_in_memory_as_its_parameters() -> None:
    model = on_meta("vit_b16").model  # else DDP copies them, and torch warns
    model(torch.zeros(1, 3, 224, 224, device="meta")).sum().backward()
    strides = {
        name: (p.stride(), p.grad.stride()) for name, p in model.named_parameters() if p.grad is not None
    }
    assert {name for name, (own, gradient) in strides.items() if own != gradient} == set()
    assert "class_token" in strides


def test_the_last_layer_gives_logits() -> None:
    *_, last = on_meta("fcn_r").model.children()
    assert isinstance(last, nn.Linear)
