"""`global_batch: max`: every device tries batches in a process of its own, which may run out of memory."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpurun.launcher.errors import MachineError, VariantError
from gpurun.launcher.jobfile.model import JobSpec
from gpurun.launcher.machine.accelerators import accelerator_of
from gpurun.launcher.machine.helper_process import temporary_directory
from gpurun.launcher.machine.host import Machine
from gpurun.launcher.plan.build import device_env
from gpurun.launcher.plan.combination import max_batch
from gpurun.launcher.plan.devices import gpu_index, job_devices, share_of_cores
from gpurun.launcher.plan.estimate import LAUNCHES_TO_COMPARE
from gpurun.launcher.plan.launch_config import visible_names
from gpurun.launcher.processes.pool import OPTIMIZING, WorkerPool
from gpurun.launcher.processes.protocol import StartRequest
from gpurun.launcher.rundir.files import read_lines, write_json
from gpurun.launcher.rundir.records import MAX_STEP_S, Attempt, MaxBatch, MaxBatchConfig, NodeRooms, Room
from gpurun.launcher.strategies import STRATEGIES, Strategy
from gpurun.launcher.units import GIB, format_count, plural

MAX_STARTS = 40
"""Processes that one device may use up; doubling and halving need fewer attempts than that."""
MARGIN = 0.05
"""Share of the fitting batch to leave free, for fragmentation and communication buffers."""
SHARE_OF_MEMORY = 0.8
"""Share of a free memory that all devices on it together may use."""
STEPS_OF_LAUNCH = 30
"""Steps of each variant in a launch, about: the warm-up and some rounds."""
CHANGING_MEMORY = ("precision", "checkpointing", "optimizer", "channels_last")
"""Settings beside `params` that change the memory or the time of a step on one device."""
POLL_S = 0.1
ENDLESS = Room(1 << 40)
"""The room on a device that no variant of the job uses."""


def wants_max(spec: JobSpec) -> bool:
    """Whether the batch has to be found before the job can be planned."""
    return spec.global_batch == "max" and not spec.compare.global_batch


@dataclass(frozen=True)
class NodeDevices:
    """This machine in a job on several nodes."""

    node: int
    first: int
    """Position of its first device among those of all nodes."""
    num_devices: int
    """The number of devices of all nodes."""


def combined(spec: JobSpec, found: Sequence[NodeRooms], say: Callable[[str], None]) -> MaxBatch:
    """The batch that all nodes hold; of a job on one machine, its devices.

    Args:
        found: by node rank.
    """
    devices = [device for node in found for device in node.devices]
    rooms = [room for node in found for room in node.rooms]
    caps = [room.samples for room in rooms]
    batch = max_batch(replace(spec, global_batch=1), caps, len(found[0].rooms))
    places = zip(rooms, devices, strict=True)
    held = ", ".join(f"{room} on {device}" for room, device in places if room != ENDLESS)
    if len(rooms) > 1 and len(set(rooms)) == 1:
        held = f"{rooms[0]} on each device"
    say(f"global_batch: max is {format_count(batch)}: there is room for {held}{in_micro_batches(spec)}")
    return MaxBatch(batch, tuple(caps), max(node.step_s for node in found))


def find_rooms(
    spec: JobSpec,
    machine: Machine,
    pool: WorkerPool,
    job_dir: Path,
    say: Callable[[str], None],
    place: NodeDevices | None = None,
    check: Callable[[], object] = lambda: None,
) -> NodeRooms:
    """The largest batch that each device of this machine can hold.

    Args:
        place: of this machine in a job on several nodes.
        check: called often; what it raises ends the search.

    Raises:
        MachineError: a device can't hold the model and one sample.
        VariantError: the workload fails for another reason, or takes too long.
    """
    node = place.node if place else 0
    devices = job_devices(spec, machine, node)
    names = tuple(f"{device}@{node}" for device in devices) if place else devices
    place = place or NodeDevices(0, 0, len(devices))
    rooms, step_s = [ENDLESS] * len(devices), 0.0
    if not (ways := _ways(spec, devices, node)):
        return NodeRooms(names, tuple(rooms), step_s)
    pool.preload(OPTIMIZING)  # processes that run out of memory are started again and again
    say(f"global_batch: max: trying batches on {' '.join(names)}")
    with temporary_directory("max-batch") as files:
        for number, settings in enumerate(_kinds(spec)):
            for together in ways:
                directory = files / f"{number}-{together:d}"
                search = MaxBatchSearch(
                    spec,
                    machine,
                    pool,
                    job_dir,
                    directory,
                    devices,
                    settings,
                    place,
                    together,
                    check,
                )
                rooms = [min(room, found) for room, found in zip(rooms, search.run(), strict=True)]
                step_s = max(step_s, search.step_s)
    return NodeRooms(names, tuple(rooms), step_s)


def _kinds(spec: JobSpec) -> Iterator[dict[str, Any]]:
    """The combinations of settings that change the memory of a step."""
    values = {name: getattr(spec.compare, name) or (getattr(spec, name),) for name in CHANGING_MEMORY}
    values["params"] = [{**spec.params, **more} for more in spec.compare.params or ({},)]
    return (dict(zip(values, kind, strict=True)) for kind in itertools.product(*values.values()))


def _strategies(spec: JobSpec) -> list[Strategy]:
    return [STRATEGIES[name] for name in spec.compare.strategy or (spec.strategy,)]


def _ways(spec: JobSpec, devices: Sequence[str], node: int) -> list[bool]:
    """Whether to try all devices in one process, too: on GPUs, the first one then gathers what all have made.

    Only where nothing else is wanted, that is the only way. What is one process is on the first node.
    """
    if node > 0:
        return [False] if any(strategy.num_processes(2) > 1 for strategy in _strategies(spec)) else []
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
class MaxBatchSearch:
    """The search on all devices of a job at once, since CPU devices share the machine's memory."""

    spec: JobSpec
    machine: Machine
    pool: WorkerPool
    job_dir: Path
    directory: Path
    devices: tuple[str, ...]
    settings: Mapping[str, Any]
    place: NodeDevices
    together: bool = False
    """Whether one process has all devices."""
    check: Callable[[], object] = lambda: None
    """Called often; what it raises ends the search."""

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
            self.check()
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
        failed = (attempt for attempt in attempts if attempt.batch == fails and attempt.message)
        reasons = (f"{format_count(attempt.batch)} fail: {attempt.message}" for attempt in failed)
        end = attempts[-1] if attempts[-1].outcome == "done" else Attempt("", 0)
        return Room(end.batch or with_margin(fits), next(reasons, end.message))

    def timeout_text(self) -> str:
        """The text that the time is up, what is known by then, and what to do."""
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

    def limit_bytes(self, index: int) -> int | None:
        """A process's part of the memory that several share; `None`: a GPU's is its own, or not known."""
        device = self.devices[index]
        if accelerator_of(device).is_host:
            free_gib, num_sharing = self.machine.memory_available_gib, len(self.devices)
        else:
            gpu, num_sharing = self.machine.gpus[gpu_index(device)], self.devices.count(device)
            if self.together or num_sharing == 1 or gpu.memory_gib is None:
                return None
            free_gib = gpu.memory_gib - (gpu.used_gib or 0.0)
        return int(SHARE_OF_MEMORY * free_gib * GIB / num_sharing)

    def config(self, index: int, fits: int, fails: int | None) -> MaxBatchConfig:
        num_here, kind = len(self.devices), accelerator_of(self.devices[0])
        views = self.spec.compare.gradient_as_bucket_view or (self.spec.gradient_as_bucket_view,)
        return MaxBatchConfig(
            workload=str(self.spec.workload),
            job_dir=str(self.job_dir),
            settings=self.settings,
            devices=visible_names(self.own(index)),
            index=self.place.first + index,
            num_devices=self.place.num_devices,
            accumulate=_accumulate(self.spec),
            keeps_gradients=not self.together
            and any(strategy.has_buckets for strategy in _strategies(self.spec)),
            gradients_are_views=all(views),
            seed=self.spec.seed,
            threads=share_of_cores(num_here, self.machine),
            limit_bytes=self.limit_bytes(index),
            attempts=str(self.path(index)),
            fits=fits,
            fails=fails,
            max_step_s=most_step_s(self.spec) if kind.is_host else MAX_STEP_S,
        )


def most_step_s(spec: JobSpec) -> float:
    """The longest step of a CPU, where time limits the batch: the budget is enough for all launches."""
    num_variants = math.prod(len(values) for values in spec.compare.lists().values())
    if spec.has_fixed_size or num_variants < 2:
        return MAX_STEP_S
    return min(MAX_STEP_S, spec.budget_s / (LAUNCHES_TO_COMPARE * STEPS_OF_LAUNCH * num_variants))


def bounds(attempts: Sequence[Attempt]) -> tuple[int, int | None]:
    """The largest batch that fit, and the smallest that did not: one that only began killed its process."""
    fitting = {attempt.batch for attempt in attempts if attempt.outcome == "fits"}
    others = {attempt.batch for attempt in attempts if attempt.outcome in ("begins", "fails")}
    return max(fitting, default=0), min(others - fitting, default=None)


def largest_step_s(attempts: Sequence[Attempt]) -> float:
    """The time of a step of the largest batch that fits; 0 where none does."""
    fits = [attempt for attempt in attempts if attempt.outcome == "fits"]
    return max(fits, key=lambda attempt: attempt.batch).step_s if fits else 0.0


def with_margin(fits: int) -> int:
    """The samples to use on a device that held `fits`."""
    return max(1, int(fits * (1 - MARGIN))) if fits else 0
