"""A run while it goes on: what it does now, how far it is, the latest steps, the devices as they are now."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from gpurun.launcher.compare.headline import nothing_measured
from gpurun.launcher.compare.label import variant_label
from gpurun.launcher.machine.accelerators import CPU, inspect_gpus, recorded_uuids
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.plan.model import Launch, Plan, Variant
from gpurun.launcher.run.attempts import attempts
from gpurun.launcher.run.progress_line import stage_text
from gpurun.launcher.rundir.files import decoded_portion
from gpurun.launcher.rundir.paths import is_name, rank_files, stamp_of
from gpurun.launcher.rundir.records import Event, StepRecord
from gpurun.launcher.tensorboard_plugin.answers.sentences import NOT_RANKED_YET, RANKED_LATER
from gpurun.launcher.tensorboard_plugin.logdir import (
    MAX_BYTES,
    MAX_RANKS,
    Kept,
    Listed,
    inside,
    read_comparison,
    read_end,
    read_host,
    read_plan,
    status,
    version,
)
from gpurun.launcher.units import GIB

MAX_STEPS = 240
MAX_VARIANTS = 200
TAIL_BYTES = 256 << 10
"""Holds more than `MAX_STEPS` lines."""
EVENT_BYTES = 1 << 20


def progress_answer(listed: Listed, devices: LiveDevices) -> dict[str, Any]:
    """How far the run is; see README.md."""
    time_s = time.time()
    plan = read_plan(listed)
    now = status(listed)
    events = _events(listed, plan) if plan else []
    stage = _stage(plan, events) if plan and now == "running" else None
    done = _done(plan, events) if plan else None
    comparison = read_comparison(listed)
    statuses: dict[str, str] = {each.id: each.status for each in comparison.variants} if comparison else {}
    if stage:
        statuses[stage["variant"]] = "running"
    found = {
        "status": now,
        "headline": _without_figures(plan, now) if plan and comparison is None else None,
        "details": RANKED_LATER if now == "running" else None,
        "stage": stage,
        "done": 1.0 if now == "done" else done,
        "variants": [
            _variant(listed, each, statuses.get(each.id, "planned"))
            for each in (plan.variants if plan else ())[:MAX_VARIANTS]
            if is_name(each.id)
        ],
        "live": devices.of(read_host(listed)) if now == "running" else [],
    }
    seconds_left = _seconds_left(events, done, time_s) if now == "running" else None
    return {"version": version(found), "time_s": time_s, "seconds_left": seconds_left, **found}


def _without_figures(plan: Plan, now: str) -> str | None:
    """The conclusion of a run before any variant has figures; of other runs it is in `run`."""
    if now == "running":
        return NOT_RANKED_YET
    return nothing_measured(plan, complete=now == "done").headline


LaunchEvents = Sequence[tuple[Launch, Sequence[Event]]]


def _events(listed: Listed, plan: Plan) -> LaunchEvents:
    """The events of the launches that have begun, in the plan's order; of a launch, those of all attempts."""
    found = []
    for launch in plan.launches:
        if not is_name(launch.id):
            continue
        names = attempts(listed.run, launch) or [launch.id]
        paths = [path for name in names if inside(listed.root, path := listed.run.events(name))]
        if paths:
            events = [each for path in paths for each in _kept_events(listed.root, path)]
            found.append((launch, events))
    return found


_EVENTS, _LATEST = Kept(16 * EVENT_BYTES), Kept(16 * MAX_BYTES)


def _kept_events(root: Path, path: Path) -> list[Event]:
    found: list[Event] = _EVENTS.get(
        (root, path),
        stamp_of(path),
        lambda: decoded_portion(read_end(root, path, EVENT_BYTES), msgspec.json.Decoder(Event)),
    )
    return found


def _stage(plan: Plan, events: LaunchEvents) -> dict[str, Any] | None:
    """The stage of rank 0 of the last launch that has begun."""
    if not events or not events[-1][1]:
        return None
    launch, event = events[-1][0], events[-1][1][-1]
    labels = {variant.id: variant_label(variant) for variant in plan.variants}
    return {
        "launch": launch.id,
        "stage": event.stage,
        "text": stage_text(event.stage, event.round, event.rounds),
        "variant": event.variant,
        "label": labels.get(event.variant or ""),
        "round": event.round,
        "rounds": event.rounds,
    }


def _done(plan: Plan, events: LaunchEvents) -> float | None:
    """Share of the planned rounds that are through; with a budget, of that.

    How many steps a program will make isn't known: of its launches those count that have ended.
    """
    if plan.budget_s is not None:
        spent_s = sum((found[-1].time_ns - found[0].time_ns) / 1e9 for _, found in events if found)
        return min(spent_s / plan.budget_s, 1.0)
    if any(variant.kind.runs_program for variant in plan.variants):
        ended = sum(bool(found) and found[-1].stage == "done" for _, found in events)
        return ended / len(plan.launches) if ended else None
    planned = sum(launch.rounds for launch in plan.launches)
    if not planned:
        return None
    done = 0.0
    for number, (launch, found) in enumerate(events):
        is_last = number == len(events) - 1 and not (found and found[-1].stage == "done")
        rounds = max((event.round for event in found), default=0)
        done += min(max(rounds - 1, 0), launch.rounds) if is_last else launch.rounds
    return done / planned


