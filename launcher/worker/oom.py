"""Whether an error says that memory ran out."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left, in each of the ways in which torch says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
