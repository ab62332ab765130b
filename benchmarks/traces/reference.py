"""Independent reference: a few totals of one Kineto (torch.profiler) trace file.

Written from a description of the format alone. All times are exact integer nanoseconds.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

KERNEL_CATS = frozenset({"kernel", "Kernel"})
COPY_CATS = frozenset({"gpu_memcpy", "Memcpy"})
MEMSET_CATS = frozenset({"gpu_memset", "Memset"})
GPU_CATS = KERNEL_CATS | COPY_CATS | MEMSET_CATS
OPERATOR_CATS = frozenset({"cpu_op", "Operator"})

STEP_PREFIX = "ProfilerStep#"
COMM_NAME = re.compile(r"(?:void )?(?:nccl(?:Symk|Sym)?(?:Dev)?Kernel|rccl|msccl)", re.IGNORECASE)
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

MAX_EXPONENT = 308  # a number beyond the range of a double counts as infinite
WIDE = Context(prec=400)  # enough digits for every number up to MAX_EXPONENT

Interval = tuple[int, int]


class CountedEvent(NamedTuple):
    """One counted X event; start and end in ns."""

    name: str
    cat: str
    start: int
    end: int
    pid: str
    tid: str
    device: str | None  # the device the event states itself


@dataclass(frozen=True)
class Totals:
    """Totals of one trace file; the GPU times and counts are those of the busiest device."""

    num_events: int
    num_kernels: int
    span_ns: int
    compute_ns: int
    comm_ns: int
    copy_ns: int
    exposed_comm_ns: int
    exposed_copy_ns: int
    idle_ns: int
    device_names: list[str]
    kernels: dict[str, list[int]]  # name -> [count, sum of ns], all GPU work of all devices
    operators: dict[str, list[int]]  # name -> [count, self ns]


def totals(path: Path) -> Totals:
    """Compute the totals of one file; ValueError if it is not a trace in JSON."""
    events = [event for raw in load_events(path) if (event := read_event(raw)) is not None]
    work = [event for event in events if event.cat in GPU_CATS]
    by_device = group_by_device(work)
    busiest: list[CountedEvent] = []
    if by_device:
        busiest = by_device[min(by_device, key=lambda name: (-busy_sum(by_device[name]), name))]

    compute = [(e.start, e.end) for e in busiest if e.cat in KERNEL_CATS and not COMM_NAME.match(e.name)]
    comm = [(e.start, e.end) for e in busiest if e.cat in KERNEL_CATS and COMM_NAME.match(e.name)]
    copy = [(e.start, e.end) for e in busiest if e.cat not in KERNEL_CATS]
    span = max(e.end for e in busiest) - min(e.start for e in busiest) if busiest else 0
    compute_ns = union_length(compute)
    kernels_ns = union_length(compute + comm)
    all_ns = union_length(compute + comm + copy)

    per_name: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for event in work:
        per_name[event.name][0] += 1
        per_name[event.name][1] += event.end - event.start

    return Totals(
        num_events=len(events),
        num_kernels=sum(e.cat in KERNEL_CATS for e in busiest),
        span_ns=span,
        compute_ns=compute_ns,
        comm_ns=union_length(comm),
        copy_ns=union_length(copy),
        exposed_comm_ns=kernels_ns - compute_ns,
        exposed_copy_ns=all_ns - kernels_ns,
        idle_ns=span - all_ns,
        device_names=sorted(by_device),
        kernels=dict(per_name),
        operators=operator_totals(events),
    )


def load_events(path: Path) -> list[Any]:
    """Read the file and return its raw list of events."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"broken gzip: {error}") from error
    text = data.decode("utf-8-sig", errors="replace")
    try:
        document = json.loads(text, strict=False, parse_float=Decimal, parse_int=int)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except (ValueError, InvalidOperation) as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(document, dict):
        document = document.get("traceEvents")
    if not isinstance(document, list):
        raise ValueError("no list of trace events")
    return document


def read_event(raw: Any) -> CountedEvent | None:
    """Turn a raw event into a CountedEvent; None if it does not count."""
    if not isinstance(raw, dict) or raw.get("ph") != "X" or not isinstance(raw.get("name"), str):
        return None
    start = to_number(raw.get("ts"))
    duration = to_number(raw.get("dur"))
    if start is None or duration is None or duration < 0:
        return None
    cat = raw.get("cat")
    args = raw.get("args")
    if not isinstance(args, dict):
        args = {}
    device = args.get("device")
    start_ns = to_ns(start)
    return CountedEvent(
        name=raw["name"],
        cat=cat if isinstance(cat, str) else "",
        start=start_ns,
        end=start_ns + to_ns(duration),
        pid=str(raw.get("pid", "")),
        tid=str(raw.get("tid", "")),
        device=None if device is None else str(device),
    )


def to_number(value: Any) -> Decimal | None:
    """Return a finite number, given as a number or as a string; None for anything else."""
    if isinstance(value, str):
        text = value.strip()
        if NUMBER.fullmatch(text) is None:
            return None
        try:
            number = Decimal(text)
        except InvalidOperation:  # an absurd exponent
            return None
    elif isinstance(value, Decimal):
        number = value
    elif isinstance(value, int) and not isinstance(value, bool):
        number = Decimal(value)
    else:  # among them the floats NaN and Infinity, the only floats that the parser makes
        return None
    return number if number.is_finite() and number.adjusted() <= MAX_EXPONENT else None


def to_ns(microseconds: Decimal) -> int:
    """Convert microseconds to whole nanoseconds (half to even)."""
    return round(microseconds.scaleb(3, WIDE))


def group_by_device(work: list[CountedEvent]) -> dict[str, list[CountedEvent]]:
    """Group GPU work by device: the stated one, else the only one stated by others, else the pid."""
    stated = {event.device for event in work if event.device is not None}
    only = next(iter(stated)) if len(stated) == 1 else None
    groups: defaultdict[str, list[CountedEvent]] = defaultdict(list)
    for event in work:
        if event.device is not None:
            groups[event.device].append(event)
        else:
            groups[event.pid if only is None else only].append(event)
    return dict(groups)


def busy_sum(work: list[CountedEvent]) -> int:
    """Return the sum of durations."""
    return sum(event.end - event.start for event in work)


def union_length(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of intervals."""
    length = 0
    covered_to: int | None = None
    for start, end in sorted(intervals):
        if covered_to is None or start > covered_to:
            length += end - start
            covered_to = end
        elif end > covered_to:
            length += end - covered_to
            covered_to = end
    return length


def operator_totals(events: list[CountedEvent]) -> dict[str, list[int]]:
    """Return count and self time in ns of each operator name, in the order of the file."""
    result: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    threads: defaultdict[tuple[str, str], list[CountedEvent]] = defaultdict(list)
    for event in events:
        if event.cat in OPERATOR_CATS and not event.name.startswith(STEP_PREFIX):
            threads[event.pid, event.tid].append(event)
            result[event.name][0] += 1
            result[event.name][1] += event.end - event.start
    for thread in threads.values():
        # An outer operator comes before its inner ones; the stable sort keeps the order of equals.
        thread.sort(key=lambda event: (event.start, -event.end))
        running: list[CountedEvent] = []
        for event in thread:
            running = [other for other in running if other.end >= event.start]
            parent = next((other for other in reversed(running) if other.end >= event.end), None)
            if parent is not None:
                result[parent.name][1] -= event.end - event.start
            running.append(event)
    return dict(result)
