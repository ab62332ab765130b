"""The kinds of device that a job can run on, one row each: what depends on the kind is looked up here.

This table is torch-free; what a rank does on its device is in the row's runtime, a class of
`gpurun.launcher.worker.accelerators`. Another kind of device is a row here and a runtime there. Which GPUs
the installed torch has kernels for is read from its files.
"""

import ast
import importlib.util
import platform
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpurun.launcher.errors import SpecError
from gpurun.launcher.machine.gpus import amd, nvml
from gpurun.launcher.machine.gpus.gpu import (
    Gpu,
    Gpus,
    Sensors,
    peak_of,
)
from gpurun.launcher.machine.gpus.nvml import GpuHealth, inspect_health

INDEX = "https://download.pytorch.org/whl"
CAPABILITIES: Mapping[str, Mapping[str, Set[int]]] = {
    "13.0": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
    "12.6": {"x86_64": {50, 60, 70, 75, 80, 86, 90}, "aarch64": {80, 90}},
    "12.9": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 120}},
    "13.2": {"x86_64": {75, 80, 86, 90, 100, 120}, "aarch64": {80, 90, 100, 110, 120}},
}
"""CUDA version of a build in the index → machine → compute capabilities that it has kernels for, 90 for 9.0.

The first that fits is recommended: torch's default build, then the one for the oldest drivers and GPUs.
Source: torch/cuda/__init__.py of torch 2.13, `PYTORCH_RELEASES_CODE_CC`.
"""
DEFAULT = "cu130"
"""The index's name of the build that PyPI has."""
INTEGRATED = {53, 62, 72, 87, 101}
"""GPUs of a system on a chip run kernels of their own capability alone, which no build of the index has.

Source: there, `DEVICE_REQUIREMENT`.
"""
NEWEST = (12, 1)
"""Compute capability of the newest GPU that torch 2.13 knows; a later torch may know newer ones."""
UPDATE = "update the driver"


@dataclass(frozen=True)
class TorchBuild:
    """The content of `torch/version.py`."""

    version: str
    built_for: Mapping[str, str]
    """Version of the libraries by torch's name for their devices: `13.0` of CUDA, `hip` for AMD's."""


@cache
def installed_torch() -> TorchBuild | None:
    """`None` where there is no torch, or it doesn't say how it was built."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        return read_build(Path(found.origin).with_name("version.py").read_text())
    except OSError:
        return None


def read_build(text: str) -> TorchBuild | None:
    """The build by the text of `torch/version.py`; `None` without a version."""
    values: dict[str, Any] = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = value.value
    version = values.pop("__version__", None)
    built_for = {name: value for name, value in values.items() if isinstance(value, str)}
    return TorchBuild(version, built_for) if version else None


def nvidia_problem(
    build: TorchBuild | None, found: Gpus, gpu: Gpu, name: str, machine: str = platform.machine()
) -> str | None:
    """Why this torch can't use one of the NVIDIA GPUs, and what to do; `None` where nothing says so.

    Any driver that knows a major version of CUDA runs what was built for it. The driver's own answer
    includes a forward-compatibility package. Source: CUDA Compatibility, minor version compatibility.

    Args:
        build: the installed torch.
        found: all GPUs that a process may see, and their driver.
        gpu: one of them.
        name: torch's word for its device.
        machine: `x86_64`; by default this one's.
    """
    if build is None:
        return None
    newest, built = found.cuda_driver_version, build.built_for.get(name)
    remedy = _remedy(found, gpu, machine)
    if built is None:
        return f"torch {build.version} was built without CUDA\n    {remedy}"
    # Another build, from source or of a container, has kernels of its own choice.
    if build.version.endswith(f"+{_tag(built)}") and not _has_kernels(built, machine, gpu):
        capability = ".".join(map(str, gpu.capability or ()))
        return f"torch {build.version} has no kernels for compute capability {capability}\n    {remedy}"
    if newest is None or _major(built) <= _major(newest):
        return None
    why = f"torch {build.version} was built for CUDA {built}, but driver {found.driver} has CUDA {newest}"
    return f"{why}\n    {remedy if remedy == UPDATE else f'{UPDATE}, or: {remedy}'}"


def runs_on(code: int, capability: tuple[int, int]) -> bool:
    """Whether a GPU of `capability` runs kernels that an index's build has for `code`."""
    major, minor = capability
    own = 10 * major + minor
    return own not in INTEGRATED and code // 10 == major and code <= own


def _has_kernels(cuda: str, machine: str, gpu: Gpu) -> bool:
    """Whether the index's build for a version of CUDA serves a GPU; what isn't in the table may."""
    codes = CAPABILITIES.get(cuda, {}).get(machine)
    if codes is None or gpu.capability is None or gpu.capability > NEWEST:
        return True
    return any(runs_on(code, gpu.capability) for code in codes)


