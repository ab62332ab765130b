"""Classifies events by category and name. To support a new library, add a row here.

Categories changed their spelling between torch versions (`Kernel`, `kernel`); names of communication kernels
changed with NCCL 2.19 (`ncclKernel_*`, `ncclDevKernel_*`), and several libraries never say "nccl".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from gpurun.launcher.trace.added_by_ranks import STEP_MARK
from gpurun.launcher.trace.kineto.demangle import demangled
from gpurun.launcher.trace.model import Remedy


class GpuKind(IntEnum):
    """The classes of GPU work. A moment with several counts for the first of them."""

    COMPUTE = 0
    COMM = 1
    MEMCPY = 2
    MEMSET = 3


class HostKind(IntEnum):
    """The classes of ranges on the CPU."""

    ANNOTATION = 0
    """A range named by the program; it encloses work but isn't work."""
    OTHER = 1
    """A range named by the program, in old traces, which list it as an operator."""
    OP = 2
    """An operator: what the CPU computes."""
    STEP = 3
    DATA = 4
    """The training loop waits for its next batch."""
    COMM = 5
    """A collective on the CPU, from when its thread starts it until it is done (`gloo:*`)."""
    COMM_CALL = 6
    """The call that issues a collective: not compute, and finished before the collective (`c10d::*`)."""


@dataclass(frozen=True)
class Writer:
    """Who wrote the events of a file."""

    name: str
    mark: re.Pattern[bytes] | None = None
    """Text in its first events, and in those of no other writer."""
    reader: str = ""
    """The program that reads its traces, if gpurun doesn't."""
    device: str = ""
    """The device whose work isn't read."""
    note: str = ""
    """The case of a note on what its events lack."""


KINETO = Writer("torch.profiler")
OLD_AUTOGRAD = Writer("torch.autograd.profiler", re.compile(rb'"pid": "CPU functions"'), note="old-autograd")
_WRITERS = (
    OLD_AUTOGRAD,
    Writer("torch_npu", re.compile(rb'"Ascend Hardware"'), device="NPU", note="from-torch-npu"),
    Writer("rocprof before version 3", re.compile(rb'"CPU HIP API"'), "ui.perfetto.dev"),
    Writer("TensorFlow", re.compile(rb'"/job:'), "chrome://tracing"),
    Writer("Nsight Systems", re.compile(rb'"CUPTI_ACTIVITY_KIND'), "`nsys stats`"),
    Writer("ONNX Runtime", re.compile(rb'"cat"\s*:\s*"(?:Session|Node)"'), "ui.perfetto.dev"),
    Writer("Paddle", re.compile(rb'"tid"\s*:\s*"[0-9]+\((?:C\+\+|Python)\)"'), "VisualDL"),
)


_TEXT_TIME = re.compile(rb'"ts"\s*:\s*"')
_LOOKED_AT_BYTES = 1 << 16


def writer_of(block: bytes, known: Writer | None = None) -> Writer:
    """The writer of a file, by its first events; where times are text, by later ones, too.

    torch_npu names its device after all events of the framework.

    Args:
        block: events.
        known: the writer by the events before them.
    """
    if known is not None and not (known is KINETO and _TEXT_TIME.search(block, 0, _LOOKED_AT_BYTES)):
        return known
    return next((each for each in _WRITERS if each.mark and each.mark.search(block)), KINETO)


