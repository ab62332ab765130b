"""Small random traces, and their figures counted again, microsecond by microsecond."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import Breakdown
from tests.unit.trace.trace_files import Event, kernel, launch, rank_info, span, step, write
from tests.whole import first

RING = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
CALL = "c10d::allreduce_"
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
CLASSES = ("compute", "comm", "copies")
NAMES = {"compute": "gemm", "comm": RING, "copies": "Memcpy HtoD (Pageable -> Device)"}
IDS = 1 << 61
"""As large as some writers have them."""
NEVER = 10**9
MARKS = -1
"""The thread of the marks of steps."""
Span = tuple[int, int]


@dataclass
class Work:
    """A piece of GPU work, in µs."""

    kind: str
    start: int
    end: int
    stream: int
    launch: int | None
    thread: int = 0
    call_us: int = 1
    """How long the launching call takes."""


@dataclass
class Drawn:
    """A rank that was drawn, in µs."""

    steps: list[Span] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    ops: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, end, thread."""
    data: list[tuple[int, int, int]] = field(default_factory=list)
    gloo: list[tuple[int, int, int]] = field(default_factory=list)


def draw(chance: random.Random, on_gpu: bool) -> Drawn:
    found = Drawn()
    at = chance.randrange(40)
    for _ in range(chance.randrange(5)):
        found.steps.append((at, at + chance.randrange(60)))
        at = found.steps[-1][1] + chance.choice([0, 0, 1, 90])
    begin = chance.randrange(150)
    threads = [MARKS, *range(4)] if on_gpu else [MARKS]
    found.data = [
        (begin, begin + chance.randrange(30), threads[begin % len(threads)])
        for _ in range(chance.randrange(2))
    ]
    for thread in range(chance.randrange(1, 5)):
        nested(chance, found.ops, 10, 10 + chance.randrange(250), thread, 0)
    if not on_gpu:
        found.ops.append((0, 1 + chance.randrange(100), 9))
        for _ in range(chance.randrange(5)):
            begin = chance.randrange(200)
            found.gloo.append((begin, begin + chance.randrange(40), chance.choice([2, 20, 21])))
        return found
    for _ in range(chance.randrange(1, 14)):
        begin = chance.randrange(250)
        known = chance.random() < 0.8
        late = chance.choice([0, 1, 5, 80])
        found.work.append(
            Work(
                chance.choice(CLASSES),
                begin,
                begin + chance.choice([0, 1, 5, 30, 60]),
                chance.randrange(3),
                max(begin - late, 0) if known else None,
                chance.randrange(4),
                chance.choice([1, 1, 7, 90]),
            )
        )
    return found


def nested(
    chance: random.Random, ops: list[tuple[int, int, int]], begin: int, end: int, thread: int, depth: int
) -> None:
    """Ranges one after the other, and within each other."""
    while begin < end and depth < 4:
        last = min(begin + chance.randrange(1, 60), end)
        if chance.random() < 0.7:
            ops.append((begin, last, thread))
            nested(chance, ops, begin, last, thread, depth + 1)
        begin = last


def events_of(drawn: Drawn) -> list[Event]:
    events = [step(number % 3, start, end - start) for number, (start, end) in enumerate(drawn.steps)]
    events += [
        span("user_annotation", DATA, start, end - start, 1 if thread == MARKS else IDS + thread)
        for start, end, thread in drawn.data
    ]
    for op in drawn.ops:
        start, end, thread = op
        name = CALL if not drawn.work and is_call(op) else f"op {start} {end} {thread}"
        events.append(span("cpu_op", name, start, end - start, IDS + thread))
    for start, end, thread in drawn.gloo:
        events.append(span("user_annotation", "gloo:all_reduce", start, end - start, IDS + thread))
    for number, work in enumerate(drawn.work):
        identity = IDS + number
        if work.launch is not None:
            events.append(launch(work.launch, work.call_us, identity) | {"tid": IDS + work.thread})
        category = {"cat": "gpu_memcpy"} if work.kind == "copies" else {}
        length = work.end - work.start
        events.append(kernel(NAMES[work.kind], work.start, length, identity, stream=work.stream) | category)
    return [*events, kernel("negative", 3, -5, 1), span("cpu_op", "negative", 3, -5)]


def is_call(op: tuple[int, int, int]) -> bool:
    """Whether it issues a collective, where there is no GPU."""
    return sum(op) % 4 == 0


