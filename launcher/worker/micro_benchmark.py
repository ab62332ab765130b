"""Measures a micro-benchmark: every round runs a block of each of its cases, in a fresh random order."""

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.plan.rank_config import LaunchConfig
from gpurun.launcher.rundir.files import append_lines
from gpurun.launcher.rundir.records import PointRecord
from gpurun.launcher.stats.core_waiting import QUEUE_PERCENT, Waiting, queued_text, waiting
from gpurun.launcher.strategies import STRATEGIES
from gpurun.launcher.worker.accelerators.clock import no_garbage_collection
from gpurun.launcher.worker.accelerators.runtime import runtime_of
from gpurun.launcher.worker.base.failure import users_code
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.precision import PRECISIONS
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters.cpu_time import BlockNoise, NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter
from gpurun.workloads.micro_benchmarks import BenchmarkCase, Probe, Site

BLOCK_MS = 10.0
"""A block repeats its case for at least this long; a case that is longer runs once."""
MAX_REPETITIONS = 1000
WARMUP_REPETITIONS = 2
BUSY = "these times include interference from other programs. Stop them, then run this again"


@dataclass(frozen=True)
class ProbeRounds:
    """One micro-benchmark on one rank; every rank runs the same sequence of blocks."""

    probe: Probe
    site: Site
    journal: Journal
    peers: Peers
    noise: NoiseMeter
    """Measures whether other processes had the cores meanwhile."""
    load: LoadMeter
    """Measures whether clocks were throttled."""
    now_ns: Callable[[], int] = time.perf_counter_ns

    @property
    def config(self) -> LaunchConfig:
        return self.journal.config

    def run(self) -> None:
        """Measures all cases; what the site can't measure becomes a warning next to the figures."""
        (variant,) = self.config.variants
        self.journal.enter("build", variant.id)
        with users_code(f"{self.config.workload} can't be set up", "cases to measure", None):
            found = self.probe.cases(self.site)
        self.journal.add_facts(variant.id, warnings=found.notes)
        self.journal.enter("warmup", variant.id)
        repetitions = [self.calibrate(case) for case in found.cases]
        start_ns = time.perf_counter_ns()
        self.noise.clear()
        self.load.clear()
        for round_ in range(1, self.config.rounds + 1):
            self.journal.enter("round", variant.id, round_)
            with self.noise.counting(), self.load.counting():
                self.run_round(variant.id, round_, found.cases, repetitions)
        affected = self.interference(self.noise.per_step(1), time.perf_counter_ns() - start_ns)
        self.journal.add_facts(variant.id, warnings=(*found.notes, *affected))

    def interference(self, noise: BlockNoise, lasted_ns: int) -> Iterator[str]:
        """Why these times include other programs' load, by rank; all ranks must call it."""
        waited = self.waiting(noise, max(lasted_ns, 1))
        for rank, percent in enumerate(self.peers.gather(100 * waited.most)):
            if percent > QUEUE_PERCENT and accelerator_of(self.site.device.type).is_host:  # a GPU goes on
                yield f"rank {rank} waited for a free core in {queued_text(percent)} of the time: {BUSY}"
        for name, gpu in zip(self.site.names, self.load.loads(), strict=False):
            said = f"the clock of {name} was throttled: {gpu.throttled}" if gpu.throttled else ""
            yield from filter(None, self.peers.gather(said))

    def waiting(self, noise: BlockNoise, lasted_ns: int) -> Waiting:
        """How much of the time this rank waited for other programs; all ranks must call it."""
        cores = f"{os.uname().nodename} {sorted(os.sched_getaffinity(0))}"
        rank_ns = (noise.cpu_ns or 0) + (noise.children_ns or 0)
        run_ns = sum(ns for rank_cores, ns in self.peers.gather((cores, rank_ns)) if rank_cores == cores)
        # The cores' time that isn't this rank's own is other load, but for its children and the other ranks.
        load_ns = None if noise.others_ns is None else noise.others_ns - (run_ns - (noise.cpu_ns or 0))
        load = None if load_ns is None else load_ns / lasted_ns
        own_ns = run_ns - (noise.thread_cpu_ns or 0)
        return waiting((noise.queue_ns or 0) / lasted_ns, load, own_ns / lasted_ns)

    def calibrate(self, case: BenchmarkCase) -> int:
        """How often a block repeats the case; the same on all ranks."""
        for _ in range(WARMUP_REPETITIONS):
            time_ns = self.time_ns(case, 1)
        (slowest_ns,) = self.peers.maximum([time_ns])
        return min(MAX_REPETITIONS, max(1, math.ceil(BLOCK_MS * 1e6 / max(slowest_ns, 1.0))))

    def run_round(
        self, variant: str, round_: int, cases: Sequence[BenchmarkCase], repetitions: Sequence[int]
    ) -> None:
        """A block of every case; rank 0 records the slowest rank's times."""
        shuffled = list(range(len(cases)))
        random.Random(f"{self.config.draw}/{self.config.launch}/{round_}").shuffle(shuffled)
        times_ns = [self.time_ns(cases[i], repetitions[i]) for i in shuffled]
        if shuffled:
            self.sample(cases[shuffled[-1]], repetitions[shuffled[-1]])
        slowest_ns = self.peers.maximum(times_ns) if times_ns else []
        if self.journal.rank == 0:
            pairs = zip(shuffled, slowest_ns, strict=True)
            records = [self.record(round_, cases[i], repetitions[i], time_ns) for i, time_ns in pairs]
            append_lines(self.journal.run.points(variant), records)

    def time_ns(self, case: BenchmarkCase, repetitions: int) -> float:
        """This rank's mean time of one repetition, in ns, from a start that all ranks share.

        By the host's clock, which waits for the devices at both ends: in a block of 10 ms that is negligible,
        and it is right for whichever device's stream is used.
        """
        with no_garbage_collection():
            self.synchronize()
            self.peers.barrier()
            start_ns = self.now_ns()
            for _ in range(repetitions):
                case.run()
            self.synchronize()
            return (self.now_ns() - start_ns) / repetitions

    def sample(self, case: BenchmarkCase, repetitions: int) -> None:
        """Samples the GPUs' drivers while they work: in a block that isn't timed, as asking takes time."""
        if self.load.gpus:
            for _ in range(repetitions):
                case.run()
            self.load.sample()
            self.synchronize()

    def synchronize(self) -> None:
        for device in self.site.devices:
            runtime_of(device).synchronize(device)

    def record(self, round_: int, case: BenchmarkCase, repetitions: int, time_ns: float) -> PointRecord:
        return PointRecord(
            launch=self.config.launch,
            round=round_,
            series=case.series,
            unit=self.probe.unit,
            size=case.size,
            time_ns=time_ns,
            repetitions=repetitions,
            nbytes=case.nbytes,
            flops=case.flops,
            bus_factor=case.bus_factor,
        )


def site_of(config: LaunchConfig, rank: int) -> Site:
    """The devices and the data type that this rank measures; sets the process's mode of float32 products."""
    precision = PRECISIONS[config.precision]
    precision.apply()
    positions = STRATEGIES[config.strategy].positions_of(rank, len(config.devices))
    return Site(
        devices=tuple(torch.device(config.devices[position]) for position in positions),
        names=tuple(config.device_names[position] for position in positions),
        world_size=config.world_size,
        dtype=precision.autocast_dtype or precision.weights,
    )
