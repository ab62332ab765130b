"""Gradients equal those of the whole batch on one device, for every strategy and split."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and that sets an environment variable
from torch import Tensor, nn
from torch.nn import functional as F

from gpurun import Workload
from gpurun.launcher.rundir.records import BalanceConfig, VariantConfig
from gpurun.launcher.strategies import IN_JOBS
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.training.forward_backward import NoClock
from gpurun.launcher.worker.training.gradient_check import check_gradients
from gpurun.launcher.worker.training.memory_estimate import estimate, estimate_of, refusal
from gpurun.launcher.worker.training.observed import NUM_LOSSES, first_losses
from gpurun.launcher.worker.training.trainer import Trainer
from tests.integration.ranks import run_ranks
from tests.integration.training import gradient_worker as worker
from tests.integration.training import settings_worker
from tests.known import known
from tests.launches import launch_config
from tests.whole import first

NUM_PROCESSES = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes found, by rank."""
    directory = tmp_path_factory.mktemp("gradients")
    run_ranks(worker.__name__, NUM_PROCESSES, directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(NUM_PROCESSES)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What settings do, by rank of two processes."""
    directory = tmp_path_factory.mktemp("settings")
    run_ranks(settings_worker.__name__, 2, directory)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_gradient_is_that_of_the_whole_batch(results: list[dict[str, Any]]) -> None:
    errors = {f"{name} on {rank}": e for rank, found in enumerate(results) for name, e in found.items()}
    errors = {n: error for n, error in errors.items() if isinstance(error, float) and " weights " not in n}
    expected = {
        f"{strategy} {kind} {variant.id}"
        for strategy in IN_JOBS
        for world in ((1,) if strategy == "single" else worker.WORLDS)
        for kind in worker.kinds_of(strategy, world)
        for variant in worker.variants_of(world, strategy, kind)
    }
    assert expected <= {name.rpartition(" on ")[0] for name in errors}
    most = {name: next((most for p, most in worker.SMALLER.items() if p in name), 1e-12) for name in errors}
    assert {name: error for name, error in errors.items() if not error <= most[name]} == {}


def test_steps_lead_to_the_weights_of_a_bare_loop(results: list[dict[str, Any]]) -> None:
    weights = [name for found in results for name in found if " weights " in name]
    assert {name.split()[0] for name in weights} == set(IN_JOBS) - {"single"}
    assert len(weights) >= len(worker.WORLDS) + len(worker.IN_PROCESSES) * sum(worker.WORLDS)
    wrong = {name: e for found in results for name, e in found.items() if " weights " in name and e > 1e-10}
    assert wrong == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_check_compares_weights_where_ranks_share_the_optimizer(
    results: list[dict[str, Any]], rank: int
) -> None:
    checks = results[rank]["weights"]
    for name, found in checks.items():
        for facts in found.values():
            assert (facts["gradient_error"] <= 1e-12, facts["warnings"]) == (True, [])
            is_right = not name.endswith("without steps")
            assert (facts["parameter_error"] <= 1e-10) == is_right
            assert ("after 5 steps differ" in (facts["gradient_warning"] or "")) == (not is_right)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_check_confirms_and_leaves_the_model_alone(results: list[dict[str, Any]], rank: int) -> None:
    checks = results[rank]["checks"]
    for facts in checks["right"].values():
        assert facts["gradient_error"] <= 1e-12
        assert facts["gradient_reference"] == "one device"
        assert facts["warnings"] == []
    assert checks["untouched"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_check_sees_plain_ddps_weights(results: list[dict[str, Any]], rank: int) -> None:
    plain = results[rank]["checks"]["plain"]
    assert plain["even"]["gradient_error"] <= 1e-12
    assert plain["uneven"]["gradient_error"] > 0.1
    assert "isn't a mean" in plain["uneven"]["gradient_warning"]


@pytest.mark.parametrize("rank", [0, 1])
def test_without_memory_for_the_whole_batch_the_baseline_is_the_reference(
    results: list[dict[str, Any]], rank: int
) -> None:
    small = results[rank]["checks"]["small"]
    assert (small["even"]["gradient_error"], small["even"]["gradient_reference"]) == (None, None)
    assert small["uneven"]["gradient_error"] <= 1e-12
    assert small["uneven"]["gradient_reference"] == "even"
    assert all("one device can't hold" in facts["warnings"][0] for facts in small.values())


def test_unsynchronised_steps_can_be_undone(results: list[dict[str, Any]]) -> None:
    ablations = [f"{strategy} on 2" for strategy in worker.IN_PROCESSES]
    for case in (*ablations, "hsdp on 4"):
        found = results[0][f"ablation of {case}"]
        assert found["apart"] > 1e-6
        assert found["restored"] == 0


def test_every_group_gives_a_collective_up_when_the_job_does(results: list[dict[str, Any]]) -> None:
    """torch/distributed/distributed_c10d.py, `new_group`: of itself it gives NCCL 10 min, gloo 30."""
    limits = [results[0][f"limits on {world}"] for world in worker.WORLDS]
    assert [set(each) for each in limits] == [{worker.LIMIT.total_seconds()}] * len(limits)
    assert len(limits[-1]) >= 3  # the world, and hsdp's two groups of each rank


def test_ranks_communicate_as_often_as_the_settings_say(settings: list[dict[str, Any]]) -> None:
    """In three micro-batches; `fsdp` has two blocks, `zero1` ends a step with four broadcasts."""
    gathers, scatters = 3 * 2, 2
    assert [found["collectives"] for found in settings] == [
        {
            "ddp 1": 3,
            "ddp 2": 2,
            "ddp None": 1,
            "zero1 1": 4 + 3,
            "zero1 2": 4 + 2,
            "zero1 None": 4 + 1,
            "fsdp 1": 2 * gathers + 3 * scatters,
            "fsdp 2": 2 * gathers + 2 * scatters,
            "fsdp None": 2 * gathers + scatters,
            "fsdp {'reshard': False}": gathers + scatters,
        }
    ] * 2


def test_the_first_losses_are_those_of_the_whole_batch_on_one_device(settings: list[dict[str, Any]]) -> None:
    """Whatever the strategy and the split, and again afterwards: weights are as before."""
    variant = VariantConfig("alone", (256,), 1)
    trainer = Trainer(settings_worker.blocks(), worker.config("single", 1, (variant,)), 0)
    expected, dtype = first_losses(trainer, variant, Peers())
    assert (len(set(expected)), dtype) == (NUM_LOSSES, "float64")
    for found in settings:
        for strategy, several in found["losses"].items():
            assert [each.pop() for each in several] == ["float64"] * 3, strategy
            assert several == [pytest.approx(expected, rel=1e-12)] * 3, strategy
            assert several[0] == several[2], strategy


def test_ddp_has_the_options_that_the_settings_say(settings: list[dict[str, Any]]) -> None:
    found = settings[0]["ddp"]
    assert found.keys() == {json.dumps(options) for options in settings_worker.DDP_OPTIONS}
    sizes = {
        '{"bucket_mb": 2}': [2, 2, 2, 2],
        '{"bucket_mb": 4, "first_bucket_mb": 2}': [2, 4, 2],
        '{"bucket_mb": 25, "first_bucket_mb": 25}': [8],
        '{"comm_hook": "powersgd", "bucket_mb": 100}': [8],
    }
    for name, ddp_options in found.items():
        assert ddp_options["sizes"] == (sizes[name] if "_mb" in name else [1, 7])
        assert bool(ddp_options["static_graph"]) == ("static_graph" in name)
        assert bool(ddp_options["gradient_as_bucket_view"]) == ("view" in name)


def test_compressed_gradients_have_an_error_that_is_no_warning(settings: list[dict[str, Any]]) -> None:
    at_least = {"fp16": 1e-4, "bf16": 1e-3, "powersgd": 1e-2}
    for name, facts in settings[0]["ddp"].items():
        hook = json.loads(name).get("comm_hook")
        assert facts["gradient_warning"] is None
        assert bool(facts["comm_hook"]) == (hook is not None)
        assert (facts["gradient_error"] > at_least[hook]) if hook else (facts["gradient_error"] < 1e-5)


def test_layers_that_compute_again_keep_less_and_train_alike(settings: list[dict[str, Any]]) -> None:
    found = settings[0]["layers"]
    for each in found.values():
        assert (each["gradient_warning"], each["warnings"], each["gradient_error"] <= 1e-12) == (
            None,
            [],
            True,
        )
        assert each.get("parameter_error", 0.0) <= 1e-10
    for strategy in settings_worker.LAYERED:
        none, some, all_ = (each["memory"]["activations"] for name, each in found.items() if strategy in name)
        assert none > 1.1 * some > 1.1**2 * all_


@pytest.mark.parametrize("strategy", first(1, settings_worker.LAYERED))
def test_memory_is_estimated_as_it_is_measured(settings: list[dict[str, Any]], strategy: str) -> None:
    for change in settings_worker.CHANGES:
        launch = replace(worker.config(strategy, 2, (settings_worker.UNEVEN,)), **change)
        estimate = estimate_of(settings_worker.blocks(), launch, settings_worker.UNEVEN)
        measured = max(sum(found["layers"][f"{strategy} {change}"]["memory"].values()) for found in settings)
        assert estimate.peak is not None
        assert estimate.peak.total == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_memory_of_one_process_is_estimated(strategy: str) -> None:
    split = (256,) if strategy == "single" else (192, 64)
    variant = VariantConfig("some", split, 2)
    launch = worker.config(strategy, len(split), (variant,), "bf16")
    trainer = Trainer(settings_worker.blocks(), launch, 0)
    trainer.step(trainer.prepare(variant, 0), NoClock())
    estimated, measured = (
        estimate_of(settings_worker.blocks(), launch, variant).peak,
        trainer.memory_peak(variant),
    )
    if strategy == "single":
        assert estimated == measured
    else:  # which replica's thread is ahead in the backward pass differs from step to step
        assert estimated is not None
        assert estimated.total == pytest.approx(measured.total, rel=0.15)
        assert estimated.parts["parameters"] == measured.parts["parameters"]


def test_what_is_not_known_before_a_run_is_not_estimated() -> None:
    even = VariantConfig("even", (128, 128), 1)
    ddp = worker.config("ddp", 2, (even,))
    balanced = replace(even, balance=BalanceConfig(1, (256, 256)))
    refusals = [
        refusal(replace(ddp, compile=True), even),
        refusal(ddp, balanced),
        refusal(replace(ddp, comm_hook="fp16"), even),
        refusal(replace(worker.config("dp", 2, (even,)), devices=("cuda:0", "cuda:1")), even),
        estimate(replace(ddp, workload="matmul"), even).reason,
        estimate(replace(ddp, workload="nothing.py:build"), even).reason,
    ]
    assert [text.split()[0] for text in refusals] == ["torch.compile", "its", "the", "the", "a", "the"]


def test_the_optimizer_is_the_implementation_that_the_job_names(settings: list[dict[str, Any]]) -> None:
    operators = {"foreach": "_foreach_addcdiv_", "fused": "_fused_adamw_"}
    for name, layer in settings[0]["layers"].items():
        assert {key for key in operators if key in name} == {
            key for key, operator in operators.items() if operator in layer["names"]
        }


def batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def check(model: nn.Module, precision: str = "fp64") -> dict[str, Any]:
    """The check's facts about an uneven split of `dp` on two CPU devices."""
    launch = launch_config(VariantConfig("uneven", (48, 16), 2), strategy="dp", precision=precision)
    trainer = Trainer(Workload(model, batch, F.cross_entropy), launch, 0)
    return check_gradients(trainer, launch, 0)["uneven"]


def perceptron(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *between, nn.Linear(32, 4))


@pytest.fixture
def _deterministic() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16", "fp16"])
def test_each_precision_explains_its_own_rounding(precision: str) -> None:
    facts = check(perceptron(nn.ReLU(), nn.LayerNorm(32)), precision)
    assert (facts["gradient_warning"], facts["warnings"]) == (None, ())


@pytest.mark.usefixtures("_deterministic")
def test_dropout_layers_are_left_out_and_other_random_numbers_named() -> None:
    dropout = nn.Dropout(0.5)
    facts = check(perceptron(dropout))
    assert (facts["gradient_error"] < 1e-9, facts["warnings"], dropout.training) == (True, (), True)
    assert "likely reason: dropout" in check(perceptron(nn.RReLU()))["inexact"]


def test_batch_norm_always_carries_a_warning() -> None:
    norm = nn.BatchNorm1d(32)
    model = perceptron(norm)
    before = known(norm.running_mean).clone()
    (always,) = check(model)["warnings"]
    assert "BatchNorm" in always
    assert torch.equal(known(norm.running_mean), before.double())
    model.eval()
    (frozen,) = check(model)["warnings"]
    assert "BatchNorm" in frozen
