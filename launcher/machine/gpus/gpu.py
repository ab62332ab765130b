"""GPUs as the launcher sees them, whatever driver reported them; the highest rates that they are sold with.

The utilisation of a model or an operator is a share of these: dense rates in TFLOP/s (10¹² per second),
without sparsity, with float32 accumulation where that matters. `fp32` and `fp64` are what torch computes in
those precisions: `fp32` on NVIDIA's GPUs without tensor cores, on AMD's with matrix cores.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

BUSY_GIB = 1.0
"""A process that holds less on a GPU is a monitor or an idle server."""
BUSY_PERCENT = 10
BUSY_SHARE = 0.1
"""The share of a GPU's memory: in a container the processes that hold it may not be listed."""
HOT_BY_HARDWARE = "too hot (slowed down by its hardware)"
HOT_BY_DRIVER = "too hot (slowed down by the driver)"


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU. The name is `None` where it belongs to another container."""

    pid: int
    name: str | None
    used_gib: float | None


@dataclass(frozen=True)
class GpuProperties(ABC):
    """The properties of a GPU that planning needs, of this machine or of another node."""

    uuid: str
    """Names the same device in any order and container."""
    name: str
    numa_node: int | None = None
    """The node that it is attached to; `None` where there is one only, or it isn't known."""
    kind: str = ""
    """Name of its row in `accelerators.ACCELERATORS`."""
    bus: str = ""
    """PCI address, `0000:1b:00.0`; of a MIG instance that of its GPU."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, `(9, 0)`."""
    unusable: str | None = None
    """Why the installed torch can't use it, and what to do about it."""

    @property
    @abstractmethod
    def busy_with(self) -> str | None:
        """The work of other processes on it, if it is enough to affect measurements; `None`: it is free."""


@dataclass(frozen=True, kw_only=True)
class Gpu(GpuProperties):
    """A GPU that this process may use. What the driver doesn't report is `None`."""

    index: int
    """Counts the devices of its kind that this process may use: `cuda:INDEX` of a job file."""
    memory_gib: float | None = None
    used_gib: float | None = None
    utilisation_percent: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    """`None` where the driver doesn't list them."""
    peer_links: Mapping[int, str] = field(default_factory=dict)
    """Index of another GPU → `NVLink 18x`, `NVLink` where links aren't counted, or the way over PCIe."""
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    persistence: bool | None = None
    """Whether NVIDIA's driver keeps it initialised while no process uses it."""

    @property
    def busy_with(self) -> str | None:
        users = [process for process in self.processes or () if (process.used_gib or 0.0) >= BUSY_GIB]
        if users:
            names = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in users)
            return f"{names} uses {sum(process.used_gib or 0.0 for process in users):.1f} GiB"
        if self.looks_utilised:
            return f"it is {self.utilisation_percent} % utilised"
        if self.used_gib and self.memory_gib and self.used_gib >= BUSY_SHARE * self.memory_gib:
            return f"{self.used_gib:.1f} of {self.memory_gib:.1f} GiB are in use"
        return None

    @property
    def looks_utilised(self) -> bool:
        """Whether it has work, though no process of any size is known to hold it.

        The driver averages over up to a second, so that what has just ended counts too; not where the driver
        lists the processes, and there is none.
        """
        sizes = [process.used_gib or 0.0 for process in self.processes or ()]
        return (
            self.processes != ()
            and max(sizes, default=0.0) < BUSY_GIB
            and (self.utilisation_percent or 0) >= BUSY_PERCENT
        )


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a driver reports. Without a driver there are no GPUs, which is no error."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA version that the driver supports, as `13.0`."""
    nvml_error: str | None = None
    """Why the driver gave no answer although its library is there."""
    notes: tuple[str, ...] = ()
    """Other notes: GPUs that can't be opened, in which order they are counted."""


def chosen(named: str | None, uuids: Sequence[str | None]) -> list[int]:
    """Positions of the GPUs that a variable such as CUDA_VISIBLE_DEVICES leaves visible, in its order.

    Numbers are positions; UUIDs may be cut short. An unknown GPU ends the list, and a GPU that is named twice
    empties it. Source: torch/cuda/__init__.py, `_parse_visible_devices` and `_transform_uuid_to_ordinals`.

    Args:
        named: the variable's value; `None` leaves all.
        uuids: of the GPUs that there are; `None` for a GPU without one.
    """
    if named is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for token in named.split(","):
        if (position := position_of(token.strip(), uuids)) is None:
            break
        found.append(position)
    return found if len(set(found)) == len(found) else []