def build_for(found: Gpus, machine: str = platform.machine()) -> str | None:
    """The index's build, `cu126`, for all these GPUs, or else for the first; `None` where there is none."""
    best = (_best(found, gpu, machine) for gpu in found.gpus)
    return next((_tag(cuda) for cuda in best if cuda), None)


def _remedy(found: Gpus, gpu: Gpu, machine: str) -> str:
    """How to get a build of torch that this driver runs and that serves all GPUs, or else this one."""
    if not _serving(gpu, machine):
        return "no build of torch 2.13 has kernels for it: leave it out of `devices`"
    best = _best(found, gpu, machine)
    return f"pip install --force-reinstall torch --index-url {INDEX}/{_tag(best)}" if best else UPDATE


def _best(found: Gpus, gpu: Gpu, machine: str) -> str | None:
    """CUDA version of the build that this driver runs and that serves all GPUs, or else this one."""
    newest = found.cuda_driver_version
    runnable = [cuda for cuda in _serving(gpu, machine) if newest is None or _major(cuda) <= _major(newest)]
    for_all = [cuda for cuda in runnable if all(_has_kernels(cuda, machine, each) for each in found.gpus)]
    return next(iter(for_all or runnable), None)


def _serving(gpu: Gpu, machine: str) -> list[str]:
    """CUDA versions of the builds that have kernels for it."""
    return [cuda for cuda in CAPABILITIES if _has_kernels(cuda, machine, gpu)]


def _tag(cuda: str) -> str:
    """`cu130` for 13.0: the directory of the index, and the end of such a build's version."""
    return f"cu{cuda.replace('.', '')}"


def _major(version: str) -> int:
    return int(version.partition(".")[0])


Inspect = Callable[[Mapping[str, str], Path, Any], Gpus]
Health = Callable[[Sequence[int], Mapping[str, str]], tuple[GpuHealth, ...]]
AskSensors = Callable[[Sequence[int], Mapping[str, str]], tuple[Sensors, ...]]

TERA = 1e12


@dataclass(frozen=True)
class Accelerator:
    """A kind of device."""

    name: str
    """torch's device type, and the word in a job file: `cuda` for all, `cuda:0` for one."""
    title: str
    """Names the kind in messages: `CPU devices`, `CUDA devices`."""
    noun: str
    """Names one device in messages: `this machine has no NVIDIA GPU`."""
    is_host: bool
    """Whether its devices are shares of the host's cores and memory, numbered by their position."""
    backend: str
    """`torch.distributed` backend of ranks with a device of their own; ranks that share one use the CPU's."""
    backend_bytes: int = field(default=0, kw_only=True)
    """Memory of a device to keep free for the buffers of `backend`, which torch's allocator doesn't count."""
    driver: str = field(default="", kw_only=True)
    """Names its driver: `{driver}` is the version, `{newest}` the newest runtime that it supports."""
    interface_variable: str
    """Environment variable that names the network interface of `backend`."""
    block_ms: float = field(default=200.0, kw_only=True)
    """The least that a timed block of steps lasts."""
    timed_before_trace: int = field(default=20, kw_only=True)
    """Steps of a program that are timed before those that are traced."""
    is_slow_after_trace: bool = field(default=False, kw_only=True)
    """Whether steps after a trace take longer than those before it, and so aren't timed."""
    start_s: float
    """Seconds until the first step: processes, rendezvous, the model, on a GPU also context and libraries."""
    runtime: str
    """`module:class` of its `worker.accelerators.runtime.Runtime`; only ranks import it."""
    visible_variable: str | None = None
    """Environment variable with the UUIDs of the devices that a process sees."""
    sees_none: str = field(default="", kw_only=True)
    """The variable's value where a process may see none."""
    uuid_prefixes: tuple[str, ...] = ()
    """How UUIDs begin that name its devices in a job file."""
    part_prefix: str | None = None
    """How the UUID of a part of a GPU begins: a process sees only one part."""
    only_here: Mapping[str, str] = field(default_factory=dict)
    """Precisions that no other kind computes in → message where one is requested on another kind."""
    least_capability: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Precisions that older models lack → the compute capability that has them."""
    memory_errors: tuple[str, ...] = ()
    """Regular expressions for error messages of its libraries that mean out of memory."""
    inspect: Inspect = field(default=lambda environ, root, binding: Gpus())
    """Finds its devices here; takes the environment, the root of `proc` and a stand-in binding."""
    health: Health = field(default=lambda indices, environ: ())
    """Asks about the GPUs of these indices, numbers in a process with this environment."""
    sensors: AskSensors = field(default=lambda indices, environ: tuple(Sensors() for _ in indices))
    """The sensors that drivers have for them while they work."""

    def device(self, index: int) -> str:
        """`cuda:INDEX`."""
        return f"{self.name}:{index}"

    def driver_text(self, driver: str | None, newest: str | None) -> str:
        """`NVIDIA driver 580.95, CUDA up to 13.0`; empty for a kind without a driver of its own."""
        return self.driver.format(driver=driver or "unknown", newest=newest or "unknown")


def inspect_cuda_gpus(environ: Mapping[str, str], root: Path, binding: Any) -> Gpus:
    """NVIDIA's GPUs, and whether the installed torch can use them; else that there are others."""
    found, build = nvml.inspect_nvidia_gpus(environ, root, binding), installed_torch()
    if not found.gpus:
        others = amd.amd_notes(root, build.version) if build else ()
        return replace(found, notes=(*found.notes, *others))
    problems = [nvidia_problem(build, found, gpu, CUDA.name) for gpu in found.gpus]
    pairs = zip(found.gpus, problems, strict=True)
    return replace(found, gpus=tuple(replace(gpu, unusable=problem) for gpu, problem in pairs))


