"""Kineto traces as a GPU would leave them, made from a few figures: what the browser tests look at."""

import gzip
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.trace.several_ranks.generated_job import Job
from tests.unit.trace.several_ranks.pipelines import Schedule, one_forward_one_backward
from tests.unit.trace.trace_files import rank_info, write
from tests.unit.trace.trace_files import step as step_range

Event = dict[str, Any]

FORWARD, BACKWARD = 0.32, 0.62
"""Shares of compute; the optimizer has the rest."""
BUCKETS = 5
TRANSFER_US = 3400.0
KERNELS = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>(int, float*)",
    "pytorch_flash::flash_fwd_kernel",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float)",
)
OPERATORS = ("aten::addmm", "aten::gelu", "flash_attention_forward", "aten::native_layer_norm")
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def write_traces(
    directory: Path,
    compute_ms: Sequence[float],
    num_steps: int = 12,
    kernels_per_step: int = 120,
    growth: float = 1.0,
) -> list[float]:
    """A trace per rank in `directory`; returns the length of each rank's step, in ms.

    Args:
        directory: the variant's.
        compute_ms: of each rank, per step.
        num_steps: in the trace, numbered from 8.
        kernels_per_step: on each rank.
        growth: of compute, from a step to the next.
    """
    directory.mkdir(parents=True, exist_ok=True)
    events: list[list[Event]] = [[] for _ in compute_ms]
    start_us = 1000.0
    for step in range(num_steps):
        grown_ms = [ms * growth**step for ms in compute_ms]
        start_us = _add_step(events, grown_ms, start_us, step, kernels_per_step)
    for rank, found in enumerate(events):
        info = {"backend": "nccl", "rank": rank, "world_size": len(compute_ms)}
        content = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": found}
        path = directory / f"rank{rank}.pt.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps(content).encode(), compresslevel=1))
    return [(start_us - 1000.0) / num_steps / 1000.0] * len(compute_ms)


STAGES, REPLICAS, SHARDS = 2, 8, 4


def write_mesh(path: Path, num_steps: int = 3) -> None:
    """64 ranks, anybody's traces: two pipeline stages of 8 data parallel replicas of 4 tensor parallel ranks.

    Rank 37 computes longest; the others of its tensor parallel group wait for it.
    """
    path.mkdir(parents=True)
    job = Job(STAGES * REPLICAS * SHARDS)
    schedule = one_forward_one_backward(STAGES, 3, 4_000, 7_000, 300)
    over_us = max(end for spans in schedule.compute.values() for _, end in spans)
    for number in range(num_steps):
        begin_us = 1_000 + number * (over_us + 14_000)
        _add_mesh_step(job, schedule, number, begin_us, begin_us + over_us)
    for rank, events in job.events.items():
        write(path / f"rank{rank}.pt.trace.json.gz", events, **rank_info(rank, job.num_ranks))


def _add_mesh_step(job: Job, schedule: Schedule, number: int, begin_us: float, over_us: float) -> None:
    mesh = np.arange(job.num_ranks).reshape(STAGES, REPLICAS, SHARDS)
    for rank in range(job.num_ranks):
        job.events[rank].append(step_range(number, begin_us - 100, over_us - begin_us + 13_500))
        late_us = 1_800.0 if rank == 37 else 40.0 * (rank * 29 % 11)
        job.kernel(rank, "gemm", over_us, over_us + 900 + late_us, False)
    for replica, shard in product(range(REPLICAS), range(SHARDS)):
        line = mesh[:, replica, shard].tolist()
        for stage, spans in schedule.compute.items():
            for start, end in spans:
                job.kernel(line[stage], "gemm", begin_us + start, begin_us + end, False)
        for each in schedule.messages:
            starts = (begin_us + each.send_us, begin_us + each.receive_us)
            end_us = begin_us + each.end_us
            job.message(line[each.source], line[each.target], starts, (end_us, end_us), "mesh_pp")
    for group in mesh.reshape(-1, SHARDS).tolist():
        starts_us = [over_us + 910 + (1_800.0 if rank == 37 else 40.0 * (rank * 29 % 11)) for rank in group]
        job.all_reduce("mesh_tp", group, starts_us, max(starts_us) + 1_200)
    for group in mesh.transpose(0, 2, 1).reshape(-1, REPLICAS).tolist():
        for operation, at_us in (("ReduceScatter", 5_500), ("AllGather", 8_500)):
            _add_collective(job, operation, group, over_us + at_us)


def _add_collective(job: Job, operation: str, group: list[int], at_us: float) -> None:
    called = {"ReduceScatter": "_reduce_scatter_base", "AllGather": "_allgather_base"}[operation]
    facts = {"Collective name": called, "In msg nelems": 8000, "Out msg nelems": 8000, "dtype": "Float"}
    ranks = {
        "Process Group Name": "mesh_dp",
        "Process Group Ranks": str(group),
        "Group size": len(group),
    }
    for rank in group:
        name = f"ncclDevKernel_{operation}_RING_LL"
        job.kernel(rank, name, at_us - 20 * (rank % 9), at_us + 2_400, False, **facts | ranks)