def position_of(token: str, uuids: Sequence[str | None]) -> int | None:
    """The position of the GPU that a number or the start of its UUID names; `None` where there is none."""
    if token.isdecimal():
        return int(token) if int(token) < len(uuids) else None
    found = [i for i, uuid in enumerate(uuids) if uuid and uuid.startswith(token)]
    return found[0] if token.startswith("GPU-") and len(found) == 1 else None


def unknown(*_: object) -> None:
    """The answer of a sensor that isn't there."""


@dataclass(frozen=True)
class Sensors:
    """The driver's sensors of one GPU; each function returns `None` where it doesn't know."""

    energy_mj: Callable[[], int | None] = unknown
    """Millijoules since the driver was loaded; the counter advances every few tens of milliseconds."""
    hot_ns: Callable[[], int | None] = unknown
    """Time since the driver was loaded in which heat kept the clock down."""
    throttling: Callable[[], str | None] = unknown
    """Why the clock is low now, if it is."""
    mean_clock_mhz: Callable[[int], float | None] = unknown
    """The SM clock's mean since a time in µs since 1970; the clock now where no samples are kept."""
    power_w: Callable[[], float | None] = unknown
    """Power drawn now."""
    pcie_link: Callable[[], tuple[int, int] | None] = unknown
    """Generation and lanes that its PCIe link has now; an idle one may be at an older generation."""


@dataclass(frozen=True)
class Peak:
    """One kind of GPU."""

    names: tuple[str, ...]
    """Words that the driver's name for the GPU must all contain; apart from them only `USUAL` ones."""
    tflop_per_s: Mapping[str, float]
    """The peak by precision."""
    gb_per_s: float
    """The rate of its memory, in 10⁹ bytes per second."""
    gb: tuple[int, ...]
    """Its memory as it is sold, in 10⁹ bytes; several sizes share a row where they compute alike. By the same
    source."""


USUAL = frozenset(
    {
        "NVIDIA",
        "AMD",
        "Instinct",
        "OAM",
        "Tesla",
        "GeForce",
        "SXM4",
        "PCIE",
        "PCIe",
        "INSTINCT",
        "(MCM)",
        "MBA",
        "AC",
        "SXM6",
        "16GB",
        "32GB",
        "40GB",
        "80GB",
    }
)
"""Words of a name that leave the rates as they are; others may not: `D`, `Ti`, `Laptop`, `MIG`, `24Q`."""

H100_RATES = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}
H100_PCIE_RATES = {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2, "fp64": 51.2}
A100_RATES = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5}

