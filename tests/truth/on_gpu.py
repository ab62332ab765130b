"""A CPU trace rewritten as if a GPU had done the work: kernels, copies and collectives, launched by the CPU.

A copy to the device can't happen without one; the times are real, the device is not.
"""

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

LAUNCH_US = 2.0
STREAM = 7
AS = {
    "truth::work": ("kernel", "work", "cudaLaunchKernel"),
    "truth::copy": ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync"),
    "gloo:all_reduce": (
        "kernel",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)",
        "cudaLaunchKernel",
    ),
}
"""Category and name of the GPU work, and the call that launches it."""


def retell(path: Path, target: Path) -> None:
    """Writes the trace in `path` to `target` with GPU work instead of the operators in its place."""
    with gzip.open(path) as file:
        trace = json.load(file)
    events: list[Event] = []
    for event in trace["traceEvents"]:
        events += gpu_work(event, len(events) + 1) if event.get("name") in AS else [event]
    trace["traceEvents"] = events
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(target, "wt", compresslevel=1) as file:
        json.dump(trace, file)


def gpu_work(event: Event, correlation: int) -> list[Event]:
    """The launch, and the work that takes the time of `event`."""
    category, name, call = AS[event["name"]]
    shared = {"correlation": correlation}
    launch = event | {"cat": "cuda_runtime", "name": call, "dur": LAUNCH_US, "args": shared}
    work = {"cat": category, "name": name, "pid": 0, "tid": STREAM}
    return [
        launch,
        event
        | work
        | {"args": {**shared, "device": 0, "stream": STREAM, "In msg nelems": 1, "dtype": "float"}},
    ]
