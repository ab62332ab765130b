"""Jobs of several ranks and streams that are computed, not run: their traces, and their time without a part.

Written independently of the analysis: a rank's program is executed instruction by instruction; a part is left
out by running the program again with that part's times at zero.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.trace.trace_files import Event, kernel, rank_info, span, write

LATENCY_NS = 5_000
CALL_NS = 3_000
SYNC_NS = 2_000
LOADS_NS = 1_000_000
"""A launch that takes longer loads a module."""
COMPUTE_STREAM, COPY_STREAM, COMM_STREAM = 7, 13, 20
NEVER = -1


@dataclass
class Work:
    """GPU work of one rank."""

    stream: int
    name: str
    part: str
    ns: int
    launched: int
    """When its launching call ends."""
    correlation: int
    after: list[Work]
    key: tuple[Any, ...] | None = None
    """Of a collective: equal on all ranks."""
    start: int = NEVER
    end: int = NEVER


@dataclass(frozen=True)
class Instruction:
    """What a rank's program does next."""

    what: str
    """cpu, launch, collective, wait or sync."""
    part: str = "host"
    ns: int = 0
    stream: int = COMPUTE_STREAM
    other: int = COMM_STREAM
    name: str = "kernel"
    key: tuple[Any, ...] = ()
    call_ns: int = CALL_NS
    """How long its launching call takes."""


@dataclass
class Rank:
    """A rank while its program runs."""

    number: int
    now: int
    work: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    pending: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    events: list[Event] = field(default_factory=list)
    calls: int = 0