def computing(drawn: Drawn, us: int, in_gloo: set[int]) -> bool:
    """Whether the innermost operator of some thread computes."""
    inside = [op for op in drawn.ops if op[0] <= us < op[1] and op[2] not in in_gloo]
    innermost = [
        min((op for op in inside if op[2] == thread), key=lambda op: op[1] - op[0])
        for thread in {op[2] for op in inside}
    ]
    return not all(map(is_call, innermost))


def owner(drawn: Drawn, work: Work) -> int:
    """The step that launched it; −1: none. Where no launch is known, the one in which it began."""
    known = any(each.launch is not None for each in drawn.work)
    at = work.launch if known else work.start
    found = [i for i, (start, end) in enumerate(drawn.steps) if at is not None and start <= at < end]
    return found[0] if found else -1


def is_earlier(drawn: Drawn, work: Work) -> bool:
    """Whether it was launched before the capture."""
    known = [each for each in drawn.work if each.launch is not None]
    if work.launch is not None or not known:
        return False
    mine = [each.start for each in known if each.stream == work.stream]
    return work.start < min(mine or [each.start for each in known])


def is_before_steps(drawn: Drawn, work: Work) -> bool:
    at = work.start if work.launch is None else work.launch
    early = bool(drawn.steps) and at < drawn.steps[0][0]
    return owner(drawn, work) < 0 and (early or is_earlier(drawn, work))


def main_stream(drawn: Drawn) -> int | None:
    """The stream that computes most in the most steps; of equal ones the one with most, then the first."""
    owned = [work for work in drawn.work if owner(drawn, work) >= 0]
    chosen = [work for work in owned if work.kind == "compute"] or owned
    streams = list(dict.fromkeys(work.stream for work in drawn.work))
    votes: Counter[int] = Counter()
    for number in range(len(drawn.steps)):
        mine = [work for work in chosen if owner(drawn, work) == number]
        if times := busy(mine):
            votes[max(streams, key=times.__getitem__)] += 1
    return max(streams, key=lambda stream: (votes[stream], busy(chosen)[stream])) if owned else None


def busy(work: list[Work]) -> Counter[int]:
    """Time by stream."""
    found: Counter[int] = Counter()
    for each in work:
        found[each.stream] += each.end - each.start
    return +found


def windows(drawn: Drawn) -> list[Span]:
    main = main_stream(drawn)
    parts = [[work for work in drawn.work if is_before_steps(drawn, work)]]
    parts += [[work for work in drawn.work if owner(drawn, work) == i] for i in range(len(drawn.steps))]
    done = []
    for number, part in enumerate(parts):
        later = [work.start for each in parts[number + 1 :] for work in each if work.stream == main]
        following = min(later, default=NEVER)
        ends = [work.end for work in part if work.stream == main]
        ends += [min(work.end, following) for work in part if work.stream != main and work.start < following]
        done.append(max(ends, default=0))
    found: list[Span] = []
    reached = done[0]
    for (start, end), own_done in zip(drawn.steps, done[1:], strict=True):
        begin = max(start, reached)
        reached = max(begin, end, own_done)
        found.append((begin, reached))
    return found


def counted(drawn: Drawn, own: list[Work], window: Span) -> Counter[str]:
    """Each microsecond of the window under the first class that applies; of idle ones, under their cause."""
    found: Counter[str] = Counter()
    idle = []
    for us in range(*window):
        running = {work.kind for work in own if work.start <= us < work.end}
        others = any(work.start <= us < work.end for work in drawn.work)
        kind = next((kind for kind in CLASSES if kind in running), "other_steps" if others else "idle")
        found[kind] += 1
        idle += [us] if kind == "idle" else []
    for us in idle:
        found[f"idle {cause(drawn, us, set(idle))}"] += 1
    return found


def cause(drawn: Drawn, us: int, idle: set[int]) -> str:
    if any(start <= us < end and is_awaited(drawn, thread) for start, end, thread in drawn.data):
        return "data"
    starts = {work.start for work in drawn.work}  # of work of no length, too, which divides idle time
    begin, end = us, us + 1
    while begin - 1 in idle and begin not in starts:
        begin -= 1
    while end in idle and end not in starts:
        end += 1
    after = [work for work in drawn.work if work.start >= end]
    if not after:
        return "host" if any(work.launch is not None for work in drawn.work) else "unknown"
    following = min(after, key=lambda work: work.start)
    if following.launch is None:
        return "other" if is_earlier(drawn, following) else "unknown"
    if us < following.launch:
        return "host"
    done = min(following.launch + following.call_us, following.start)
    if us < done:
        return "launching"
    return "latency" if begin < done and us < done + 20 else "other"