def inspect_rocm_gpus(environ: Mapping[str, str], root: Path, binding: Any) -> Gpus:
    """AMD's GPUs; that there are others where it has none. `binding` would be NVIDIA's."""
    found = amd.inspect_amd_gpus(environ, root)
    if found.gpus or not nvml.has_module(root):
        return found
    note = "this machine has NVIDIA's driver, but the installed torch was built for ROCm"
    return replace(found, notes=(*found.notes, note))


CPU = Accelerator(
    name="cpu",
    title="CPU",
    noun="CPU",
    is_host=True,
    backend="gloo",
    interface_variable="GLOO_SOCKET_IFNAME",
    start_s=2.0,
    runtime="gpurun.launcher.worker.accelerators.cpu:CpuRuntime",
    # Words of torch's CPU allocator and of errno 12.
    memory_errors=(
        r"out of memory|can't allocate memory|cannot allocate memory|not enough memory",
        r"failed to allocate memory",
    ),
)
CUDA = Accelerator(
    name="cuda",
    title="CUDA",
    noun="NVIDIA GPU",
    driver="NVIDIA driver {driver}, CUDA up to {newest}",
    is_host=False,
    backend="nccl",
    # An estimate: NCCL has 4 MiB (NCCL_BUFFSIZE) for each channel, of up to 32, to and from several peers.
    backend_bytes=1 << 30,
    interface_variable="NCCL_SOCKET_IFNAME",
    start_s=8.0,
    runtime="gpurun.launcher.worker.accelerators.cuda:CudaRuntime",
    visible_variable=nvml.VISIBLE,
    uuid_prefixes=("GPU-", nvml.MIG_PREFIX),
    part_prefix=nvml.MIG_PREFIX,
    only_here={"tf32": "tf32 needs an NVIDIA GPU"},
    least_capability={"tf32": (8, 0)},  # Ampere
    # Words of the driver, of cuBLAS, cuSPARSE and cuSOLVER, and of cuDNN since version 9.
    memory_errors=("CUDA_ERROR_OUT_OF_MEMORY", r"ALLOC(ATION)?_FAILED"),
    # Kineto leaves CUPTI attached after a trace. Steps that wait for the host take 18 % longer then (H100),
    # and twice as long if it was detached (TEARDOWN_CUPTI=1). Source: benchmarks/RESULTS.md, One GPU.
    timed_before_trace=50,
    is_slow_after_trace=True,
    block_ms=1000.0,  # energy counters and clocks advance every few tens of milliseconds
    inspect=inspect_cuda_gpus,
    health=inspect_health,
    sensors=nvml.inspect_sensors,
)
ROCM = replace(  # torch's names for AMD's GPUs are the same, and RCCL goes by NCCL's name
    CUDA,
    title="ROCm",
    noun="AMD GPU",
    driver="AMD driver {driver}",
    visible_variable=amd.VISIBLE,
    sees_none="-1",  # to HIP an empty variable is none
    uuid_prefixes=("GPU-",),
    part_prefix=None,
    only_here={},
    least_capability={},
    # Words of rocBLAS and of MIOpen; hipBLAS has NVIDIA's.
    memory_errors=(r"ALLOC(ATION)?_FAILED", "rocblas_status_memory_error", "miopenStatusAllocFailed"),
    inspect=inspect_rocm_gpus,
    health=amd.amd_health,
    sensors=amd.amd_sensors,
)


def kinds_of(build: TorchBuild | None) -> tuple[Accelerator, ...]:
    """The kinds of device of a torch: which GPUs it calls `cuda` is a matter of its build."""
    return CPU, ROCM if build and "hip" in build.built_for else CUDA


