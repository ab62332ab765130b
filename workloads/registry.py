"""The built-in workloads by name; a module, and torch with it, is imported when its workload is built."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["training", "micro-benchmark"]
_ATTENTION = "matrix products and attention"
_READING = "from a directory, maybe reading"
TWO_DEVICES = "an all-reduce needs at least two devices"


@dataclass(frozen=True)
class Builtin:
    """Where a built-in workload is and what it is for, in words for a listing."""

    module: str
    summary: str
    bound_by: str
    """The part of the hardware that its time goes into."""
    function: str = "build"
    kind: Kind = "training"
    global_batch: int | None = None
    """The batch where the job gives none: a classic's, as published."""
    strategies: tuple[str, ...] = ()
    """Strategies that a micro-benchmark can run as, the first by default; empty: any."""
    min_devices: int = 1
    why_devices: str = ""
    """Why it needs more than one device, where it does."""
    without: Mapping[str, str] = field(default_factory=dict)
    """Keys of a job that mean nothing for it, each with the reason."""

    def load(self) -> Callable[..., Any]:
        """The function that builds it."""
        build: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return build


def _classic(name: str, batch: int, bound_by: str, summary: str) -> Builtin:
    """A network of Shi et al. 2016 with the batch that they published."""
    return Builtin("gpurun.workloads.classics", summary, bound_by, name, global_batch=batch)


def _probe(name: str, strategies: tuple[str, ...], bound_by: str, summary: str, **more: Any) -> Builtin:
    """A micro-benchmark: it has no batch, and its devices are used by one of these strategies."""
    module = "gpurun.workloads.micro_benchmarks"
    return Builtin(module, summary, bound_by, name, "micro-benchmark", strategies=strategies, **more)


_DENSE, _CONVOLUTIONS = "large matrix products, and reading their weights", "convolutions"

BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "gpt": Builtin(
            "gpurun.workloads.gpt",
            "a causal language model on real text; presets tiny, small and 124M (GPT-2 small)",
            _ATTENTION,
        ),
        "vit_b16": Builtin(
            "gpurun.workloads.vit",
            "the vision transformer ViT-B/16, on random images or those of a directory",
            f"{_ATTENTION}; {_READING}",
            "vit_b16",
        ),
        "resnet50": _classic(
            "resnet50",
            16,
            f"convolutions and memory (norms, ReLUs); {_READING}",
            "ResNet-50 for 224² images, random or from a directory; version 1 (Shi et al. 2016) or 1.5",
        ),
        "mlp": Builtin(
            "gpurun.workloads.mlp", "a multi-layer perceptron on random vectors", "small matrix products"
        ),
        "fcn_s": _classic("fcn_s", 64, _DENSE, "FCN-S: four layers, 118 M parameters"),
        "alexnet_s": _classic(
            "alexnet_s",
            16,
            "convolutions, and reading the weights of its linear layers",
            "AlexNet-S for 224² images, 62 M parameters",
        ),
        "fcn_r": _classic("fcn_r", 1024, "large matrix products", "FCN-R: four layers, as for MNIST"),
        "alexnet_r": _classic(
            "alexnet_r", 1024, _CONVOLUTIONS, "AlexNet-R for 32² images, 85,000 parameters"
        ),
        "resnet56": _classic(
            "resnet56",
            128,
            "many small convolutions and norms: memory, and launching them",
            "ResNet-56 for 32² images",
        ),
        "lstm": _classic(
            "lstm",
            128,
            "the last layer's matrix product; steps in sequence",
            "two LSTM layers of 256",
        ),
        "allreduce": _probe(
            "allreduce",
            ("ddp",),
            "the links between the devices",
            "all-reduce: latency, algorithm and bus bandwidth",
            min_devices=2,
            why_devices=TWO_DEVICES,
            without={"precision": "it always uses float32"},
        ),
        "h2d": _probe(
            "h2d",
            ("dp", "single"),
            "PCIe, NVLink or memory",
            "copies between host and devices, pinned and pageable",
            without={"precision": "it only copies bytes"},
        ),
        "crossover": _probe(
            "crossover",
            ("single",),
            "transfer, then arithmetic",
            "the size from which the GPU is faster than the CPU",
        ),
        "matmul": _probe("matmul", ("single",), "arithmetic", "matrix products: FLOP/s over size"),
        "sleep": Builtin(
            "gpurun.workloads.sleep",
            "sleeps alpha + beta·b ms per device: steps of a known duration",
            "nothing: it sleeps",
        ),
    }
)