def is_awaited(drawn: Drawn, thread: int) -> bool:
    """Whether what a thread prepares is awaited: it runs the steps, or launches what computes.

    Unless no thread that launches does anything else.
    """
    launching = {each.thread for each in drawn.work if each.launch is not None and each.kind == "compute"}
    active = {op[2] for op in drawn.ops} | ({MARKS} if drawn.steps else set())
    loop = launching | ({MARKS} if drawn.steps else set())
    return not loop or bool(launching and not launching & active) or thread in loop


def figures(found: Breakdown) -> Counter[str]:
    idle = found.idle_by_cause_us
    return Counter(
        {
            "compute": found.compute_us,
            "comm": found.exposed_comm_us,
            "copies": found.exposed_memcpy_us,
            "other_steps": found.other_steps_us,
            "idle": found.idle_us,
            "idle data": idle.data,
            "idle host": idle.host + idle.comm_wait,
            "idle launching": idle.launching,
            "idle latency": idle.latency,
            "idle other": idle.other,
            "idle unknown": idle.unknown,
        }
    )


def first_of_each_time(drawn: Drawn) -> None:
    """Leaves one piece of work per start: which of two comes next would be a matter of taste."""
    drawn.work = list({work.start: work for work in drawn.work}.values())


@pytest.mark.parametrize("seed", first(25, range(60)))
def test_the_gpus_time(tmp_path: Path, seed: int) -> None:
    drawn = draw(random.Random(seed), True)
    first_of_each_time(drawn)
    (rank,) = analyse_paths([write(tmp_path / "rank0.json", events_of(drawn), **rank_info(0, 1))]).ranks
    whole = (min(work.start for work in drawn.work), max(work.end for work in drawn.work))
    assert figures(rank.total) == counted(drawn, drawn.work, whole)
    assert rank.total.span_us == whole[1] - whole[0]
    assert len(rank.steps) == len(drawn.steps)
    for number, (found, window) in enumerate(zip(rank.steps, windows(drawn), strict=True)):
        own = [work for work in drawn.work if owner(drawn, work) == number]
        assert (found.step, found.span_us) == (number % 3, window[1] - window[0])
        assert figures(found) == counted(drawn, own, window)
        assert found.num_kernels == sum(work.kind != "copies" for work in own)
    assert {row.name: (row.count, row.device_us) for row in rank.kernels} == totals(
        (NAMES[work.kind], work.end - work.start) for work in drawn.work
    )
    launched = ((innermost(drawn, work), work.end - work.start) for work in drawn.work)
    on_gpu = totals((name, us) for name, us in launched if name is not None)
    assert {row.name: row.device_us for row in rank.ops if row.device_us} == {
        name: us for name, (_, us) in on_gpu.items() if us
    }


def totals(rows: Any) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for name, us in rows:
        count, total = found.get(name, (0, 0))
        found[name] = (count + 1, total + us)
    return found


def innermost(drawn: Drawn, work: Work) -> str | None:
    """The operator that launched it: the shortest one open then on its thread."""
    if work.launch is None:
        return None
    around = [op for op in drawn.ops if op[2] == work.thread and op[0] <= work.launch < op[1]]
    return "op {} {} {}".format(*min(around, key=lambda op: op[1] - op[0])) if around else None


@pytest.mark.parametrize("seed", first(25, range(40)))
def test_the_cpus_time(tmp_path: Path, seed: int) -> None:
    """Operators compute, on threads without collectives and outside of the wait for data.

    Not where they issue one, also within another operator.
    """
    drawn = draw(random.Random(seed), False)
    (rank,) = analyse_paths([write(tmp_path / "rank0.json", events_of(drawn), **rank_info(0, 1))]).ranks
    in_gloo = {thread for *_, thread in drawn.gloo}
    for found, window in zip(rank.steps, windows(drawn), strict=True):
        sums: Counter[str] = Counter()
        for us in range(*window):
            data = any(start <= us < end for start, end, _ in drawn.data)
            computes = computing(drawn, us, in_gloo)
            comm = any(start <= us < end for start, end, _ in drawn.gloo)
            sums["compute" if computes and not data else "comm" if comm else "idle"] += 1
            sums["data"] += data and not comm
        assert found.span_us == window[1] - window[0]
        idle = found.idle_by_cause_us
        assert (found.compute_us, found.exposed_comm_us, found.idle_us, idle.data) == (
            sums["compute"],
            sums["comm"],
            sums["idle"],
            sums["data"],
        )
        assert idle.host == found.idle_us - idle.data
