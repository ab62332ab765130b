"""GPUs that torch calls `cuda`: NVIDIA's, and AMD's under ROCm."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch.profiler import ProfilerActivity

from gpurun.launcher.worker.accelerators.runtime import StreamRuntime, Write


class CudaRuntime(StreamRuntime):
    """`torch.cuda`."""

    kind = "cuda"
    activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def is_capturing(self, device: torch.device) -> bool:
        """Asks on `device`, since torch asks for the stream of the current one."""
        if not self.is_initialized():
            return False
        with self.current(device):
            return bool(self.module.is_current_stream_capturing())

    @contextmanager
    def memory_history(self, max_entries: int) -> Iterator[Write | None]:
        """Records allocations; other allocators than torch's own record nothing, and are an error.

        Source: `recordHistory` in c10/cuda/CUDAMallocAsyncAllocator.cpp and
        torch/csrc/cuda/CUDAPluggableAllocator.cpp.
        """
        record = torch.cuda.memory._record_memory_history
        dump: Write | None = torch.cuda.memory._dump_snapshot
        try:
            record(stacks="python", max_entries=max_entries)
        except RuntimeError:
            dump = None
        try:
            yield dump
        finally:
            with suppress(RuntimeError):  # but not before torch has removed what it calls in every operator
                record(enabled=None)

    def allow_tf32(self, allowed: bool) -> None:
        """Says it by torch's old properties first, then by the new ones.

        Where only the new ones are set, readers of the old ones raise: `cudnn.flags` among them, and
        `get_float32_matmul_precision`, which the compiler reads. Source: aten/src/ATen/Context.cpp,
        `allowTF32CuDNN` and `float32MatmulPrecision`. Before torch 2.9 there are only the old ones.
        """
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        mode = "tf32" if allowed else "ieee"
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = mode
            torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
            torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]

    def set_convolution_search(self, searches: bool) -> None:
        torch.backends.cudnn.benchmark = searches


@contextmanager
def cudnn_flags(wanted: Mapping[str, object]) -> Iterator[None]:
    """Sets flags of `torch.backends.cudnn`, and what they were at the end."""
    before = {flag: getattr(torch.backends.cudnn, flag) for flag in wanted}
    for flag, value in wanted.items():
        setattr(torch.backends.cudnn, flag, value)
    yield
    for flag, value in before.items():
        setattr(torch.backends.cudnn, flag, value)


@contextmanager
def matmul_precision(wanted: str | None) -> Iterator[None]:
    """Sets the precision of matrix products in fp32, and what it was at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted or before)
    yield
    torch.set_float32_matmul_precision(before)