class Job:
    """Programs of all ranks, and their execution."""

    def __init__(self, programs: list[list[list[Instruction]]], starts: list[int], recorded: bool) -> None:
        self.programs = programs
        """By rank and step."""
        self.starts = starts
        self.recorded = recorded
        """Whether the trace has the GPU's records of waits."""

    def run(self, without: str | None = None) -> list[Rank]:
        """Executes all programs; `without` a part of their times."""
        ranks = [Rank(number, start) for number, start in enumerate(self.starts)]
        self.size: dict[tuple[Any, ...], int] = defaultdict(int)
        for program in self.programs:
            for key in {each.key for step in program for each in step if each.key}:
                self.size[key] += 1
        self.parts: dict[tuple[Any, ...], list[Work]] = defaultdict(list)
        running = {rank.number: self._execute(rank, without) for rank in ranks}
        while running:
            for number, steps in list(running.items()):
                if next(steps, None) is None:
                    del running[number]
        for rank in ranks:
            for works in rank.work.values():
                for work in works:
                    assert self._end(work) is not None
        return ranks

    def length_ns(self, without: str | None = None) -> int:
        """From the first rank's start to the end of all."""
        ranks = self.run(without)
        ends = [work.end for rank in ranks for works in rank.work.values() for work in works]
        return max([*ends, *(rank.now for rank in ranks)]) - min(self.starts)

    def _execute(self, rank: Rank, without: str | None) -> Iterator[bool]:
        for number, step in enumerate(self.programs[rank.number]):
            began = rank.now
            for each in step:
                ns = 0 if each.part == without else each.ns
                call_ns = 0 if without == _part_of_call(each) else each.call_ns
                if each.what == "cpu":
                    self._cpu(rank, each, ns)
                elif each.what == "wait":
                    self._wait(rank, each, call_ns)
                elif each.what == "sync":
                    rank.calls += 1
                    call = rank.calls
                    begun = rank.now
                    while (done := self._done(rank, each.stream)) is None:
                        yield True
                    overhead = 0 if without == "host" else SYNC_NS
                    rank.now = max(rank.now, done) + overhead
                    self._call(rank, "cudaStreamSynchronize", begun, rank.now - begun, call)
                    self._record(rank, "Stream Sync", call, begun, each.stream)
                else:
                    self._launch(rank, each, ns, call_ns)
            rank.events.append(
                span("user_annotation", f"ProfilerStep#{number}", began / 1000, (rank.now - began) / 1000)
            )

    def _cpu(self, rank: Rank, each: Instruction, ns: int) -> None:
        if each.part == "input":
            name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
            rank.events.append(span("user_annotation", name, rank.now / 1000, ns / 1000))
        rank.now += ns

    def _wait(self, rank: Rank, each: Instruction, call_ns: int) -> None:
        """The stream's next work waits for what the other stream has been given so far."""
        rank.calls += 2
        self._call(rank, "cudaEventRecord", rank.now, 0, rank.calls - 1)
        self._call(rank, "cudaStreamWaitEvent", rank.now, call_ns, rank.calls)
        self._record(rank, "Stream Wait Event", rank.calls, rank.now, each.stream, each.other)
        rank.now += call_ns
        rank.pending[each.stream] += rank.work[each.other][-1:]

    def _launch(self, rank: Rank, each: Instruction, ns: int, call_ns: int) -> None:
        rank.calls += 1
        before = rank.work[each.stream][-1:]
        work = Work(
            each.stream, each.name, each.part, ns, rank.now + call_ns, rank.calls,
            [*before, *rank.pending.pop(each.stream, [])], each.key or None,
        )  # fmt: skip
        rank.work[each.stream].append(work)
        if work.key is not None:
            self.parts[work.key].append(work)
        self._call(rank, "cudaLaunchKernel", rank.now, call_ns, rank.calls)
        rank.now += call_ns

    def _call(self, rank: Rank, name: str, start: int, ns: int, correlation: int) -> None:
        rank.events.append(span("cuda_runtime", name, start / 1000, ns / 1000, correlation=correlation))

    def _record(self, rank: Rank, name: str, call: int, start: int, stream: int, other: int = -1) -> None:
        if self.recorded:
            waits = {"wait_on_stream": other, "wait_on_cuda_event_record_corr_id": call - 1}
            args = {"stream": stream, "correlation": call, "device": 0} | (waits if other >= 0 else {})
            rank.events.append(span("cuda_sync", name, start / 1000, 0.001, stream, **args) | {"pid": 0})

    def _done(self, rank: Rank, stream: int) -> int | None:
        works = rank.work[stream]
        return self._end(works[-1]) if works else 0

    def _arrival(self, work: Work) -> int | None:
        ends = [self._end(each) for each in work.after]
        if None in ends:
            return None
        return max([work.launched + LATENCY_NS, *(each for each in ends if each is not None)])

    def _end(self, work: Work) -> int | None:
        """When the work ends; `None` as long as another rank hasn't launched its part."""
        if work.end != NEVER:
            return work.end
        start = self._arrival(work)
        if start is None:
            return None
        work.start = start
        if work.key is None:
            work.end = start + work.ns
            return work.end
        others = self.parts[work.key]
        arrivals = [self._arrival(each) for each in others] if len(others) == self.size[work.key] else [None]
        if None in arrivals:
            return None
        work.end = max(each for each in arrivals if each is not None) + work.ns
        return work.end

    def write(self, directory: Path, skews_us: list[float], drifts: list[float] | None = None) -> None:
        """The ranks' traces, each on its own clock."""
        for rank in self.run():
            events = [*rank.events, *self._kernels(rank)]
            rate = 1 + (drifts[rank.number] if drifts else 0.0)
            shifted = [
                {**each, "ts": round(each["ts"] * rate + skews_us[rank.number], 3), "dur": each["dur"] * rate}
                for each in events
            ]
            write(
                directory / f"rank{rank.number}.json", shifted, **rank_info(rank.number, len(self.programs))
            )

    def _kernels(self, rank: Rank) -> Iterator[Event]:
        for works in rank.work.values():
            for work in works:
                where: dict[str, Any] = {"stream": work.stream, "correlation": work.correlation}
                start_us, length_us = work.start / 1000, (work.end - work.start) / 1000
                if work.part == "copies":
                    event = kernel("Memcpy HtoD (Pinned -> Device)", start_us, length_us, **where, bytes=1000)
                    yield event | {"cat": "gpu_memcpy"}
                elif work.key is None:
                    yield kernel(work.name, start_us, length_us, **where)
                else:
                    yield kernel(
                        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                        start_us,
                        length_us,
                        **where,
                        **_facts(work),
                    )


def _part_of_call(each: Instruction) -> str:
    return "one-off" if each.call_ns >= LOADS_NS else "host"


def _facts(work: Work) -> dict[str, Any]:
    assert work.key is not None
    ranks, sequence = work.key
    return {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "dtype": "Float",
        "Process Group Name": "dp",
        "Process Group Ranks": str(list(ranks)),
        "Group size": len(ranks),
        "Seq": sequence,
    }