NVIDIA_PEAKS = (
    # Source: NVIDIA H100 product page, H100 NVL, half of the figures "with sparsity".
    # https://www.nvidia.com/en-us/data-center/h100/
    Peak(
        ("H100", "NVL"),
        {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
        3900.0,
        (94,),
    ),
    # Source: NVIDIA H100 Tensor Core GPU Architecture white paper, V1.04, tables 1 and 3: H100 PCIe.
    # https://nvdam.widen.net/s/95bdhpsgrs/nvidia_h100_tensor_core_gpu_architecture_whitepaper_v1.03
    Peak(("H100", "PCIe"), H100_PCIE_RATES, 2000.0, (80,)),
    # Source: the same, H100 SXM5.
    Peak(("H100", "HBM3"), H100_RATES, 3350.0, (80,)),
    # Source: NVIDIA H200 product page, H200 NVL, half of the figures "with sparsity".
    # https://www.nvidia.com/en-us/data-center/h200/
    Peak(
        ("H200", "NVL"),
        {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
        4800.0,
        (141,),
    ),
    # Source: the same, H200 SXM: 1979, 989 and 67 are the H100 SXM5's, here as its white paper has them.
    Peak(("H200",), H100_RATES, 4800.0, (141,)),
    # Source: NVIDIA GH200 Grace Hopper Superchip datasheet: the GPU computes as the H100 SXM5 does.
    # https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip
    Peak(("GH200", "480GB"), H100_RATES, 4000.0, (96,)),
    Peak(("GH200", "120GB"), H100_RATES, 4000.0, (96,)),
    Peak(("GH200", "144G", "HBM3e"), H100_RATES, 4900.0, (144,)),
    # Source: NVIDIA H800 Tensor Core GPU datasheet, an H100 with less of NVLink and float64.
    Peak(("H800", "PCIe"), {**H100_PCIE_RATES, "fp64": 0.8}, 2000.0, (80,)),
    Peak(("H800",), {**H100_RATES, "fp64": 1.0}, 3350.0, (80,)),
    # Source: NVIDIA H20 GPU datasheet.
    Peak(("H20",), {"bf16": 148.0, "fp16": 148.0, "tf32": 74.0, "fp32": 44.0, "fp64": 1.0}, 4000.0, (96,)),
    # Source: NVIDIA GB200 NVL72 product page, a 72nd, half of the figures "with sparsity".
    # https://www.nvidia.com/en-us/data-center/gb200-nvl72/
    Peak(
        ("GB200",),
        {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp64": 40.0},
        8000.0,
        (186,),
    ),
    # Source: NVIDIA HGX product page, an eighth of the HGX B300, half of the figures "with sparsity".
    # https://www.nvidia.com/en-us/data-center/hgx/
    Peak(
        ("B300",),
        {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp64": 1.25},
        8000.0,
        (288,),
    ),
    # Source: NVIDIA Blackwell datasheet, a GPU of the HGX B200, half of the figures "with sparsity".
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703
    Peak(
        ("B200",),
        {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0, "fp64": 37.0},
        8000.0,
        (180,),
    ),
    # Source: NVIDIA A100 Tensor Core GPU datasheet; all forms compute alike.
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    Peak(("A100", "SXM4", "80GB"), A100_RATES, 2039.0, (80,)),
    Peak(("A100", "PCIe", "80GB"), A100_RATES, 1935.0, (80,)),
    # Source: the edition of 2020, A100 40GB.
    Peak(("A100",), A100_RATES, 1555.0, (40,)),
    # Source: NVIDIA V100 Tensor Core GPU datasheet, V100 SXM2.
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    Peak(("V100", "SXM2"), {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8}, 900.0, (16, 32)),
    # Source: the same, V100 PCIe.
    Peak(("V100", "PCIE"), {"fp16": 112.0, "fp32": 14.0, "fp64": 7.0}, 900.0, (16, 32)),
    # Source: NVIDIA T4 Tensor Core GPU datasheet.
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    Peak(("T4",), {"fp16": 65.0, "fp32": 8.1}, 300.0, (16,)),
    # Source: NVIDIA L40S datasheet, as printed there, though half of its 733 "with sparsity" is 366.5.
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    Peak(("L40S",), {"bf16": 362.05, "fp16": 362.05, "tf32": 183.0, "fp32": 91.6}, 864.0, (48,)),
    # Source: NVIDIA L4 Tensor Core GPU datasheet, half of the figures "with sparsity".
    # https://www.cisco.com/c/dam/en/us/products/collateral/servers-unified-computing/ucs-c-series-rack-servers/nvidia-l4-gpu.pdf
    Peak(("L4",), {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3}, 300.0, (24,)),
    # Source: NVIDIA A10 Tensor Core GPU datasheet.
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf
    Peak(("A10",), {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2}, 600.0, (24,)),
    # Source: NVIDIA A10G datasheet, of AWS.
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    Peak(("A10G",), {"bf16": 70.0, "fp16": 70.0, "tf32": 35.0, "fp32": 35.0}, 600.0, (24,)),
    # Source: NVIDIA A30 Tensor Core GPU datasheet.
    # https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf
    Peak(("A30",), {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3, "fp64": 10.3}, 933.0, (24,)),
    # Source: NVIDIA A40 datasheet. https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    Peak(("A40",), {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}, 696.0, (48,)),
    # Source: NVIDIA L40 datasheet.
    # https://images.nvidia.com/content/Solutions/data-center/vgpu-L40-datasheet.pdf
    Peak(("L40",), {"bf16": 181.05, "fp16": 181.05, "tf32": 90.5, "fp32": 90.5}, 864.0, (48,)),
    # Source: NVIDIA RTX Blackwell GPU Architecture white paper, V1.1, appendix: float32 accumulation.
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    Peak(("RTX", "5090"), {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}, 1792.0, (32,)),
    # Source: NVIDIA RTX Blackwell PRO GPU Architecture white paper, V1.0, appendix: float32 accumulation.
    Peak(
        ("RTX", "PRO", "6000", "Blackwell", "Workstation", "Edition"),
        {"bf16": 503.8, "fp16": 503.8, "tf32": 251.9, "fp32": 126.0},
        1792.0,
        (96,),
    ),
    # Source: NVIDIA Ada GPU Architecture white paper, V2.02, appendix A, table 2: float32 accumulation.
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    Peak(("RTX", "4090"), {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}, 1008.0, (24,)),
    # Source: the same, table 2 for GeForce RTX 4080, table 3 for RTX 6000 Ada.
    Peak(("RTX", "4080"), {"bf16": 97.5, "fp16": 97.5, "tf32": 48.7, "fp32": 48.7}, 716.8, (16,)),
    Peak(
        ("RTX", "6000", "Ada", "Generation"),
        {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1},
        960.0,
        (48,),
    ),
    # Source: NVIDIA Ampere GA102 GPU Architecture white paper, V2, appendix A: float32 accumulation.
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
    Peak(("RTX", "3090"), {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6}, 936.0, (24,)),
    # Source: the same, RTX A6000.
    Peak(("RTX", "A6000"), {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}, 768.0, (48,)),
)

MI250X_RATES = {"bf16": 191.5, "fp16": 191.5, "fp32": 47.85, "fp64": 47.85}

AMD_PEAKS = (
    # Source: AMD Instinct MI355X GPU data sheet.
    # https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/product-briefs/amd-instinct-mi355x-gpu-brochure.pdf
    Peak(("MI355X",), {"bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3, "fp64": 78.6}, 8000.0, (288,)),
    # Source: AMD Instinct MI325X and MI300X data sheets: they differ in memory alone.
    # https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf
    Peak(("MI325X",), {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4, "fp64": 163.4}, 6000.0, (256,)),
    Peak(("MI300X",), {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4, "fp64": 163.4}, 5300.0, (192,)),
    # Source: AMD Instinct MI200 series data sheet; of MI250X and MI250 half of all: torch sees two GPUs.
    # https://www.amd.com/system/files/documents/amd-instinct-mi200-datasheet.pdf
    Peak(("MI250X",), MI250X_RATES, 1638.4, (64,)),
    Peak(("MI250X", "/", "MI250"), MI250X_RATES, 1638.4, (64,)),  # the driver names both: the faster one
    Peak(("MI250",), {"bf16": 181.05, "fp16": 181.05, "fp32": 45.25, "fp64": 45.25}, 1638.4, (64,)),
    Peak(("MI210",), {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3, "fp64": 45.3}, 1638.4, (64,)),
)


PEAKS = (*NVIDIA_PEAKS, *AMD_PEAKS)


def peak_of(gpu_name: str) -> Peak | None:
    """The peak of the GPU that the driver calls `gpu_name`; `None` where it isn't known."""
    words = set(gpu_name.replace("-", " ").split())
    for peak in PEAKS:
        if words.issuperset(peak.names) and words <= USUAL.union(peak.names):
            return peak
    return None


_SIZE = re.compile(r"(\d+) ?GB")


def memory_sizes_gb(gpu_name: str) -> tuple[int, ...]:
    """The memory of the GPUs that a person may call `gpu_name` (`H100 80GB`, `RTX 4090`), in 10⁹ bytes.

    Several where the name leaves it open, none where there is no such GPU.
    """
    named = {int(size) for size in _SIZE.findall(gpu_name)}
    words = set(_SIZE.sub("", gpu_name).upper().replace("-", " ").split()) - {word.upper() for word in USUAL}
    rows = [peak for peak in PEAKS if words and words <= {word.upper() for word in peak.names}]
    sizes = {size for peak in rows for size in peak.gb}
    return tuple(sorted(sizes & named if named else sizes))
