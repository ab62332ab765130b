"""Small Kineto traces made by hand, and where the real ones lie."""

import gzip
import json
from pathlib import Path
from typing import Any

REAL = Path(__file__).resolve().parents[4] / "shared" / "traces"
H100 = Path(__file__).resolve().parents[2] / "data" / "h100"

Event = dict[str, Any]


def span(category: str, name: str, start_us: float, length_us: float, tid: Any = 1, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 10,
        "tid": tid,
        "ts": start_us,
        "dur": length_us,
        "args": args,
    }


def kernel(name: str, start_us: float, length_us: float, correlation: Any = 0, **args: Any) -> Event:
    stream = args.pop("stream", 7)
    return span(
        "kernel", name, start_us, length_us, stream, device=0, stream=stream, correlation=correlation, **args
    ) | {"pid": 0}


def launch(start_us: float, length_us: float, correlation: Any) -> Event:
    return span("cuda_runtime", "cudaLaunchKernel", start_us, length_us, correlation=correlation)


def step(number: int, start_us: float, length_us: float) -> Event:
    return span("user_annotation", f"ProfilerStep#{number}", start_us, length_us)


def write(path: Path, events: list[Event], **header: Any) -> Path:
    content = json.dumps({"schemaVersion": 1, **header, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rank_info(rank: int, world_size: int) -> dict[str, Any]:
    return {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}


def load(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace
