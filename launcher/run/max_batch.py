"""`global_batch: max`: every device tries batches in a process of its own, which may run out of memory."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import MachineError, VariantError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.plan.build import device_env
from gpurun.launcher.plan.combination import max_batch
from gpurun.launcher.plan.devices import job_devices
from gpurun.launcher.plan.launch_config import visible_names
from gpurun.launcher.processes.pool import OPTIMIZING, StartRequest, WorkerPool
from gpurun.launcher.rundir.files import read_lines, write_json
from gpurun.launcher.rundir.records import Attempt, MaxBatch, MaxBatchConfig
from gpurun.launcher.strategies import STRATEGIES, Strategy
from gpurun.launcher.units import GIB, format_count, plural

MAX_STARTS = 40
"""Processes that one device may use up; doubling and halving need fewer attempts than that."""
MARGIN = 0.05
"""Share of the fitting batch to leave free, for fragmentation and communication buffers."""
CPU_SHARE = 0.8
"""Share of the machine's free memory that all CPU devices together may use."""
POLL_S = 0.1


def wants_max(spec: JobSpec) -> bool:
    """Whether the batch has to be found before the job can be planned."""
    return spec.global_batch == "max" and not spec.compare.global_batch


def with_batch(spec: JobSpec, found: MaxBatch) -> JobSpec:
    """The job with the batch that was found, in place of `max`."""
    return replace(spec, global_batch=found.global_batch)


def find_max_batch(
    spec: JobSpec, machine: Machine, pool: WorkerPool, job_dir: Path, say: Callable[[str], None]
) -> MaxBatch:
    """The largest batch that every device holds and every split of the job allows.

    Raises:
        MachineError: a device can't hold the model and one sample.
        VariantError: the workload fails for another reason, or takes too long.
    """
    devices = job_devices(spec, machine)
    pool.preload(OPTIMIZING)  # processes that run out of memory are started again and again
    say(f"global_batch: max: trying batches on {' '.join(devices)}")
    rooms, step_s = [Room(1 << 60)] * len(devices), 0.0
    with tempfile.TemporaryDirectory() as name:
        for number, (precision, params) in enumerate(_kinds(spec)):
            for together in _ways(spec, devices):
                directory = Path(name) / f"{number}-{together:d}"
                search = Search(spec, machine, pool, job_dir, directory, devices, precision, params, together)
                rooms = [min(room, found) for room, found in zip(rooms, search.run(), strict=True)]
                step_s = max(step_s, search.step_s)
    caps = [room.samples for room in rooms]
    batch = max_batch(replace(spec, global_batch=1), caps)
    held = ", ".join(f"{room} on {device}" for room, device in zip(rooms, devices, strict=True))
    say(f"global_batch: max is {format_count(batch)}: there is room for {held}{in_micro_batches(spec)}")
    return MaxBatch(batch, tuple(caps), step_s)


@dataclass(frozen=True, order=True)
class Room:
    """How many samples a device can hold, less a margin."""

    samples: int
    open_end: str = ""
    """Why no more was tried, if something else than memory ended the search."""

    def __str__(self) -> str:
        samples = format_count(self.samples)
        return f"at least {samples} ({self.open_end})" if self.open_end else samples


def _kinds(spec: JobSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The combinations of settings that change the memory of a step."""
    precisions = spec.compare.precision or (spec.precision,)
    params = [{**spec.params, **more} for more in spec.compare.params or ({},)]
    return itertools.product(precisions, params)


def _strategies(spec: JobSpec) -> list[Strategy]:
    return [STRATEGIES[name] for name in spec.compare.strategy or (spec.strategy,)]


def _ways(spec: JobSpec, devices: Sequence[str]) -> list[bool]:
    """Whether to try all devices in one process, too: on GPUs, the first one then gathers what all have made.

    Only where nothing else is wanted, that is the only way.
    """
    if accelerator_of(devices[0]).is_host or len(set(devices)) == 1:
        return [False]
    return sorted({strategy.has_replicas for strategy in _strategies(spec)})


def _accumulate(spec: JobSpec) -> int:
    """Micro-batches of a device's samples: the fewest of the job's values, which need the most memory."""
    fewest: int = min(spec.compare.accumulate or (spec.accumulate,))
    return fewest


def in_micro_batches(spec: JobSpec) -> str:
    """`, in 2 micro-batches, the fewest of those compared`; empty without micro-batches."""
    number, is_varied = _accumulate(spec), len(set(spec.compare.accumulate)) > 1
    if number == 1 and not is_varied:
        return ""
    return f", in {plural(number, 'micro-batch')}" + (", the fewest of those compared" if is_varied else "")


@dataclass(frozen=True)
class Search:
    """The search on all devices of a job at once, since CPU devices share the machine's memory."""

    spec: JobSpec
    machine: Machine
    pool: WorkerPool
    job_dir: Path
    directory: Path
    devices: tuple[str, ...]
    precision: str
    params: Mapping[str, Any]
    together: bool = False
    """Whether one process has all devices."""

    @property
    def num_processes(self) -> int:
        return 1 if self.together else len(self.devices)

    def run(self) -> list[Room]:
        """The samples that each device can hold.

        Raises:
            MachineError: a device can't hold one sample.
            VariantError: the workload fails for another reason, or takes too long.
        """
        deadline = time.monotonic() + self.spec.timeout_s
        open_ = set(range(self.num_processes))
        try:
            for _ in range(MAX_STARTS):
                self.pool.start([self.request(index) for index in sorted(open_)])
                self.wait(len(open_), deadline)
                open_ = {index for index in open_ if not self.is_done(index)}
                if not open_:
                    break
        finally:
            self.pool.stop(0.0)
        found = [self.found(index) for index in range(self.num_processes)]
        return found * len(self.devices) if self.together else found

    @property
    def step_s(self) -> float:
        """A step of the largest batch that fits, on the slowest device."""
        return max(largest_step_s(self.attempts(index)) for index in range(self.num_processes))

    def wait(self, num_ranks: int, deadline: float) -> None:
        """Waits until all processes have ended, in whatever way."""
        ended = 0
        while ended < num_ranks:
            ended += len(self.pool.poll(POLL_S))
            if time.monotonic() > deadline:
                raise VariantError(self.timeout_text())

    def is_done(self, index: int) -> bool:
        """Whether a device's search has finished.

        Raises:
            VariantError: the workload fails for another reason than memory.
            MachineError: not even one sample fits, or the process was killed before it began.
        """
        attempts = self.attempts(index)
        last = attempts[-1] if attempts else Attempt("", 0)
        if last.outcome == "failed":
            raise VariantError(f"no batch could be tried on {self.devices[index]}: {last.message}")
        if last.outcome != "done" and bounds(attempts)[1] == 1:
            raise MachineError(self.too_small(index))
        if not attempts:
            raise MachineError(f"{self.too_small(index)}\n    its process was killed while building it")
        return last.outcome == "done"

    def found(self, index: int) -> Room:
        attempts = self.attempts(index)
        fits, fails = bounds(attempts)
        if not fits:
            raise MachineError(self.too_small(index))
        # Of the smallest batch that failed for another reason than memory, or of the end of the search.
        failed = [one for one in attempts if one.batch == fails and one.message]
        reasons = [f"{format_count(one.batch)} fail: {one.message}" for one in failed]
        ended = [one.message for one in attempts[-1:] if one.outcome == "done" and one.message]
        return Room(with_margin(fits), next(iter([*reasons, *ended]), ""))

    def timeout_text(self) -> str:
        """That the time is up, what is known by then, and what to do."""
        fitted = [bounds(self.attempts(index))[0] for index in range(self.num_processes)]
        known = ", ".join(
            f"{format_count(fits)} on {device}" for fits, device in zip(fitted, self.devices, strict=False)
        )
        return (
            f"the largest batch was not found within {self.spec.timeout_s:g} s\n"
            f"    so far these batches fit: {known}; raise `timeout`, or set a number instead of `max`"
        )

    def too_small(self, index: int) -> str:
        return (
            f"{self.devices[index]} can't hold the model and 1 sample\n"
            "    use a smaller model, a lower precision, or other devices"
        )

    def attempts(self, index: int) -> list[Attempt]:
        return list(read_lines(self.path(index), Attempt))

    def path(self, index: int) -> Path:
        return self.directory / f"{index}.jsonl"

    def request(self, index: int) -> StartRequest:
        """The process of one device, which continues from what earlier ones have found."""
        fits, fails = bounds(self.attempts(index))
        config = self.directory / f"{index}.json"
        write_json(config, self.config(index, fits, fails))
        return StartRequest(
            rank=index,
            args=(str(config),),
            env=dict(device_env(self.own(index), index, self.machine)),
            log=str(self.directory / f"{index}.log"),
            cwd=str(self.job_dir),
            entry="gpurun.launcher.worker.training.max_batch_attempts:main",
        )

    def own(self, index: int) -> tuple[str, ...]:
        """The devices of one process."""
        return self.devices if self.together else (self.devices[index],)

    def config(self, index: int, fits: int, fails: int | None) -> MaxBatchConfig:
        num_devices, kind = len(self.devices), accelerator_of(self.devices[0])
        views = self.spec.compare.gradient_as_bucket_view or (self.spec.gradient_as_bucket_view,)
        share = CPU_SHARE * self.machine.memory_available_gib * GIB / num_devices
        return MaxBatchConfig(
            workload=str(self.spec.workload),
            job_dir=str(self.job_dir),
            params=self.params,
            devices=visible_names(self.own(index)),
            index=index,
            num_devices=num_devices,
            precision=self.precision,
            accumulate=_accumulate(self.spec),
            keeps_gradients=not self.together and any(one.keeps_gradients for one in _strategies(self.spec)),
            gradients_are_views=all(views),
            seed=self.spec.seed,
            threads=max(1, self.machine.cpu_cores // num_devices),
            limit_bytes=int(share) if kind.is_host else None,
            attempts=str(self.path(index)),
            fits=fits,
            fails=fails,
        )


def bounds(attempts: Sequence[Attempt]) -> tuple[int, int | None]:
    """The largest batch that fit, and the smallest that did not: one that only began killed its process."""
    fits = max((one.batch for one in attempts if one.outcome == "fits"), default=0)
    ended = {one.batch for one in attempts if one.outcome == "fits"}
    fails = [one.batch for one in attempts if one.outcome in ("begins", "fails") and one.batch not in ended]
    return fits, min(fails, default=None)


def largest_step_s(attempts: Sequence[Attempt]) -> float:
    """What a step of the largest batch that fits took; 0 where none does."""
    fits = [one for one in attempts if one.outcome == "fits"]
    return max(fits, key=lambda one: one.batch).step_s if fits else 0.0


def with_margin(fits: int) -> int:
    """The samples to use on a device that held `fits`."""
    return max(1, int(fits * (1 - MARGIN))) if fits else 0