def _add_step(
    events: list[list[Event]], compute_ms: Sequence[float], start_us: float, step: int, num_kernels: int
) -> float:
    """Adds one step to all ranks; returns when it ends: when the slowest has what it needs."""
    starts = [[0.0] * BUCKETS for _ in compute_ms]
    free = [start_us] * len(compute_ms)
    ends = []
    for bucket in range(BUCKETS):
        ready = [
            start_us + 1000 * ms * (FORWARD + BACKWARD * (bucket + 1) / BUCKETS) - 900 for ms in compute_ms
        ]
        arrivals = [max(at, before) for at, before in zip(ready, free, strict=True)]
        ends.append(max(arrivals) + TRANSFER_US)
        free = [ends[-1]] * len(compute_ms)
        for rank, arrival in enumerate(arrivals):
            starts[rank][bucket] = arrival
    tail = max(1000 * ms * (1 - FORWARD - BACKWARD) for ms in compute_ms)
    end_us = max(ends[-1], max(start_us + 1000 * ms * (FORWARD + BACKWARD) for ms in compute_ms)) + tail + 900
    for rank, ms in enumerate(compute_ms):
        _add_host(events[rank], start_us, end_us, ms, step)
        _add_kernels(events[rank], rank, start_us, 1000 * ms, ends[-1], num_kernels, step)
        for bucket, (begin, end) in enumerate(zip(starts[rank], ends, strict=True)):
            _add_all_reduce(events[rank], rank, begin, end, step * BUCKETS + bucket, len(compute_ms))
    return end_us


def _add_host(events: list[Event], start_us: float, end_us: float, compute_ms: float, step: int) -> None:
    number = step + 8
    events.append(span("user_annotation", f"ProfilerStep#{number}", start_us, end_us - start_us - 2))
    events.append(
        span(
            "user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start_us, 350
        )
    )
    forward_us = 1000 * compute_ms * FORWARD * 0.6
    events.append(span("user_annotation", "forward", start_us + 400, forward_us))
    events.append(
        span(
            "user_annotation",
            "backward: waits for autograd",
            start_us + 500 + forward_us,
            1000 * compute_ms * BACKWARD,
        )
    )


def _add_kernels(
    events: list[Event], rank: int, start_us: float, compute_us: float, last_us: float, count: int, step: int
) -> None:
    length = compute_us / count
    at = start_us + 600
    for index in range(count):
        share = index / count
        if share >= FORWARD + BACKWARD:  # the optimizer begins when the last gradient is there
            at = max(at, last_us)
        number = 1000 * step + index + 1
        kind = index % len(KERNELS)
        is_backward = share >= FORWARD
        thread = 2 if is_backward else 1
        call = start_us + 420 + share * compute_us * 0.6
        events.append(span("cpu_op", OPERATORS[kind], call, 0.5 * length, thread))
        events.append(
            span(
                "cuda_runtime",
                "cudaLaunchKernel",
                call + 0.1 * length,
                0.2 * length,
                thread,
                correlation=number,
            )
        )
        events.append(kernel(rank, KERNELS[kind], at, length * 0.96, 7, number))
        at += length
    copy = 1000 * step + 999
    events.append(span("cuda_runtime", "cudaMemcpyAsync", start_us + 50, 5, correlation=copy))
    events.append(
        span(
            "gpu_memcpy",
            "Memcpy HtoD (Pinned -> Device)",
            start_us + 60,
            420,
            7,
            correlation=copy,
            stream=7,
            device=rank,
        )
        | {"pid": rank}
    )


def _add_all_reduce(
    events: list[Event], rank: int, begin: float, end: float, sequence: int, ranks: int
) -> None:
    step, bucket = divmod(sequence, BUCKETS)
    number = 1000 * step + 900 + bucket
    facts = {
        "Collective name": "allreduce",
        "In msg nelems": 71_000_000,
        "Out msg nelems": 71_000_000,
        "dtype": "BFloat16",
        "Group size": ranks,
        "Process Group Name": "0",
        "Seq": sequence,
    }
    call = begin - 60
    events.append(span("cpu_op", "c10d::allreduce_", call, 30, 2))
    events.append(span("cuda_runtime", "cudaLaunchKernelExC", call + 10, 8, 2, correlation=number))
    events.append(kernel(rank, ALL_REDUCE, begin, end - begin, 20, number, **facts))


def span(category: str, name: str, start_us: float, length_us: float, tid: int = 1, **args: Any) -> Event:
    """A complete event of one CPU thread."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 10, "tid": tid,
        "ts": round(start_us, 3), "dur": round(length_us, 3), "args": args,
    }  # fmt: skip


def kernel(
    rank: int, name: str, start_us: float, length_us: float, stream: int, correlation: int, **args: Any
) -> Event:
    """A kernel on a stream of the rank's device."""
    found = span("kernel", name, start_us, length_us, stream, correlation=correlation, stream=stream, **args)
    return found | {"pid": rank}
