"""A machine with three GPUs on which every check of a self-test is ok: a driver and runs that are made up."""

from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from gpurun.launcher.compare.figures.ranks import RankFigures
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.machine.accelerators import CUDA
from gpurun.launcher.machine.gpus.nvml import GpuHealth, inspect_health
from gpurun.launcher.machine.host import Machine, Topology
from gpurun.launcher.rundir.records import DeviceFacts, PairRate, ReduceRate, StepRecord
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    GRADIENTS,
    MEASURING,
    PROGRAMS,
    TRAINING,
    Evidence,
    RanJob,
)
from gpurun.launcher.selftest.run_checks import FAULTY, NUM_STEPS, SOUND
from tests.measured import measured
from tests.unit.machine.fake_driver import UUIDS, well
from tests.unit.machine.test_host import machine

DEVICES = ("cuda:0", "cuda:1", "cuda:2")
TWO_NODES = Topology({0: (0,), 1: (1,)}, ((0,), (1,)))


def three_gpus(**driver: Any) -> Machine:
    """GPUs 0 and 1 are linked by two NVLinks, GPU 2 over PCIe; each is on a NUMA node."""
    found = machine(**driver)
    gpus = tuple(
        replace(
            gpu,
            numa_node=gpu.index % 2,
            processes=(),
            used_gib=0.5,
            utilisation_percent=0,
            power_limit_w=700.0,
            persistence=True,
        )
        for gpu in found.gpus
    )
    return replace(found, gpus=gpus, topology=TWO_NODES)


def health(**driver: Any) -> tuple[GpuHealth, ...]:
    """What NVML reports of GPUs that are well, with changes of its functions."""
    return inspect_health(range(len(DEVICES)), {}, well(**driver))


def facts(rank: int) -> DeviceFacts:
    """What a rank finds out."""
    links = {(0, 1): 45.0, (0, 2): 50.0, (1, 2): 50.0}
    return DeviceFacts(
        rank=rank,
        device=DEVICES[rank],
        name="NVIDIA H200",
        uuid=UUIDS[rank].removeprefix("GPU-"),
        clock_off=0.001,
        matrix_rows=4096,
        gflop_per_s=50_000.0 + 100 * rank,
        queue_share=0.0,
        power_w=600.0,
        energy_mj=300_000.0,
        clock_mhz=1700.0,
        pcie_link=(5, 16),
        reduces=(ReduceRate(1 << 16, 4.0), ReduceRate(1 << 28, 40.0)),
        pairs=tuple(PairRate(low, high, rate) for (low, high), rate in links.items() if low == rank),
    )


def variant(strategy: str = "ddp", split: tuple[int, ...] = (8, 8, 8), **more: Any) -> VariantResult:
    """One that was measured, with traces of all ranks."""
    ranks = tuple(
        RankFigures(rank, DEVICES[rank], None, 1.0, {}, 1.0, "trace", compute_ms=1.0, wait_ms=0.1)
        for rank in range(len(DEVICES))
    )
    traced = {"devices": DEVICES, "gradient_error": 2e-7, "gradient_reference": "one device", "ranks": ranks}
    return measured(f"{strategy}-{split}", split, strategy=strategy, **{**traced, **more})


def faulty(fault: str, status: str, reason: str | None) -> VariantResult:
    """The variant in which the last rank misbehaves."""
    return variant(split=(FAULTY.get(fault, SOUND),) * 3, status=status, reason=reason)


def late() -> VariantResult:
    """The last rank is 100 ms late: the others wait so long."""
    found = faulty("late", "ok", None)
    ranks = tuple(replace(rank, wait_ms=0.2 if rank.rank == 2 else 100.3) for rank in found.ranks)
    return replace(found, ranks=ranks)


def program(name: str) -> VariantResult:
    return variant("script", (), id=name, varied={"args": [name]}, ranks=(), global_batch=None)


def steps(name: str) -> dict[int, tuple[StepRecord, ...]]:
    """What all ranks record of a program."""
    timed = StepRecord("01", 1, 0, 0, "timed", 1000, {}, peak_bytes=1 << 20)
    last = changed(timed, kind="skipped") if name == "skipped-step" else timed
    return dict.fromkeys(range(len(DEVICES)), (*[timed] * (NUM_STEPS[name] - 1), last))


SLEEPING = "rank 2 is in `misbehave` (misbehaving_model.py:50); ranks 0, 1 wait in all_reduce #45"


def evidence() -> Evidence:
    """All of it."""
    names = tuple(NUM_STEPS)
    failing = (
        late(),
        faulty("sound", "ok", None),
        faulty("oom", "oom", "rank 2 ran out of memory: CUDA out of memory"),
        faulty("killed", "failed", "rank 2 was killed by SIGKILL"),
        faulty("asleep", "hung", f"no step completed for 12 s: {SLEEPING}"),
    )
    return Evidence(
        kind=CUDA,
        devices=DEVICES,
        machine=three_gpus(),
        torch="2.13.0+cu130",
        visible=None,
        health=health(),
        free_gib=900.0,
        facts=tuple(facts(rank) for rank in range(len(DEVICES))),
        used_gib=dict.fromkeys(DEVICES, 0.0),
        jobs={
            MEASURING: RanJob((program("measuring"),)),
            TRAINING: RanJob((variant(), variant(split=(12, 6, 6)), variant("dp"))),
            GRADIENTS: RanJob((variant(precision="bf16", gradient_error=0.002),)),
            FAULTS: RanJob(failing, problem="rank 2 ran out of memory", hangs=(SLEEPING,)),
            PROGRAMS: RanJob(tuple(map(program, names)), steps={name: steps(name) for name in names}),
        },
    )
