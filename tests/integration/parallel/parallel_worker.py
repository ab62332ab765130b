"""One of four ranks whose groups overlap, or that are the stages of a pipeline; run by `test_parallel.py`.

DIRECTORY/NAME holds the traces of a capture, and how long each rank waited as it timed it itself.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.profiler import profile

from gpurun.launcher.rundir.records import ProfileConfig
from gpurun.launcher.worker.profiling import capture, export
from tests.integration.ranks import in_group

RANKS = 4
STEPS = 1
NAP_S = 0.2
NAP_SCALE = float(os.environ.get("NAP_SCALE", "1"))
STAGE_NAP_S, CHUNK_NAP_S = 0.08 * NAP_SCALE, 0.06 * NAP_SCALE
"""Of a forward pass, and of a backward pass."""
MICRO_BATCHES = 4
SIZE = 8
MESHES = ("mesh 1", "mesh 2", "mesh 3")
"""Captures of the same steps: on a busy machine any rank may be kept from its own clock for a while."""

Timed = dict[str, list[float]]


class Mesh:
    """Steps in groups of one dimension each; ranks come at different times."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.took_s: Timed = defaultdict(list)
        pairs = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
        self.groups = {name: _own_group(rank, lists, name) for name, lists in pairs.items()}

    def step(self) -> None:
        ones = torch.ones(SIZE)
        for name, late in (("tp", self.rank % 2), ("dp", self.rank // 2), ("world", self.rank / 3)):
            time.sleep(NAP_S * late)
            self.timed(name, partial(dist.all_reduce, ones, group=self.groups.get(name)))
        if self.rank == 0:
            time.sleep(NAP_S)
            self.timed("message", partial(dist.send, ones, 3))
        if self.rank == 3:
            self.timed("message", partial(dist.recv, ones, 0))

    def timed(self, name: str, call: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        call()
        self.took_s[name].append(time.perf_counter() - began_s)
        self.took_s[f"{name} came"].append(began_s)


def _own_group(rank: int, lists: list[list[int]], name: str) -> Any:
    """The rank's group of a dimension; all ranks make all of them, in one order."""
    made = [dist.new_group(each, group_desc=f"mesh_{name}") for each in lists]
    return next(group for group, ranks in zip(made, lists, strict=True) if rank in ranks)


class Nap(torch.autograd.Function):
    """A stage whose passes take as long as it sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Callable[[], None]) -> Tensor:
        ctx.nap = nap
        nap()
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.nap()
        return gradients[0] * 1, None


class Sleeper(nn.Module):
    def __init__(self, nap: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.nap = nap

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(self.layer(x), self.nap)  # type: ignore[no-any-return]


class Pipeline:
    """Steps of a pipeline with one or several stages per rank."""

    def __init__(self, rank: int, chunks: int, nap_s: float) -> None:
        self.rank, self.nap_s = rank, nap_s
        self.took_s: Timed = defaultdict(list)
        stages = [self.stage(rank + RANKS * chunk, RANKS * chunks) for chunk in range(chunks)]
        kind: Any = Schedule1F1B if chunks == 1 else ScheduleInterleaved1F1B
        self.schedule = kind(stages[0] if chunks == 1 else stages, MICRO_BATCHES, loss_fn=nn.MSELoss())

    def stage(self, index: int, of: int) -> PipelineStage:
        return PipelineStage(Sleeper(self.nap), index, of, torch.device("cpu"))

    def nap(self) -> None:
        began_s = time.perf_counter()
        time.sleep(self.nap_s)
        self.took_s["nap"].append(time.perf_counter() - began_s)

    def step(self) -> None:
        began_s = time.perf_counter()
        batch = torch.ones(2 * MICRO_BATCHES, SIZE)
        inputs = (batch,) if self.rank == 0 else ()
        targets = {"target": batch} if self.rank == RANKS - 1 else {}
        self.schedule.step(*inputs, **targets)
        dist.barrier()
        self.took_s["step"].append(time.perf_counter() - began_s)


def main(rank: int, directory: Path) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # as in all ranks of gpurun
    with in_group(rank, RANKS, directory):
        mesh = Mesh(rank)
        jobs: dict[str, Mesh | Pipeline] = {
            **dict.fromkeys(MESHES, mesh),
            "1f1b": Pipeline(rank, 1, STAGE_NAP_S),
            "interleaved": Pipeline(rank, 2, CHUNK_NAP_S),
        }
        for name, job in jobs.items():
            place = directory / name / f"rank{rank}.pt.trace.json.gz"
            if isinstance(job, Pipeline):
                job.step()  # in the first one, stages exchange the shapes of what they pass
            capture(job.step, ProfileConfig(steps=STEPS), place, align=dist.barrier)
            took_s = {key: times[-(len(times) * STEPS // (STEPS + 1)) :] for key, times in job.took_s.items()}
            (directory / name / f"rank{rank}.timed").write_text(json.dumps(took_s))
        foreign(mesh, directory / "foreign" / f"rank{rank}.pt.trace.json.gz")


def foreign(mesh: Mesh, place: Path) -> None:
    """The same, recorded by a profiler that knows nothing of gpurun."""
    with profile() as profiler:
        mesh.step()
    export(profiler.export_chrome_trace, place)
