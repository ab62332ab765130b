"""Real text that is always there: the Python standard library's own source."""

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch

MAX_BYTES = 4 << 20


@lru_cache(maxsize=1)
def corpus() -> torch.Tensor:
    """The first `MAX_BYTES` of the library's top-level modules in order of their names, as uint8."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= MAX_BYTES:
            break
    return torch.frombuffer(content[:MAX_BYTES], dtype=torch.uint8)


def random_windows(size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`size` stretches of `length` bytes of the text, as int64 of shape (size, length)."""
    text = corpus()
    starts = torch.randint(len(text) - length + 1, (size, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