def draw(seed: int) -> tuple[Job, list[float]]:
    """A job and its ranks' clocks, drawn from a seed."""
    chance = random.Random(seed)
    num_ranks = chance.choice([1, 2, 3, 4, 6])
    slow = [chance.choice([1.0, 1.0, 1.5]) for _ in range(num_ranks)]
    shape = {
        "layers": chance.randint(3, 9),
        "kernel": chance.choice([10_000, 60_000, 300_000]),
        "cpu": chance.choice([5_000, 20_000, 120_000]),
        "input": chance.choice([0, 0, 500_000, 3_000_000]),
        "copy": chance.choice([0, 200_000]),
        "transfer": chance.choice([20_000, 200_000, 1_000_000]),
        "sync": chance.random() < 0.5,
        "calls": chance.choice(
            [[CALL_NS], [50_000, 400_000, 900_000], [300_000, 300_000, 300_000, 3_000_000]]
        ),
        "steps": 2,
    }
    if shape["copy"] and seed % 2:  # while a call runs, only a record shows what waits for a copy
        shape["calls"] = [CALL_NS]
    programs = [_program(chance, shape, number, num_ranks, slow[number]) for number in range(num_ranks)]
    starts = [1_000_000 + chance.randint(0, 400_000) for _ in range(num_ranks)]
    skews = [round(chance.uniform(-30e6, 30e6), 3) for _ in range(num_ranks)]
    return Job(programs, starts, recorded=seed % 2 == 0), [each + 60e6 for each in skews]


