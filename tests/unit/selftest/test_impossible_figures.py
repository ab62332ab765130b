"""Figures that can't be, and figures that say nothing about a device: neither passes as ok."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpurun.launcher.findings.check_cases import FAILED, NOT_REPORTED
from gpurun.launcher.machine.accelerators import CPU
from gpurun.launcher.machine.gpus.gpu import Sensors
from gpurun.launcher.rundir.files import read_json, write_json
from gpurun.launcher.rundir.records import DeviceFacts
from gpurun.launcher.selftest.evidence import FAULTS, Evidence
from gpurun.launcher.selftest.machine_checks import device_speed, rates_of
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.meters.gpu_load import GpuMeter
from gpurun.launcher.worker.selftest import device_program
from tests.unit.selftest.healthy import evidence
from tests.unit.selftest.test_named_faults import in_job, judged, of_rank
from tests.unit.selftest.test_wishes_and_results import keep, since
from tests.wording import Wording

WRONG = [float("nan"), float("inf"), 0.0, -3.0]


def of_links(seen: Evidence, figure: float) -> Evidence:
    pairs = tuple(replace(pair, gb_per_s=figure) for pair in seen.facts[0].pairs[:1])
    return of_rank(0, pairs=(*pairs, *seen.facts[0].pairs[1:]))(seen)


def of_reduces(seen: Evidence, figure: float) -> Evidence:
    first, *others = seen.facts[0].reduces
    return of_rank(0, reduces=(replace(first, bus_gb_per_s=figure), *others))(seen)


def of_speed(seen: Evidence, figure: float) -> Evidence:
    return of_rank(1, gflop_per_s=figure)(seen)


MEASURED = {"pairs of devices": of_links, "all-reduce rate": of_reduces, "device speed": of_speed}


@pytest.mark.parametrize("figure", WRONG)
@pytest.mark.parametrize("check", MEASURED)
@pytest.mark.parametrize("links", ["known", "unknown"])
def test_a_rate_that_cannot_be_fails(check: str, figure: float, links: str) -> None:
    seen = MEASURED[check](evidence(), figure)
    found = judged(replace(seen, health=()) if links == "unknown" else seen)[check]
    assert (found.status, found.remedy) == ("failed", FAILED["impossible-rate"].remedy)
    assert "which can't be" in found.found


def test_what_is_said_of_a_rate_that_cannot_be(wording: Wording) -> None:
    for check, change in MEASURED.items():
        wording(judged(change(evidence(), float("nan")))[check].found)


@pytest.mark.parametrize("figure", WRONG)
def test_a_rate_that_cannot_be_is_neither_kept_nor_compared_with(figure: float, tmp_path: Path) -> None:
    assert [rate.device for rate in rates_of(of_speed(evidence(), figure))] == ["cuda:0", "cuda:2"]
    keep(tmp_path, "2026-01-01_10-00-00", 50_000.0)
    keep(tmp_path, "2026-01-02_10-00-00", figure if figure <= 0 else 1e30)
    found = since(tmp_path)
    assert found.status == "ok"


@pytest.mark.parametrize("energy_mj", [0.0, -5.0])
def test_an_energy_counter_that_does_not_advance_is_not_reported(energy_mj: float, wording: Wording) -> None:
    found = judged(of_rank(1, energy_mj=energy_mj)(evidence()))["energy"]
    assert found.status == "skipped"
    assert NOT_REPORTED in found.found
    wording(found.found)


@pytest.mark.parametrize("figure", WRONG)
def test_power_and_clocks_that_cannot_be_are_no_figures(figure: float) -> None:
    seen = evidence()
    for rank in range(3):
        seen = of_rank(rank, power_w=figure, clock_mhz=figure)(seen)
    found = judged(seen)
    assert found["energy"].found == f"counted; power is {NOT_REPORTED}"
    assert (found["clock rates"].status, found["clock rates"].found) == ("skipped", NOT_REPORTED)


@pytest.mark.parametrize("figure", WRONG[:2])
def test_a_wait_that_cannot_be_fails(figure: float) -> None:
    late = evidence().job(FAULTS).variants[0]
    ranks = tuple(replace(rank, wait_ms=figure) if rank.rank == 2 else rank for rank in late.ranks)
    others = evidence().job(FAULTS).variants[1:]
    found = judged(in_job(FAULTS, variants=(replace(late, ranks=ranks), *others))(evidence()))["a late rank"]
    assert found.status == "failed"


def test_a_driver_that_counts_no_energy_gives_its_own_power() -> None:
    """NVML's counter does not advance, and amdsmi may report a negative power."""
    powers = iter([250.0, -1.0])
    sensors = Sensors(energy_mj=lambda: 7, power_w=lambda: next(powers))
    times = iter([0, 10**9])
    meter = GpuMeter(CpuRuntime(), torch.device("cpu"), sensors, lambda: next(times))
    with meter.counting():
        meter.sample()
        meter.sample()
    assert meter.load().power_w == 250.0


@pytest.mark.parametrize("time_ns", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_cannot_be_is_kept_as_no_rate(
    time_ns: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An all-reduce of the ranks' times that goes wrong; JSON has no number for it."""

    def wrong(times_ns: Tensor, op: Any = None) -> None:
        if op == dist.ReduceOp.MAX:
            times_ns.fill_(time_ns)

    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", wrong)
    monkeypatch.setattr(device_program, "REDUCED_BYTES", {True: (1 << 10,)})
    reduces = device_program.reduce_rates(torch.device("cpu"), is_host=True)
    facts = replace(evidence().facts[0], reduces=reduces)
    write_json(tmp_path / "rank0.json", facts)
    kept = read_json(tmp_path / "rank0.json", DeviceFacts)
    found = judged(replace(evidence(), facts=(kept, *evidence().facts[1:])))["all-reduce rate"]
    assert (found.status, found.found) == ("failed", "0 GB/s at 1 KiB, which can't be")


# Cores


def on_cores(others_share: float | None, cores: tuple[int, ...], ranks: int = 2) -> Evidence:
    """Ranks of CPU devices that each had these cores for half of the time."""
    seen = evidence()
    facts = tuple(
        replace(each, queue_share=0.5, cpu_share=0.5, others_share=others_share, cores=cores)
        for each in seen.facts[:ranks]
    )
    devices = tuple(f"cpu:{rank}" for rank in range(ranks))
    return replace(seen, kind=CPU, devices=devices, facts=facts, machine=replace(seen.machine, gpus=()))


@pytest.mark.parametrize(
    ("others_share", "cores"), [(0.5, (0,)), (0.52, (3,)), (1.2, (0,)), (None, (0,)), (0.5, (0, 1))]
)
def test_what_uses_the_cores_is_said_as_far_as_it_is_known(
    others_share: float | None, cores: tuple[int, ...], wording: Wording
) -> None:
    found = device_speed(on_cores(others_share, cores))
    assert found.status == "skipped"
    wording(found.found)


def test_ranks_on_cores_of_their_own_do_not_take_each_others() -> None:
    first, second = on_cores(0.5, (0,)).facts
    seen = replace(on_cores(0.5, (0,)), facts=(first, replace(second, cores=(1,))))
    assert device_speed(seen).found.startswith("other processes use the cores")


def test_ranks_of_other_nodes_do_not_use_these_cores() -> None:
    seen = replace(on_cores(0.5, (0,)), nodes=(0, 1), hosts=("a", "b"))
    assert device_speed(seen).found.startswith("other processes use the cores")
