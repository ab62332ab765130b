"""Peak memory of a block of steps."""

from pathlib import Path

import torch


def reset_peak(device: torch.device) -> None:
    """Begins a new peak at what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        # "5" resets the high-water mark of the resident set. Source: Linux, proc(5).
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # a container may forbid it; the peak is then that of the process so far
            return


def peak_bytes(device: torch.device) -> int | None:
    """Bytes at the peak since `reset_peak`: allocated by tensors on a GPU, resident in the process on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
