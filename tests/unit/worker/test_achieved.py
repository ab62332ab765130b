"""Operations, peaks and energy: counted where they can be, left out where they can't."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpurun.launcher.compare.figures.recorded import MeasuredVariant, Rates, throughput
from gpurun.launcher.machine.accelerators import peak_tflop_per_s, total_peak_flop_per_s
from gpurun.launcher.machine.gpus.gpu import PEAKS
from gpurun.launcher.plan.model import Variant
from gpurun.launcher.rundir.records import StepRecord, VariantFacts, VariantStatus
from gpurun.launcher.worker.training.try_out import Counting


def counted(work: Callable[[], torch.Tensor]) -> int | None:
    with Counting() as counting:
        work().sum().backward()
    flops: int | None = counting.known_flops
    return flops


def test_products_convolutions_attention_and_recurrence_are_counted() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    assert counted(lambda: x @ torch.ones(8, 4)) == 2 * (2 * 2 * 8 * 4)  # forward, and the gradient of x
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    attention = counted(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert attention == 2 * (2 * 4 * 4 * 8) * (2 + 5)  # two products forward, five backward, two heads
    lstm, tokens = nn.LSTM(8, 8, 2), torch.ones(3, 5, 8, requires_grad=True)
    assert counted(lambda: lstm(tokens)[0]) == 3 * (2 * 3 * 5) * (2 * 2 * 4 * 8 * 8)


def test_an_operator_without_a_formula_makes_the_count_unknown() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    assert counted(lambda: torch.fft.fft(x @ torch.ones(4, 4)).abs()) is None
    assert counted(lambda: x * 2) is None  # nothing to count is not zero operations per second


@pytest.mark.parametrize(
    ("name", "precision", "tflop_per_s"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA H100 80GB HBM2e", "bf16", None),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM-64GB", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-PCIE-32GB", "fp16", 112.0),
        ("Tesla T4", "fp16", 65.0),
        ("NVIDIA L4", "tf32", 60.0),
        ("NVIDIA L40S", "tf32", 183.0),
        ("NVIDIA A10", "fp32", 31.2),
        ("NVIDIA A10-24Q", "fp32", None),
        ("NVIDIA A1000", "fp32", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA GH200 144G HBM3e", "tf32", 494.7),
        ("NVIDIA H800", "fp64", 1.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA A30", "tf32", 82.0),
        ("NVIDIA A40", "fp32", 37.4),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("NVIDIA GeForce RTX 4080", "fp32", 48.7),
        ("NVIDIA GeForce RTX 4080 SUPER", "fp32", None),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "tf32", 182.1),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", None),
        ("AMD Instinct MI355X", "bf16", 2516.6),
        ("AMD Instinct MI250X / MI250", "fp32", 47.85),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", "fp32", 45.25),
        ("NVIDIA Unheard-of 9000", "bf16", None),
    ],
)
def test_peaks_by_the_drivers_name(name: str, precision: str, tflop_per_s: float | None) -> None:
    assert peak_tflop_per_s(name, precision) == tflop_per_s


def test_peaks_add_up_and_one_unknown_makes_all_unknown() -> None:
    assert total_peak_flop_per_s(["NVIDIA H200"] * 2, "bf16") == 2 * 989.4e12
    assert total_peak_flop_per_s(["NVIDIA H200", None], "bf16") is None
    assert total_peak_flop_per_s([], "bf16") is None
    assert all(rate > 0 for peak in PEAKS for rate in peak.tflop_per_s.values())


def measured(devices: tuple[str, ...], energy_mj: float | None, flops: float | None) -> MeasuredVariant:
    split = (8,) * len(devices)
    variant = Variant(
        id="v",
        devices=devices,
        split=split,
        split_name="even",
        global_batch=sum(split),
        precision="bf16",
        accumulate=1,
        seed=0,
        varied={},
        workload="gpt",
    )
    steps = {
        rank: [StepRecord("l", 1, 0, i, "timed", 1, {}, None, energy_mj=energy_mj) for i in range(3)]
        for rank in range(len(devices))
    }
    facts = VariantFacts(flops_per_sample=flops, bytes_per_sample=100)
    return MeasuredVariant(variant, "g", VariantStatus("ok"), True, facts, steps, (), {})


HOST: dict[str, Any] = {"gpus": [{"index": i, "name": "NVIDIA H200"} for i in range(2)]}


def test_rates_are_those_of_all_devices() -> None:
    found = throughput(measured(("cuda:0", "cuda:1"), 800.0, 1e12), 10.0, HOST)
    assert found.samples_per_s == 1600
    assert found.flop_per_s == 1.6e15
    assert found.mfu == pytest.approx(1.6e15 / (2 * 989.4e12))
    assert found.input_bytes_per_s == 160_000
    assert found.joules_per_sample == pytest.approx(2 * 0.8 / 16)


def test_a_gpu_that_two_ranks_share_takes_its_energy_once() -> None:
    found = throughput(measured(("cuda:0", "cuda:0"), 800.0, 1e12), 10.0, HOST)
    assert found.joules_per_sample == pytest.approx(0.8 / 16)
    assert found.mfu == pytest.approx(1.6e15 / 989.4e12)


def test_the_job_may_state_the_peak() -> None:
    for devices, host in ((("cuda:0", "cuda:1"), HOST), (("cpu:0", "cpu:1"), {})):
        found = throughput(measured(devices, 800.0, 1e12), 10.0, host, {"bf16": 1000.0})
        assert found.mfu == pytest.approx(1.6e15 / (2 * 1000e12))
        other = throughput(measured(devices, 800.0, 1e12), 10.0, host, {"fp32": 1000.0})
        assert (other.mfu is None) == (not host)


def test_what_is_not_known_is_left_out() -> None:
    found = throughput(measured(("cpu:0",), None, None), 10.0, HOST)
    assert found.samples_per_s == 800
    assert (found.flop_per_s, found.mfu, found.joules_per_sample) == (None, None, None)
    assert throughput(measured(("cpu:0",), None, 1e9), 10.0, {}).mfu is None
    assert throughput(measured(("cpu:0",), None, 1e9), None, {}) == Rates()
