"""One rank's figures, from its digest and the matched collectives; converts ns to µs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gpurun.launcher.trace.analysis.collectives.clocks import Realigned
from gpurun.launcher.trace.analysis.collectives.local_collectives import RankPart
from gpurun.launcher.trace.analysis.collectives.match import Collective
from gpurun.launcher.trace.analysis.digest import Digest, Scope
from gpurun.launcher.trace.analysis.tables import NameTime
from gpurun.launcher.trace.intervals import Intervals, union
from gpurun.launcher.trace.model import (
    Breakdown,
    DeviceTrace,
    GroupTotal,
    HostWhileIdle,
    IdleCauses,
    LaunchDelay,
    NameTotal,
    NameTotals,
    RankTrace,
    StepBreakdown,
)

Parts = Sequence[tuple[Collective, RankPart]]


@dataclass(frozen=True)
class MatchedRank:
    """A rank's digest and its parts in collectives."""

    digest: Digest
    realigned: Realigned
    """Turns the digest's times into ns since the report's base, on the aligned clock."""
    parts: tuple[tuple[Collective, RankPart], ...]


def rank_trace(rank: int, view: MatchedRank) -> RankTrace:
    """The report on one rank."""
    digest = view.digest
    devices = tuple(_device(name, i, scope, view) for i, (name, scope) in enumerate(digest.total.devices))
    total, steps = (
        (devices[0].total, devices[0].steps)
        if devices
        else _in_us(digest.total, digest.steps, view.parts, view)
    )
    return RankTrace(
        rank=rank,
        world_size=digest.world_size,
        device=digest.device,
        files=(str(digest.path),),
        total=total,
        steps=steps,
        kernels=_names(digest.names.kernels),
        ops=_names(digest.names.ops),
        modules=_names(digest.names.modules),
        groups=_groups(view.parts),
        devices=devices,
        in_steps=_in_steps(view),
        optimizer_steps=digest.optimizer_steps,
        is_cut=digest.is_cut,
        lost_events=digest.lost_events,
        is_thinned=digest.is_thinned,
        one_off=_names(digest.one_off),
        cpu=digest.cpu,
        facts=digest.facts,
    )


def _in_steps(view: MatchedRank) -> NameTotals | None:
    digest = view.digest
    parts = [each for each in view.parts if each[1].local.step >= 0]
    if not digest.steps or (digest.step_names is digest.names and len(parts) == len(view.parts)):
        return None
    names = digest.step_names
    return NameTotals(_names(names.kernels), _names(names.ops), _names(names.modules), _groups(parts))


def _device(name: str, place: int, total: Scope, view: MatchedRank) -> DeviceTrace:
    """One of several devices, with its part in collectives."""
    steps = [scope.devices[place][1] for scope in view.digest.steps]
    parts = [each for each in view.parts if each[1].local.device == name]
    return DeviceTrace(name, *_in_us(total, steps, parts, view))


def _in_us(
    total: Scope, scopes: Sequence[Scope], parts: Parts, view: MatchedRank
) -> tuple[Breakdown, tuple[StepBreakdown, ...]]:
    moving = transfers(parts)
    by_step: defaultdict[int | None, list[tuple[Collective, RankPart]]] = defaultdict(list)
    for each in parts:
        by_step[each[1].local.step].append(each)
    steps = []
    for scope in scopes:
        fields = vars(_breakdown(scope, by_step[scope.position], moving))
        start_us = view.realigned.time_ns(scope.measure.start) / 1000
        steps.append(StepBreakdown(**fields, step=scope.step or 0, start_us=start_us))
    return _breakdown(total, parts, moving), tuple(steps)


def transfers(parts: Parts) -> Intervals:
    """When data moved: from when each rank's waiting was over.

    A message on the CPU may be there long before the rank asks for it, so that waiting for another one counts
    first.
    """
    messages = [(each, part) for each, part in parts if each.is_message and not part.local.on_gpu]
    moving = spans_of(each.moving(part) for each, part in parts)
    return moving.subtract(spans_of(each.waiting(part) for each, part in messages))


def spans_of(spans: Iterable[tuple[int, int]]) -> Intervals:
    """The points in any of these spans."""
    columns = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
    return union(columns[:, 0].copy(), columns[:, 1].copy())


def _breakdown(scope: Scope, parts: Parts, moving: Intervals) -> Breakdown:
    measure = scope.measure
    exposed_ns = measure.exposed_comm.length_ns
    exposed_transfer_ns = measure.exposed_comm.intersect(moving).length_ns
    wait_ns, transfer_ns = _wait_and_transfer(parts)
    delay = scope.launch_delay
    return Breakdown(
        span_us=measure.span / 1000,
        compute_us=measure.compute / 1000,
        comm_us=measure.comm / 1000,
        comm_compute_overlap_us=measure.overlap / 1000,
        exposed_comm_us=exposed_ns / 1000,
        memcpy_us=measure.copy / 1000,
        memset_us=measure.memset / 1000,
        exposed_memcpy_us=measure.exposed_copy / 1000,
        other_steps_us=measure.other_steps / 1000,
        idle_us=measure.idle / 1000,
        wait_us=_us(wait_ns),
        transfer_us=_us(transfer_ns),
        exposed_wait_us=(exposed_ns - exposed_transfer_ns) / 1000,
        exposed_transfer_us=exposed_transfer_ns / 1000,
        idle_by_cause_us=IdleCauses(**_all_us(measure.idle_by_cause)),
        host_while_idle_us=HostWhileIdle(**_all_us(measure.idle_by_host)),
        num_kernels=scope.num_kernels,
        launch_delay_us=LaunchDelay(delay.median / 1000, delay.largest / 1000) if delay else None,
        gpu_span_us=_us(scope.gpu_span),
    )


def _wait_and_transfer(parts: Parts) -> tuple[int | None, int | None]:
    """Sums over the matched collectives; `None` if there are collectives but none is matched."""
    known = [(each, part) for each, part in parts if each.matched]
    if parts and not known:
        return None, None
    wait_ns = sum(each.waits[part.rank] for each, part in known)
    return wait_ns, sum(each.transfer(part) for each, part in known)


def _groups(parts: Parts) -> tuple[GroupTotal, ...]:
    names = sorted({each.group for each, _ in parts})
    return tuple(_group(name, [pair for pair in parts if pair[0].group == name]) for name in names)


def _group(name: str, parts: Parts) -> GroupTotal:
    sizes = [part.local.num_bytes for _, part in parts if part.local.num_bytes is not None]
    wait_ns, transfer_ns = _wait_and_transfer(parts)
    return GroupTotal(
        group=name,
        count=len(parts),
        num_bytes=sum(sizes) if sizes else None,
        comm_us=sum(part.local.duration for _, part in parts) / 1000,
        wait_us=_us(wait_ns),
        transfer_us=_us(transfer_ns),
    )


def _names(rows: Iterable[NameTime]) -> tuple[NameTotal, ...]:
    return tuple(
        NameTotal(
            name=row.name,
            kind=row.kind,
            count=row.count,
            device_us=row.device_ns / 1000,
            host_us=row.host_ns / 1000,
            comm_us=row.comm_ns / 1000,
            memcpy_us=row.memcpy_ns / 1000,
        )
        for row in rows
    )


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1000


def _all_us(fields_ns: object) -> dict[str, float]:
    return {name: ns / 1000 for name, ns in vars(fields_ns).items()}
