"""What the checks on a GPU found, in lines; traces are read here independently of gpurun."""

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

AGREE_PERCENT = 2.0
FIGURES = ("samples_per_s", "mfu", "joules_per_sample", "gradient_error", "reason")
OF_RANK = ("peak_gib", "sm_clock_mhz", "power_w", "throttled", "alloc_retries", "idle_ms", "host_ms")
_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}


def of_selftest(path: Path) -> Iterator[str]:
    """The counts, and each check that failed."""
    try:
        checks = json.loads(path.read_text())["checks"]
    except (OSError, ValueError, KeyError) as error:
        yield f"no result: {error!r}"
        return
    counts = {
        status: sum(each["status"] == status for each in checks) for status in ("ok", "failed", "skipped")
    }
    yield ", ".join(f"{count} {status}" for status, count in counts.items())
    yield from (f"failed {each['name']}: {each['found']}" for each in checks if each["status"] == "failed")


def of_run(run: Path) -> Iterator[str]:
    """A line for each variant, and for each rank whether its events agree with its trace."""
    try:
        variants = json.loads((run / "comparison.json").read_text())["variants"]
    except (OSError, ValueError, KeyError) as error:
        yield f"no comparison: {error!r}"
        return
    for variant in variants:
        step, ranks = variant.get("step_ms") or {}, variant.get("ranks") or []
        figures = {"ms": step.get("estimate"), **{key: variant.get(key) for key in FIGURES}}
        figures |= {key: ranks[0].get(key) for key in OF_RANK} if ranks else {}
        yield f"{variant['id']} {variant['status']} {_known(figures)}"
        for curve in (variant.get("probe") or {}).get("curves", ()):
            yield f"{curve['series']}: {_known(curve['points'][0])} to {_known(curve['points'][-1])}"
        for rank in ranks:
            timed_ms = rank.get("step_ms") or step.get("estimate")
            if rank.get("trace") and timed_ms:
                yield f"{variant['id']} rank {rank['rank']}: {agreement(run / rank['trace'], timed_ms)}"


def of_search(search: Path) -> Iterator[str]:
    """What a search for improvements gains, and a line for each remedy."""
    try:
        found = json.loads((search / "improve.json").read_text())
    except (OSError, ValueError) as error:
        yield f"no result: {error!r}"
        return
    yield f"{found['name']}: {_known(found['gain'] or {}) or 'nothing is proven to be faster'}"
    for each in found["remedies"]:
        figures = {key: each[key] for key in ("percent", "ci", "why")}
        yield f"{each['code']}: {each['verdict']} {_known(figures)}"


def _known(figures: Mapping[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in figures.items()
        if value not in (None, [], {}, "")
    )


def agreement(path: Path, timed_ms: float) -> str:
    """Timed steps by events against traced ones; and launches without a kernel."""
    by_work, by_marks, lost = steps_ms(events_of(path))
    if not by_work:  # a profiler makes steps of a CPU longer: there is nothing to agree with
        return f"timed {timed_ms:.4g} ms, {len(by_marks)} traced steps without GPU work"
    traced_ms = mean(by_work)
    off = 100 * (traced_ms / timed_ms - 1)
    verdict = "agrees" if abs(off) <= AGREE_PERCENT else "DIFFERS"
    return f"timed {timed_ms:.4g} ms, traced {traced_ms:.4g} ms: {off:+.2f} % {verdict}; {lost} launches lost"


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that last some time."""
    with gzip.open(path) as file:
        return [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X"]


def steps_ms(events: list[dict[str, Any]]) -> tuple[list[float], list[float], int]:
    """Milliseconds of steps, from the last GPU work launched in one to that of the next; by their marks; and
    how many launches have no kernel."""
    marks = sorted(
        (each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("cat") == "user_annotation" and re.match(r"ProfilerStep#\d", each.get("name", ""))
    )
    begins = [begin for begin, _ in marks]
    calls = {
        each["args"]["correlation"]: each
        for each in events
        if each.get("cat") in _CALLS and "correlation" in each.get("args", {})
    }
    ends: dict[int, float] = defaultdict(float)
    ran = set()
    for each in events:
        if each.get("cat") in _WORK:
            correlation = each.get("args", {}).get("correlation")
            ran.add(correlation)
            call = calls.get(correlation)
            step = bisect_right(begins, call["ts"]) - 1 if call else -1
            if step >= 0 and call and call["ts"] < marks[step][1]:
                ends[step] = max(ends[step], each["ts"] + each["dur"])
    lost = sum("LaunchKernel" in call["name"] and number not in ran for number, call in calls.items())
    by_work = [(ends[i] - ends[i - 1]) / 1e3 for i in sorted(ends) if i - 1 in ends]
    return by_work, [(end - begin) / 1e3 for begin, end in marks], lost