ACCELERATORS: dict[str, Accelerator] = {row.name: row for row in kinds_of(installed_torch())}
"""All accelerators by name. `devices: auto` tries those that aren't the host's in this order."""


def accelerator_of(device: str) -> Accelerator:
    """The kind of a device by any of its names: `cuda`, `cuda:1`, `cuda:1@0`, `GPU-1b2c`.

    Raises:
        SpecError: there is no such kind.
    """
    for row in ACCELERATORS.values():
        if device.startswith(row.uuid_prefixes):
            return row
    kind = device.partition("@")[0].partition(":")[0]
    if kind not in ACCELERATORS:
        known = f"known kinds: {', '.join(ACCELERATORS)}; such as cpu:2 or cuda:0"
        raise SpecError(f"unknown kind of device {device!r}; {known}")
    return ACCELERATORS[kind]


def gpu_kinds() -> list[Accelerator]:
    """All kinds but the host's."""
    return [row for row in ACCELERATORS.values() if not row.is_host]


def precision_problem(
    precision: str, kind: Accelerator, capabilities: Sequence[tuple[int, int] | None] = ()
) -> str | None:
    """Why devices of this kind can't compute in `precision`; `None` where they can.

    Args:
        precision: a key of `PRECISIONS`.
        kind: of all the devices.
        capabilities: of those whose model is known.
    """
    others = (row for row in (*ACCELERATORS.values(), CUDA) if row is not kind)
    least, known = (
        kind.least_capability.get(precision),
        [capability for capability in capabilities if capability],
    )
    if least and known and min(known) < least:
        has, needs = (".".join(map(str, pair)) for pair in (min(known), least))
        return f"{precision} needs compute capability {needs}, but one {kind.noun} of this job has {has}"
    return next((row.only_here[precision] for row in others if precision in row.only_here), None)


def inspect_gpus(environ: Mapping[str, str], root: Path = Path("/"), binding: Any = None) -> Gpus:
    """The GPUs of all kinds that this machine has; driver and versions are those of the first kind found.

    Args:
        environ: with the variables that limit which of them are visible.
        root: where `dev`, `proc` and `sys` are.
        binding: replaces the drivers' own bindings.
    """
    found = [(row.name, row.inspect(environ, root, binding)) for row in gpu_kinds()]
    merged = next((each for _, each in found if each != Gpus()), Gpus())
    return replace(
        merged,
        gpus=tuple(replace(gpu, kind=kind) for kind, each in found for gpu in each.gpus),
        notes=tuple(note for _, each in found for note in each.notes),
    )


def gpu_device(gpu: Gpu) -> str:
    """`cuda:0`, as a job file names the GPU."""
    return ACCELERATORS[gpu.kind].device(gpu.index)


def recorded_gpus(host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each GPU in a `host.json`, with its `device`. Older records know one kind only."""
    recorded = host.get("gpus")
    gpus = [gpu for gpu in recorded if isinstance(gpu, Mapping)] if isinstance(recorded, list | tuple) else []
    return [{**gpu, "device": f"{gpu.get('kind') or CUDA.name}:{gpu.get('index')}"} for gpu in gpus]


def recorded_names(host: Mapping[str, Any]) -> dict[str, str | None]:
    """The driver's name of each GPU in a `host.json`, by device."""
    return {gpu["device"]: gpu.get("name") for gpu in recorded_gpus(host)}


def recorded_uuids(host: Mapping[str, Any]) -> dict[str, str]:
    """The device of each GPU in a `host.json`, by UUID."""
    return {str(gpu.get("uuid")): gpu["device"] for gpu in recorded_gpus(host)}


def peak_tflop_per_s(gpu_name: str, precision: str) -> float | None:
    """The peak of a GPU by the driver's name for it; `None` where it isn't known."""
    peak = peak_of(gpu_name)
    return None if peak is None else peak.tflop_per_s.get(precision)


def peak_gb_per_s(gpu_name: str) -> float | None:
    """The highest rate of a GPU's memory by the driver's name for it; `None` where it isn't known."""
    peak = peak_of(gpu_name)
    return None if peak is None else peak.gb_per_s


def total_peak_flop_per_s(
    gpu_names: Sequence[str | None], precision: str, stated: Mapping[str, float] = MappingProxyType({})
) -> float | None:
    """The peak of several devices together; `None` where one of them isn't known, or there is none.

    Args:
        gpu_names: the driver's; `None` for a CPU.
        precision: what operations are computed in.
        stated: TFLOP/s of a device by precision, which come before what is known.
    """
    if precision in stated:
        return len(gpu_names) * stated[precision] * TERA
    peaks = [peak_tflop_per_s(name, precision) if name else None for name in gpu_names]
    known = [TERA * peak for peak in peaks if peak is not None]
    return sum(known) if known and len(known) == len(peaks) else None