def _seconds_left(events: LaunchEvents, done: float | None, time_s: float) -> float | None:
    """Seconds left, if each round takes as long as those so far."""
    times = [event.time_ns for _, found in events for event in found]
    if not done or not times:
        return None
    elapsed_s = time_s - min(times) / 1e9
    return max(elapsed_s * (1 / done - 1), 0.0)


def _variant(listed: Listed, variant: Variant, status: str) -> dict[str, Any]:
    files = rank_files(listed.run.variant(variant.id), ".jsonl")
    ranks = [
        _rank(listed, variant, rank, path)
        for rank, path in list(files.items())[:MAX_RANKS]
        if inside(listed.root, path)
    ]
    return {
        "id": variant.id,
        "label": variant_label(variant),
        "rounds": max((rank.pop("rounds") for rank in ranks), default=0),
        "ranks": ranks,
        "status": status,
    }


def _rank(listed: Listed, variant: Variant, rank: int, path: Path) -> dict[str, Any]:
    latest = _LATEST.get((listed.root, path), stamp_of(path), lambda: _latest(listed.root, path))
    several = len(variant.split) > rank and variant.world_size > 1
    return {
        "rank": rank,
        "device": variant.devices[rank] if rank < len(variant.devices) else None,
        "local_batch": variant.split[rank] if several else variant.global_batch,
        **latest,
    }


def _latest(root: Path, path: Path) -> dict[str, Any]:
    """The latest timed steps of a rank."""
    content = read_end(root, path, MAX_BYTES)
    total = content.count(b'"kind":"timed"')
    latest = decoded_portion(content[-TAIL_BYTES:], msgspec.json.Decoder(StepRecord))
    records = [each for each in latest if each.kind == "timed"][-MAX_STEPS:]
    peaks = [each.peak_bytes for each in records if each.peak_bytes is not None]
    return {
        "steps": total,
        "step": list(range(total - len(records), total)),
        "step_ms": [each.step_ns / 1e6 for each in records],
        "forward_ms": [each.phases_ns.get("forward", 0) / 1e6 for each in records],
        "peak_gib": max(peaks) / GIB if peaks else None,
        "rounds": records[-1].round if records else 0,
    }


FRESH_S = 1.0
"""The driver is asked at most this often, however many pages are open."""


class LiveDevices:
    """Asks the driver, and remembers the answer for a moment. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._gpus: tuple[Gpu, ...] = ()
        self._cpu: list[dict[str, Any]] = []
        self._cpu_times: CpuTimes | None = None

    def of(self, host: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The devices' load now; nothing, unless a run's `host.json` is of this machine.

        A GPU is called as in the run, which may have seen only some of them; others by their UUID.
        """
        if host.get("hostname") != platform.node():
            return []
        with self._lock:
            if time.monotonic() - self._asked_s > FRESH_S:
                self._gpus, self._asked_s = inspect_gpus({}).gpus, time.monotonic()
                self._cpu = [] if self._gpus else [_cpu(self._cpu_percent())]
            names = recorded_uuids(host)
            return [_gpu(gpu, names.get(gpu.uuid, gpu.uuid[:12])) for gpu in self._gpus] or self._cpu

    def _cpu_percent(self) -> float | None:
        """Since the last question; `None` at the first. psutil's own counts by thread, of which each request
        may have another."""
        before, self._cpu_times = self._cpu_times, _cpu_times()
        return None if before is None else self._cpu_times.busy_percent_since(before)


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores together."""

    busy_s: float
    all_s: float

    def busy_percent_since(self, before: CpuTimes) -> float | None:
        """Share of the cores' time; `None` where none has passed."""
        passed_s = self.all_s - before.all_s
        return 100 * (self.busy_s - before.busy_s) / passed_s if passed_s > 0 else None


def _cpu_times() -> CpuTimes:
    found = psutil.cpu_times()
    twice_s = getattr(found, "guest", 0.0) + getattr(found, "guest_nice", 0.0)  # also counted as user time
    all_s = sum(found) - twice_s
    return CpuTimes(all_s - found.idle - getattr(found, "iowait", 0.0), all_s)


def _gpu(gpu: Gpu, name: str) -> dict[str, Any]:
    return {
        "device": name,
        "name": gpu.name,
        "memory_gib": gpu.used_gib,
        "memory_total_gib": gpu.memory_gib,
        "utilisation_percent": gpu.utilisation_percent,
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "sm_clock_max_mhz": gpu.max_sm_clock_mhz,
        "power_w": gpu.power_w,
        "power_limit_w": gpu.power_limit_w,
        "temperature_c": gpu.temperature_c,
        "pids": [process.pid for process in gpu.processes or ()],
    }


def _cpu(busy_percent: float | None) -> dict[str, Any]:
    """Figures of the processor, for machines without GPUs."""
    memory = psutil.virtual_memory()
    unknown = ("sm_clock_mhz", "sm_clock_max_mhz", "power_w", "power_limit_w", "temperature_c")
    return {
        "device": CPU.name,
        "name": platform.processor() or platform.machine(),
        "memory_gib": (memory.total - memory.available) / GIB,
        "memory_total_gib": memory.total / GIB,
        "utilisation_percent": busy_percent,
        **dict.fromkeys(unknown),
        "pids": [],
    }