def _program(
    chance: random.Random, shape: dict[str, Any], number: int, num_ranks: int, slow: float
) -> list[list[Instruction]]:
    everyone = tuple(range(num_ranks))
    half = num_ranks // 2 if num_ranks % 2 == 0 and num_ranks > 2 else num_ranks
    group = tuple(rank for rank in everyone if rank // half == number // half)
    steps: list[list[Instruction]] = []
    sequence = 0
    for _ in range(shape["steps"]):
        step = [Instruction("cpu", "input", int(shape["input"] * chance.uniform(0.5, 1.5)))]
        if shape["copy"]:
            copy = Instruction("launch", "copies", shape["copy"], COPY_STREAM, name="copy")
            step += [copy, Instruction("wait", stream=COMPUTE_STREAM, other=COPY_STREAM)]
        layers = shape["layers"]
        for layer in range(2 * layers):
            step.append(Instruction("cpu", "host", int(shape["cpu"] * chance.uniform(0.5, 1.5))))
            ns = int(shape["kernel"] * chance.uniform(0.5, 1.5) * slow)
            call_ns = chance.choice([CALL_NS] * 6 + shape["calls"])
            step.append(Instruction("launch", "compute", ns, name=f"layer{layer % 3}", call_ns=call_ns))
            if num_ranks > 1 and layer >= layers and layer % 2:
                step.append(Instruction("wait", stream=COMM_STREAM, other=COMPUTE_STREAM))
                ranks = everyone if layer % 4 == 1 else group
                key = (ranks, sequence)
                transfer = shape["transfer"] + 1000 * sequence
                step.append(Instruction("collective", "transfer", transfer, COMM_STREAM, key=key))
                sequence += 1
        if num_ranks > 1:
            step.append(Instruction("wait", stream=COMPUTE_STREAM, other=COMM_STREAM))
        step.append(Instruction("launch", "compute", int(shape["kernel"] * slow), name="optimizer"))
        if shape["sync"]:
            step.append(Instruction("sync", stream=COMPUTE_STREAM))
        steps.append(step)
    return steps


PLANTED = ("larger batch", "slower rank", "slow link", "launching", "input", "one-off")


_USUAL: dict[str, Any] = {
    "kernel": 200_000,
    "cpu": 10_000,
    "transfer": 50_000,
    "input": 20_000,
    "call": CALL_NS,
    "own": 1.0,
    "first": 0,
    "optimizer": 50_000,
    "name": "layer",
}


@dataclass(frozen=True)
class Planted:
    """A job that would be well but for one cause."""

    job: Job
    without: int
    """The length in ns of the job without it."""
    skews_us: list[float]
    cause: str
    rank: int
    """The rank that it is on; of most causes all are."""


def plant(seed: int) -> Planted:
    """Ranks with the same program, in which one thing takes long."""
    chance = random.Random(seed)
    cause = PLANTED[seed % len(PLANTED)]
    num_ranks = chance.randint(1 if cause in ("launching", "input", "one-off") else 2, 8)
    rank, buckets, factor = chance.randrange(num_ranks), chance.randint(1, 4), chance.uniform(1.5, 3.0)
    changes: dict[str, dict[str, Any]] = {
        "larger batch": {"own": factor},
        "slower rank": {"own": factor},
        "slow link": {"transfer": int(2_000_000 * factor)},
        "launching": {"cpu": int(400_000 * factor)},
        "input": {"input": int(3_000_000 * factor)},
        "one-off": {"call": int(4_000_000 * factor)},
    }
    of_one = cause in ("larger batch", "slower rank", "one-off")

    def job(changed: bool) -> Job:
        is_changed = [changed and (not of_one or number == rank) for number in range(num_ranks)]
        programs = [
            _program_of(
                random.Random(seed), [_USUAL | (changes[cause] if each else {})] * 2, num_ranks, buckets
            )
            for each in is_changed
        ]
        return Job(programs, [1_000_000] * num_ranks, recorded=True)

    part = {"slow link": "transfer", "launching": "host", "input": "input", "one-off": "one-off"}.get(cause)
    whole = job(True)
    without = job(False).length_ns() if part is None else whole.length_ns(part)
    return Planted(whole, without, [60e6 + 1e4 * number for number in range(num_ranks)], cause, rank)


UNEVEN = ("one more kernel", "longer optimizer", "other kernels", "slow node", "another rank in each step")


def plant_uneven(seed: int) -> tuple[Planted, tuple[int, ...]]:
    """Ranks of which some have more to do, beside transfers that may hide the waiting; and which do.

    They are empty where it is another one in each step. As it should be, each has as much as the others.
    """
    chance = random.Random(seed)
    cause, num_steps = UNEVEN[seed % len(UNEVEN)], chance.choice([4, 6])
    num_ranks = chance.choice([4, 6, 8] if cause == "slow node" else [2, 3, 4, 8])
    buckets, factor = chance.randint(1, 4), chance.uniform(1.4, 2.0)
    times = _USUAL | {"transfer": chance.choice([50_000, 600_000, 900_000])}
    work_ns = int(8 * buckets * times["kernel"] * (factor - 1))
    late = tuple(sorted(chance.sample(range(num_ranks), num_ranks // 2 if cause == "slow node" else 1)))
    change: dict[str, Any] = {
        "one more kernel": {"first": work_ns},
        "longer optimizer": {"optimizer": times["optimizer"] + work_ns},
        "other kernels": {"own": factor, "name": "larger_layer"},
    }.get(cause, {"own": factor})

    def job(changed: bool) -> Job:
        def times_of(rank: int, step: int) -> dict[str, Any]:
            is_late = rank in late if cause != UNEVEN[-1] else rank == step % num_ranks
            return times | (change if changed and is_late else {})

        programs = [
            _program_of(
                random.Random(seed), [times_of(rank, step) for step in range(num_steps)], num_ranks, buckets
            )
            for rank in range(num_ranks)
        ]
        return Job(programs, [1_000_000] * num_ranks, recorded=True)

    skews_us = [60e6 + 1e4 * number for number in range(num_ranks)]
    planted = Planted(job(True), job(False).length_ns(), skews_us, cause, late[0])
    return planted, () if cause == UNEVEN[-1] else late


def _program_of(
    chance: random.Random, steps: Sequence[dict[str, Any]], num_ranks: int, buckets: int
) -> list[list[Instruction]]:
    """Steps of a loop with these times; gradients are summed in so many buckets."""
    layers, everyone, found = 4 * buckets, tuple(range(num_ranks)), []
    shares = [chance.uniform(0.5, 1.5) for _ in range(2 * layers)]
    for number, times in enumerate(steps):
        step = [Instruction("cpu", "input", times["input"])]
        if times["first"]:
            step.append(Instruction("launch", "compute", times["first"], name="first"))
        for layer, share in enumerate(shares):
            call_ns = times["call"] if number == 0 and layer == 1 else CALL_NS
            ns = int(times["kernel"] * times["own"] * share)
            step.append(Instruction("cpu", "host", times["cpu"]))
            name = f"{times['name']}{layer}"
            step.append(Instruction("launch", "compute", ns, name=name, call_ns=call_ns))
            if num_ranks > 1 and layer >= layers and layer % 4 == 3:
                key = (everyone, number * buckets + layer // 4)
                step.append(Instruction("wait", stream=COMM_STREAM, other=COMPUTE_STREAM))
                step.append(Instruction("collective", "transfer", times["transfer"], COMM_STREAM, key=key))
        if num_ranks > 1:
            step.append(Instruction("wait", stream=COMPUTE_STREAM, other=COMM_STREAM))
        step.append(Instruction("launch", "compute", times["optimizer"], name="optimizer"))
        found.append([*step, Instruction("sync", stream=COMPUTE_STREAM)])
    return found