KERNEL_CATEGORIES = frozenset({"kernel", "Kernel"})
MEMCPY_CATEGORIES = frozenset({"gpu_memcpy", "Memcpy"})
MEMSET_CATEGORIES = frozenset({"gpu_memset", "Memset"})
GPU_CATEGORIES = KERNEL_CATEGORIES | MEMCPY_CATEGORIES | MEMSET_CATEGORIES
LAUNCH_CATEGORIES = frozenset(
    {
        "cuda_runtime",
        "cuda_driver",
        "Runtime",
        "hip_runtime",
        "hip_driver",
        "privateuse1_runtime",
        "privateuse1_driver",
        "xpu_runtime",
        "xpu_driver",
    }
)
WAITING_CALLS = re.compile(r"(cuda|hip|cu)\w*(Synchronize|WaitEvent)|(cuda|hip|cu)EventQuery")
"""Calls of a GPU's runtime in which the host waits for it."""
WORKING_CALLS = re.compile(r"launch|memcpy|memset|enqueue|append|execute", re.IGNORECASE)
"""Calls that give work to a device. Source: the names of CUDA, HIP, Level Zero (`zeCommandListAppend…`)."""
NEEDS_GPU = re.compile(r"nccl:|aten::record_stream$|c10d::.*_nccl")
"""Operators that a CPU has no use for."""
LAUNCHING_CALLS = re.compile(r"(cuda|cu|hip)\w*Launch")
BEGINS_CAPTURE = re.compile(r"(cuda|hip|cu)StreamBeginCapture")
ENDS_CAPTURE = re.compile(r"(cuda|hip|cu)StreamEndCapture")
"""Between these, a thread records a graph, and what it launches doesn't run."""
ONE_OFF_CALLS = re.compile(
    r"""
    (cuda|cu|hip)(
        (Mem|Host)?(Malloc|Alloc|Free|Register)    # memory of the device, or pinned: allocators keep it
        | Mem(Create|Map|AddressReserve|SetAccess)
        | Module | Library | FuncGetAttributes     # code is loaded when it is used first
        | Init | SetDevice | Ctx(Create|SetCurrent) | DevicePrimaryCtx
        | (Device)?Get(?!LastError) | DriverGet | RuntimeGet | Occupancy  # the first one makes the context
        | DeviceEnablePeer | Ipc | StreamCreate | GraphInstantiate | GraphUpload
    )
    """,
    re.VERBOSE,
)
"""Calls of a GPU's runtime that a program makes while it starts, and seldom afterwards."""
ALLOCATING_CALLS = re.compile(
    r"(cuda|cu|hip)(?!\w*Host)((Mem)?(Malloc|Alloc|Free)|Mem(AddressFree|Create|Release|Map|Unmap|SetAccess))"
)
"""Calls that allocate or release memory of the device."""
LOADING_CALLS = re.compile(r"(cuda|cu|hip)(Module|Library)")
"""Calls that load code onto the device, or look for a function in it."""
COMPILING = re.compile(
    r"""
    (?!CUDAGraph).*[ ]\(dynamo_timed\)$
    | torch/(_dynamo/convert_frame|_inductor/compile_fx)\.py\(\d+\):[ ]_?compile(_fx)?(_inner)?$
    """,
    re.VERBOSE,
)
"""Ranges, and functions of Python, in which torch.compile works; a graph that it captures is one. Source:
torch's `_dynamo/utils.py`, `dynamo_timed`, and `_inductor/cudagraph_trees.py`."""
TRITON_COMPILING = re.compile(r"(.*/)?triton/compiler/compiler\.py\(\d+\): compile$")
"""Functions of Python in which Triton compiles a kernel: torch.compile's, or the program's own."""
GRAPH_SETUP = re.compile(r"(.*/)?torch/_inductor/cudagraph_trees\.py\(\d+\): __init__$")
"""Functions of Python in which torch.compile prepares and captures a CUDA graph."""
COMPILED = re.compile(r"Torch-Compiled Region")
"""Operators that enclose what torch.compile has made, and say nothing of what it does."""
IN_USE: Mapping[Remedy, re.Pattern[str]] = {
    "torch.compile": re.compile(
        r"Torch-Compiled Region|(.*:\s)?CompiledFunction(Backward)?$|.*CompiledFxGraph"
        r"|triton_(_\d|(poi|red|per|tem|for|foreach|mix|split_scan)_).*|.*\(dynamo_timed\)$"
    ),
    "CUDA graphs": re.compile(r"(cuda|cu|hip)GraphLaunch"),
}
"""Names of what runs where a remedy is in use. Source: torch's `_inductor/codegen/triton.py`, kernels' names;
`_functorch/_aot_autograd/runtime_wrappers.py`; `_dynamo/eval_frame.py`."""
OP_CATEGORIES = frozenset({"cpu_op", "Operator", "user_annotation"})
PYTHON_CATEGORIES = frozenset({"python_function"})
WAIT_CATEGORIES = frozenset({"cuda_sync"})
"""The GPU's own records of waits, for some tables only."""
RECORDING_CATEGORIES = frozenset({"Trace"})
"""How long was recorded."""
DEVICES_NOT_READ = {
    "mtia_ccp_events": "MTIA",
    "mtia_insight": "MTIA",
    "mtia_runtime": "MTIA",
    "hpu_op": "HPU",
    "glow_runtime": "Glow",
}
"""Categories of work on devices that the analysis doesn't know, with their names."""
OTHER_CATEGORIES = frozenset(
    {
        *("gpu_user_annotation", "external_correlation", "cpu_instant_event", "overhead"),
        *("cuda_sync", "cuda_event", "xpu_sync", "collective_comm", "mtia_counters"),
        *("cuda_profiler_range", "xpu_scope_profiler", "hardware_counters"),
    }
)
"""Categories of Kineto that hold neither work nor launches. Source: Kineto's `ActivityType.h`."""
MODULE_PREFIX = "nn.Module: "

COMM_KERNELS = re.compile(
    r"""
    ^(void\ )?nccl(Symk?)?(Dev)?Kernel  # NCCL before and since 2.19, symmetric since 2.27; RCCL uses both
    | ^(void\ )?(rccl|msccl)            # RCCL's, MSCCL's and MSCCL++'s own
    | ^(void\ )?(deep_ep|dpsk::ep)::(?!(\w+::)*get_dispatch_layout)  # DeepEP; the layout is a rank's own
    | (one|two)_?shot_?all_?reduce      # torch symmetric memory, TensorRT-LLM, FlashInfer
    | multimem_all_(reduce|gather)      # torch symmetric memory
    | ^(\S*::)?(barrier|put_signal|wait_signal)_kernel\b               # torch symmetric memory
    | cross_device_reduce_[12]stage     # vLLM and SGLang custom all-reduce
    | reduce_scatter_cross_device_store | ^(void\ )?aiter::(allreduce|allgather|all_gather)_  # AITER on ROCm
    | quickreduce::                     # vLLM on ROCm
    | (quick|custom)_?all_?reduce | allreduce_fusion_kernel
    | moeA2A(Dispatch|Combine)Kernel | (moe|helix)AllToAllKernel        # TensorRT-LLM, FlashInfer
    | nvshmem(i|x)?_ | \w_on_stream_kernel                              # NVSHMEM
    | ^(void\ )?k?userbuffers_          # Transformer Engine
    | ^(void\ )?pplx::                  # Perplexity's all-to-all
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""Kernels that move data between devices. `Memcpy*` and `hipMemcpy*` are copies, whatever their name says."""

COLLECTIVES = (
    (
        "barrier",
        re.compile(r"::(cached_)?notify(_dispatch|_combine)?\b|barrier|sync_on_stream", re.IGNORECASE),
    ),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|deep_ep::|dpsk::ep::|moeA2A|pplx::", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    ("gather", re.compile(r"gather", re.IGNORECASE)),
    ("scatter", re.compile(r"scatter", re.IGNORECASE)),
    ("send_recv", re.compile(r"send_?recv", re.IGNORECASE)),
    ("send", re.compile(r"send", re.IGNORECASE)),
    ("recv", re.compile(r"recv", re.IGNORECASE)),
    ("reduce", re.compile(r"reduce", re.IGNORECASE)),
)
"""Kind of a collective by its name; the first match counts. NCCL runs an all-to-all as `SendRecv` kernels."""

SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds that no rank leaves before all have arrived: their ends show the clock offset."""
POINT_TO_POINT = frozenset({"send", "recv"})
SEND_RECV = "send_recv"
"""A kernel of grouped sends and receives; or of an all-to-all, where nothing says which."""
SAME_SIZE = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier"})
"""Kinds that carry equal bytes on all ranks; an all-to-all may differ."""

_HOST_NAMES = (
    (HostKind.STEP, re.compile(rf"({STEP_MARK}|ProfilerStep#)\d{{1,15}}$")),
    (
        HostKind.DATA,
        re.compile(
            r"enumerate\(DataLoader\)#.*__next__$|enumerate\(DataPipe\)#|gpurun::data$"
            r"|.*\.py\(\d+\): (preprocess|collate_fn)$|torch/utils/data/_utils/fetch\.py\(\d+\): fetch$"
        ),
    ),
    (HostKind.COMM, re.compile(r"gloo:|ucc:|mpi:")),
    (HostKind.COMM_CALL, re.compile(r"c10d::|nccl:|record_param_comms$|_c10d_functional::wait_tensor$")),
)
OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
"""Ranges that torch's optimizers leave. Source: torch's `optim/optimizer.py`, `profile_hook_step`."""
REPLICAS = re.compile(r"(autograd::engine::evaluate_function: )?DataParallelReplicas(Backward)?$")
"""Operators in which the replicas of `dp` work on the CPU, each in a thread of its own."""
_ANNOTATIONS = re.compile(
    rf"DistributedDataParallel\.forward|Optimizer\.|DataParallel\.forward|##|{REPLICAS.pattern}"
)
"""Operators that enclose work but aren't work: annotations in old traces, and replicas of `dp` on the CPU."""

TELLING = (
    *(": preprocess", ": collate_fn", ": fetch"),
    *(": compile", ": _compile", ": compile_fx", ": compile_fx_inner", ": _compile_fx_inner"),
)
"""How those functions of Python end that `host_kind` knows: looked for first, as there may be millions."""


def gpu_kind(category: str, name: str) -> GpuKind:
    """The class of GPU work with this category and name."""
    if category in MEMCPY_CATEGORIES:
        return GpuKind.MEMCPY
    if category in MEMSET_CATEGORIES:
        return GpuKind.MEMSET
    return GpuKind.COMM if COMM_KERNELS.search(demangled(name)) else GpuKind.COMPUTE


def host_kind(category: str, name: str) -> HostKind:
    """The class of a range on the CPU with this category and name."""
    for kind, pattern in _HOST_NAMES:
        if pattern.match(name):
            return kind
    if category == "user_annotation" or COMPILING.match(name) or TRITON_COMPILING.match(name):
        return HostKind.ANNOTATION
    return HostKind.OTHER if _ANNOTATIONS.match(name) else HostKind.OP


def collective_kind(name: str) -> str:
    """`all_reduce` and the like, for the name of a kernel or of a `gloo:*` range; else `other`."""
    return next((kind for kind, pattern in COLLECTIVES if pattern.search(name)), "other")


DTYPE_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "signed char": 1, "unsigned char": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "half": 2, "bfloat16": 2, "short": 2, "short int": 2, "uint16": 2, "short unsigned int": 2,
    "int": 4, "float": 4, "uint32": 4, "unsigned int": 4, "complexhalf": 4, "complex<half>": 4,
    "long": 8, "long int": 8, "double": 8, "uint64": 8, "long unsigned int": 8,
    "complexfloat": 8, "complex<float>": 8, "complexdouble": 16, "complex<double>": 16,
}  # fmt: skip
"""Bytes of an element by the names that `dtype` and `Input type` use, in lower case and without `c10::`.

`dtype` is torch's name of a type, `Input type` that of the C++ compiler. Source: torch's
torch/headeronly/core/ScalarType.h, `toString`; torch/csrc/profiler/util.cpp, `inputTypes` and `saveNcclMeta`.
"""


def dtype_bytes(name: str) -> int | None:
    """Bytes of one element; `None` for a name that isn't known."""
    return DTYPE_BYTES.get(name.lower().replace("c10::", ""))
