"""Faults are put into what a self-test finds on a healthy machine: each is named, and nothing else."""

import ast
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from msgspec.structs import replace as changed
from torch import Tensor

from gpurun.launcher.cli import main as command
from gpurun.launcher.cli.commands.selftest import Lines, line, selftest
from gpurun.launcher.compare.model import VariantResult
from gpurun.launcher.errors import GpurunError, MachineError, SpecError, unwritable
from gpurun.launcher.failures.reporter import full_disk
from gpurun.launcher.failures.root_cause import Failure, what_to_do
from gpurun.launcher.findings.check_cases import FAILED, NOT_REPORTED, OK, REMEDIES, SKIPPED, Case
from gpurun.launcher.findings.finding import finding as finding_of
from gpurun.launcher.machine.accelerators import CPU, CUDA, ROCM, Accelerator, TorchBuild, nvidia_problem
from gpurun.launcher.machine.gpus.gpu import Gpu, Sensors
from gpurun.launcher.machine.gpus.nvml import GpuHealth
from gpurun.launcher.machine.host import Machine, machine_id
from gpurun.launcher.machine.resource_limits import oom_killed
from gpurun.launcher.processes.pool import why_server_ended
from gpurun.launcher.rundir.files import RunDir, read_json, write_json
from gpurun.launcher.rundir.paths import SELFTEST, elsewhere
from gpurun.launcher.rundir.records import DeviceFacts, PairRate, StepRecord
from gpurun.launcher.selftest import self_test
from gpurun.launcher.selftest import self_test as result_module
from gpurun.launcher.selftest.check_table import (
    CHECKS,
    NODE_CHECKS,
    blocking,
    finding,
    findings,
    without_links,
)
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    GRADIENTS,
    LINKS,
    MEASURING,
    PARTS,
    PROGRAMS,
    TRAINING,
    CheckResult,
    DeviceRate,
    EarlierRate,
    Evidence,
    RanJob,
    failed,
    ok,
    skipped,
)
from gpurun.launcher.selftest.machine_checks import (
    device_speed,
    driver,
    earlier_speed,
    rates_of,
    visible_devices,
)
from gpurun.launcher.selftest.run_checks import FAULTY, hang_timeout_s, out_of_memory, traces
from gpurun.launcher.selftest.self_test import (
    MOST_EARLIER,
    Result,
    earlier_rates,
    findings_of,
    hint_of,
    not_run,
    outcome_of,
    run_selftest,
    wished_devices,
)
from gpurun.launcher.selftest.self_test import keep as keep_result
from gpurun.launcher.worker.accelerators.cpu import CpuRuntime
from gpurun.launcher.worker.meters.gpu_load import GpuMeter
from gpurun.launcher.worker.selftest import device_program
from tests.unit.machine.fake_driver import UUIDS, NVMLError
from tests.unit.selftest.healthy import DEVICES, SLEEPING, evidence, faulty, health, three_gpus, variant
from tests.wording import Wording

Change = Callable[[Evidence], Evidence]


def judged(seen: Evidence, parts: Iterable[str] = PARTS) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in findings(seen, parts)}


def not_ok(seen: Evidence) -> dict[str, CheckResult]:
    """Without those that only needed what failed."""
    found = judged(seen)
    return {
        name: finding
        for name, finding in found.items()
        if finding.status != "ok" and "because of: " not in finding.found
    }


NO_POOLS: Any = None
FIRST_TIME = {"speed as before"}
"""There is no earlier self-test on the healthy machine."""


def of_rank(rank: int, **changes: Any) -> Change:
    """A fault in what one rank has measured."""

    def change(seen: Evidence) -> Evidence:
        facts = tuple(replace(each, **changes) if each.rank == rank else each for each in seen.facts)
        return replace(seen, facts=facts)

    return change


def slow_link(seen: Evidence) -> Evidence:
    pairs = tuple(replace(pair, gb_per_s=2.0) if pair.high == 2 else pair for pair in seen.facts[0].pairs)
    return of_rank(0, pairs=pairs)(seen)


def in_job(part: str, **changes: Any) -> Change:
    return lambda seen: replace(seen, jobs={**seen.jobs, part: replace(seen.job(part), **changes)})


def first_variant(part: str, **changes: Any) -> Change:
    """A fault of the first variant of a job."""

    def change(seen: Evidence) -> Evidence:
        first, *others = seen.job(part).variants
        return in_job(part, variants=(replace(first, **changes), *others))(seen)

    return change


def unusable(build: TorchBuild, cuda: str) -> Change:
    """A torch that doesn't go with the driver."""

    def change(seen: Evidence) -> Evidence:
        found = replace(seen.machine, cuda_driver_version=cuda)
        gpu = found.gpus[0]
        problem = nvidia_problem(build, found, gpu, "cuda", "x86_64")
        assert problem
        return with_gpus(seen, lambda gpu: replace(gpu, unusable=problem))

    return change


def with_gpus(seen: Evidence, change: Callable[[Gpu], Gpu]) -> Evidence:
    return replace(seen, machine=replace(seen.machine, gpus=tuple(map(change, seen.machine.gpus))))


def mig(seen: Evidence) -> Evidence:
    return with_gpus(seen, lambda gpu: replace(gpu, uuid=f"MIG-{gpu.index}", bus="0000:01:00.0"))


def no_permission(seen: Evidence) -> Evidence:
    def uuid(handle: int) -> str:
        if handle == 2:
            raise NVMLError("Insufficient Permissions")
        return UUIDS[handle]

    return replace(seen, machine=three_gpus(nvmlDeviceGetUUID=uuid), devices=DEVICES[:2])


def hidden(seen: Evidence) -> Evidence:
    return replace(seen, visible="0,7,1", machine=three_gpus(visible="0,7,1"), devices=DEVICES[:1])


def profiler_in_use(seen: Evidence) -> Evidence:
    first = seen.job(TRAINING).variants[0]
    ranks = tuple(replace(rank, compute_ms=None) for rank in first.ranks)
    log = "function cuptiActivityEnable failed with error CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
    return in_job(TRAINING, logs=log)(first_variant(TRAINING, ranks=ranks)(seen))


def slower_than_before(seen: Evidence) -> Evidence:
    before = DeviceRate("cuda:1", UUIDS[1], 60_000.0, 4096, 0.0)
    return replace(seen, earlier=(EarlierRate(before, "2026-01-01"),))


def slow_all_reduce(seen: Evidence) -> Evidence:
    slow = (replace(seen.facts[0].reduces[-1], bus_gb_per_s=3.0),)
    return of_rank(0, reduces=slow)(seen)


def of_fault(fault: str, reason: str) -> Change:
    """Another reason of the variant in which the last rank misbehaves."""

    def change(seen: Evidence) -> Evidence:
        size = FAULTY[fault] * len(DEVICES)
        variants = seen.job(FAULTS).variants
        found = (replace(each, reason=reason) if each.global_batch == size else each for each in variants)
        return in_job(FAULTS, variants=tuple(found))(seen)

    return change


def of_late_rank(rank: int, wait_ms: float) -> Change:
    """Another wait of a rank while the last one is late, which is the first variant."""

    def change(seen: Evidence) -> Evidence:
        ranks = seen.job(FAULTS).variants[0].ranks
        found = (replace(each, wait_ms=wait_ms) if each.rank == rank else each for each in ranks)
        return first_variant(FAULTS, ranks=tuple(found))(seen)

    return change


def of_steps(name: str, change_steps: Callable[[tuple[StepRecord, ...]], tuple[StepRecord, ...]]) -> Change:
    """Other steps of rank 1 in a program."""

    def change(seen: Evidence) -> Evidence:
        recorded = {each: dict(ranks) for each, ranks in seen.job(PROGRAMS).steps.items()}
        recorded[name][1] = change_steps(tuple(recorded[name][1]))
        return in_job(PROGRAMS, steps=recorded)(seen)

    return change


def unrecorded(name: str) -> Change:
    return of_steps(name, lambda steps: ())


unskipped = of_steps("skipped-step", lambda steps: tuple(changed(step, kind="timed") for step in steps))
no_set_device = of_steps("no-set-device", lambda steps: tuple(changed(step, peak_bytes=0) for step in steps))


def busy(seen: Evidence) -> Evidence:
    return with_gpus(seen, lambda gpu: replace(gpu, used_gib=20.0) if gpu.index == 1 else gpu)


NAN = float("nan")
FORKED = "rank 0 raised RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with …"
KILLED = "rank 1 was killed by SIGKILL"
ASLEEP = "no step completed for 12 s: rank 1 is in `sleep` (train.py:3); rank 0 waits in all_reduce #3"
CU130, CPU_ONLY = TorchBuild("2.13.0+cu130", {"cuda": "13.0"}), TorchBuild("2.13.0+cpu", {})
ECC = health(nvmlDeviceGetTotalEccErrors=lambda handle, *_: 3 if handle == 1 else 0)

INJECTED: dict[str, tuple[Change, str, str]] = {
    "slow link": (
        slow_link,
        "pairs of devices",
        "cuda:0 and cuda:2: 2.00 GB/s, but PCIe, one CPU",
    ),
    "slow device": (of_rank(1, gflop_per_s=20_000.0), "device speed", "cuda:1 does 20"),
    "wrong ids": (of_rank(1, uuid="cccc-2"), "device names", "rank 1 uses cccc-2, but cuda:1 is GPU-abbb-1"),
    "ECC errors": (lambda seen: replace(seen, health=ECC), "memory errors", "cuda:1 had 3 memory errors"),
    "no permission": (no_permission, "visible devices", "GPU 2 of this machine's 3 can't be opened"),
    "driver too old": (unusable(CU130, "12.8"), "torch and driver", "built for CUDA 13.0, but driver 580"),
    "CPU build of torch": (unusable(CPU_ONLY, "13.1"), "torch and driver", "was built without CUDA"),
    "MIG": (mig, "whole GPUs", "cuda:0, cuda:1, cuda:2 are instances (MIG) of one GPU"),
    "GPU named twice": (
        lambda seen: replace(seen, devices=(DEVICES[1], *DEVICES[1:])),
        "whole GPUs",
        "cuda:1 is named more than once",
    ),
    "hidden GPU": (hidden, "visible devices", "CUDA_VISIBLE_DEVICES=0,7,1 leaves 1 GPU visible"),
    "throttled": (of_rank(2, throttled="too hot"), "clock rates", "cuda:2 was throttled: too hot"),
    "OOM not freed": (
        lambda seen: replace(seen, used_gib={"cuda:2": 70.0}),
        "out of memory",
        "cuda:2 still has 70.0 GiB more in use",
    ),
    "rank killed": (first_variant(TRAINING, status="failed", reason=KILLED), "strategies", KILLED),
    "rank asleep": (first_variant(TRAINING, status="hung", reason=ASLEEP), "strategies", "rank 1 is in"),
    "wrong sum": (of_rank(0, wrong_sums=("1 of 1023 on rank 0",)), "all-reduce sums", "1 of 1023 on rank 0"),
    "fork after CUDA": (
        lambda seen: in_job(MEASURING, problem=FORKED)(replace(seen, facts=())),
        "measuring",
        "something has used CUDA before they were forked",
    ),
    "no set_device": (no_set_device, "no set_device", "rank 1 was not seen to use memory of its own device"),
    "no energy counter": (of_rank(0, energy_mj=None), "energy", f"cuda:0 is {NOT_REPORTED}"),
    "energy does not advance": (
        of_rank(1, energy_mj=0.0),
        "energy",
        f"cuda:1 did not advance in half a second at work: energy is {NOT_REPORTED}",
    ),
    "energy runs back": (of_rank(1, energy_mj=-5.0), "energy", f"energy is {NOT_REPORTED}"),
    "NUMA unknown": (
        lambda seen: with_gpus(seen, lambda gpu: replace(gpu, numa_node=None)),
        "NUMA nodes",
        "cuda:0, cuda:1, cuda:2 is not reported",
    ),
    "full disk": (lambda seen: replace(seen, free_gib=0.1), "run directory", "0.10 GiB"),
    "profiler in use": (profiler_in_use, "traces", "another profiler is in use"),
    "busy GPU": (busy, "free GPUs", "cuda:1 is used by other processes: 20.0 of 140.0 GiB"),
    "persistence unknown": (
        lambda seen: with_gpus(seen, lambda gpu: replace(gpu, persistence=None)),
        "persistence mode",
        NOT_REPORTED,
    ),
    "PCIe lanes lost": (
        of_rank(1, pcie_link=(5, 1), copy_gb_per_s=3.4),
        "PCIe links",
        "cuda:1 has generation 5 x1 at work",
    ),
    "PCIe generation lost": (
        of_rank(1, pcie_link=(1, 16), copy_gb_per_s=3.4),
        "PCIe links",
        "not generation 5 x16",
    ),
    "copies slow": (
        of_rank(1, pcie_link=(5, 2), copy_gb_per_s=6.9),
        "PCIe links",
        "; copies reach 6.90 GB/s",
    ),
    "clock limited": (of_rank(1, clock_mhz=900.0, power_w=300.0), "clock rates", "cuda:1 ran at 900 of"),
    "rate no number": (of_rank(1, gflop_per_s=NAN), "device speed", "cuda:1 does nan"),
    "clock no number": (of_rank(1, clock_off=NAN), "device clocks", "cuda:1 is off by nan"),
    "slower by a quarter": (of_rank(1, gflop_per_s=37_500.0), "device speed", "cuda:1 does 37"),
    "two of three slow": (
        lambda seen: of_rank(2, gflop_per_s=25_000.0)(of_rank(1, gflop_per_s=25_000.0)(seen)),
        "device speed",
        "cuda:1 does 25",
    ),
    "all far below the peak": (
        lambda seen: replace(seen, facts=tuple(replace(each, gflop_per_s=15_000.0) for each in seen.facts)),
        "device speed",
        "at its peak",
    ),
    "gradient not compared": (
        first_variant(GRADIENTS, gradient_error=None),
        "gradients",
        "its gradient was not compared",
    ),
    "disk full in a job": (
        lambda seen: in_job(MEASURING, problem="can't write x: No space left on device")(
            replace(seen, facts=())
        ),
        "measuring",
        "No space left on device",
    ),
    "clock of a device off": (of_rank(1, clock_off=-0.2), "device clocks", "cuda:1 is off by 20"),
    "slower than before": (slower_than_before, "speed as before", "cuda:1 does 50"),
    "slow all-reduce": (slow_all_reduce, "all-reduce rate", "but NVLink 2x carries 50.0 GB/s"),
    "wrong gradient": (
        first_variant(GRADIENTS, gradient_warning="the gradient is off by 3 %"),
        "gradients",
        "the gradient is off by 3 %",
    ),
    "wait not seen": (of_late_rank(0, 3.0), "a late rank", "rank 0 waits 3.00 ms"),
    "wait of the late rank": (of_late_rank(2, 100.0), "a late rank", "rank 2 waits 100 ms"),
    "killed rank not named": (
        of_fault("killed", "rank 0 was killed by SIGKILL"),
        "a killed rank",
        "rank 2 is not named",
    ),
    "signal not named": (of_fault("killed", "rank 2 ended"), "a killed rank", "SIGKILL is not named"),
    "another rank blamed for a hang": (
        in_job(FAULTS, hangs=("rank 0 is in `forward`; ranks 1, 2 wait",)),
        "a sleeping rank",
        "another rank is blamed",
    ),
    "no hang noticed": (in_job(FAULTS, hangs=()), "a sleeping rank", "no hang was noticed"),
    "a hang without its collective": (
        in_job(FAULTS, hangs=("rank 2 is in `forward`; ranks 0, 1 wait",)),
        "a sleeping rank",
        "the collective is not named",
    ),
    "wait no number": (of_late_rank(2, NAN), "a late rank", "the wait of rank 2 isn't known"),
    "wait without end": (of_late_rank(2, float("inf")), "a late rank", "the wait of rank 2 isn't known"),
    "job without ranks": (
        lambda seen: replace(seen, jobs={**seen.jobs, FAULTS: RanJob(problem="no ranks could be started")}),
        "a late rank",
        "“ranks that fail” ended early: no ranks could be started",
    ),
    "loader's steps missed": (unrecorded("loader-workers"), "loader workers", "0 steps of rank 1 recorded"),
    "skipped step missed": (unskipped, "a skipped step", "0 skipped steps of rank 1 seen"),
    "graph's steps missed": (unrecorded("graph"), "a captured graph", "0 steps of rank 1 recorded, not 32"),
}
"""Fault → how it is put in, the check that names it, and words of what it says."""
UNKNOWN = {
    *("no energy counter", "energy does not advance", "energy runs back"),
    *("NUMA unknown", "persistence unknown"),
}
"""Not failures: a figure is missing, and the check says which."""


NO_FAULTS: dict[str, tuple[Change, str]] = {
    "the power limit keeps a clock down": (of_rank(0, clock_mhz=0.55 * 1980, power_w=690.0), "clock rates"),
    "a low clock of unknown power": (of_rank(0, clock_mhz=0.55 * 1980, power_w=None), "clock rates"),
    "two cards in a desktop": (of_rank(1, pcie_link=(5, 8), copy_gb_per_s=27.0), "PCIe links"),
    "a virtual machine": (of_rank(1, pcie_link=(1, 1), copy_gb_per_s=27.0), "PCIe links"),
    "a driver that forgets a GPU": (
        lambda seen: with_gpus(seen, lambda gpu: replace(gpu, persistence=gpu.index > 0)),
        "persistence mode",
    ),
    "another model": (of_rank(2, name="NVIDIA T4", gflop_per_s=8_000.0), "device speed"),
}
"""What looks like a fault → how it is put in, and the check that says what it is."""


@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_only_looks_like_a_fault_is_ok(name: str, wording: Wording) -> None:
    change, check = NO_FAULTS[name]
    found = judged(change(evidence()))
    assert {each.name for each in found.values() if each.status != "ok"} == FIRST_TIME
    assert found[check].remedy is None
    wording(found[check].found)


def test_ranks_that_hang_get_longer_where_there_are_more_gpus() -> None:
    of_one, of_eight = (hang_timeout_s([f"cuda:{i}" for i in range(num)]) for num in (1, 8))
    assert of_eight - of_one == 14.0
    assert hang_timeout_s(["cpu:0"] * 8) == hang_timeout_s(["cpu:0"])


def test_every_check_has_a_fault_of_its_own_and_is_ok_without_one() -> None:
    assert judged(evidence()).keys() == {check.name for check in CHECKS}
    assert not_ok(evidence()).keys() == FIRST_TIME

    assert {check for _, check, _ in INJECTED.values()} == {check.name for check in CHECKS}


def test_no_remedy_for_one_kind_of_device_needs_the_tool_of_another() -> None:
    for noun, foreign in ((CPU.noun, "nvidia-smi|amd-smi|nccl"), (CUDA.noun, "amd-"), (ROCM.noun, "nvidia")):
        remedies = [f"{check.remedy} {check.tools.get(noun)}" for check in CHECKS]
        assert not [text for text in remedies if re.search(foreign, text, re.IGNORECASE)]


@pytest.mark.parametrize("fault", INJECTED)
def test_a_fault_is_named_by_its_check_alone(fault: str) -> None:
    change, check, words = INJECTED[fault]
    found = not_ok(change(evidence()))
    assert found.keys() - (FIRST_TIME - {check}) == {check}
    assert words in found[check].found
    assert found[check].status == ("skipped" if fault in UNKNOWN else "failed")
    assert bool(found[check].remedy) == (fault not in UNKNOWN)


HUNG = f"no step completed for 52 s (not even the first one): {SLEEPING}"
FAILURES: dict[str, tuple[Any, str, str]] = {
    "exit code": ("failed", "rank 1 ended with exit code 7", "read /run/rank1.log"),
    "full disk": ("failed", "can't write x: No space left on device", "free some space"),
    "hang": ("hung", HUNG, "NCCL_P2P_DISABLE=1"),
}


@pytest.mark.parametrize("fault", FAILURES)
def test_why_measuring_ended_is_said_with_what_to_do(fault: str, wording: Wording) -> None:
    """After a hang, which would come again, nothing else is started."""
    status, reason, remedy = FAILURES[fault]
    names = [check.name for check in CHECKS]
    job = RanJob((replace(variant(), status=status),), problem=reason, log="/run/rank1.log")
    seen = replace(evidence(), facts=(), jobs={**evidence().jobs, MEASURING: job})
    found = not_ok(seen)
    wording(found["measuring"].found)
    assert remedy in (found["measuring"].remedy or "")
    of_host = finding(CHECKS[names.index("measuring")], replace(seen, kind=CPU)).remedy or ""
    assert ("gloo speaks" in of_host) == (fault == "hang")
    assert "NCCL" not in of_host
    assert bool(blocking(seen)) == (fault == "hang")
    assert ("not run" in judged(seen)["strategies"].found) == (fault == "hang")


@pytest.mark.parametrize(("capability", "rate"), [([8, 0], 25.0), ([8, 6], 14.0625)])
def test_links_of_one_version_have_half_the_lanes_on_some_gpus(capability: list[int], rate: float) -> None:
    found = health(
        nvmlDeviceGetNvLinkVersion=lambda *_: 5, nvmlDeviceGetCudaComputeCapability=lambda _: capability
    )
    assert found[0].nvlink_gb_per_s == rate


def test_a_slow_device_is_named_where_the_rates_of_links_are_unknown(wording: Wording) -> None:
    seen = replace(evidence(), health=(GpuHealth(),) * 3)
    seen = with_gpus(seen, lambda gpu: replace(gpu, peer_links=dict.fromkeys(range(3), "PCIe")))
    for rank, rate in enumerate((1.0, 1.0)):
        pairs = (replace(pair, gb_per_s=rate if pair.high == 2 else 10.0) for pair in seen.facts[rank].pairs)
        seen = of_rank(rank, pairs=tuple(pairs))(seen)
    wording(judged(seen)["pairs of devices"].found)


def test_a_device_with_only_slow_links_is_named_itself(wording: Wording) -> None:
    seen = evidence()
    for rank, rate in enumerate((4.0, 2.0)):
        slow = (replace(pair, gb_per_s=rate) if pair.high == 2 else pair for pair in seen.facts[rank].pairs)
        seen = of_rank(rank, pairs=tuple(slow))(seen)
    wording(not_ok(seen)["pairs of devices"].found)


def test_after_a_check_on_which_ranks_depend_no_rank_is_started() -> None:
    assert blocking(mig(evidence()))
    assert not blocking(evidence())
    assert blocking(INJECTED["full disk"][0](evidence()))


# Figures that can't be, and figures that say nothing about a device: neither passes as ok


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


@pytest.mark.parametrize("figure", WRONG)
def test_power_and_clocks_that_cannot_be_are_no_figures(figure: float) -> None:
    seen = evidence()
    for rank in range(3):
        seen = of_rank(rank, power_w=figure, clock_mhz=figure)(seen)
    found = judged(seen)
    assert found["energy"].found == f"counted; power is {NOT_REPORTED}"
    assert (found["clock rates"].status, found["clock rates"].found) == ("skipped", NOT_REPORTED)


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


ON_ONE_CORE = on_cores(0.5, (0,))
USED = {
    "by each other": ON_ONE_CORE,
    "by each other and a little": on_cores(0.52, (3,)),
    "by others": on_cores(1.2, (0,)),
    "by no one knows whom": on_cores(None, (0,)),
    "two cores": on_cores(0.5, (0, 1)),
    "by others, with cores of their own": replace(
        ON_ONE_CORE, facts=(ON_ONE_CORE.facts[0], replace(ON_ONE_CORE.facts[1], cores=(1,)))
    ),
    "by others, on nodes of their own": replace(ON_ONE_CORE, nodes=(0, 1), hosts=("a", "b")),
}


@pytest.mark.parametrize("name", USED)
def test_what_uses_the_cores_is_said_as_far_as_it_is_known(name: str, wording: Wording) -> None:
    found = device_speed(USED[name])
    assert found.status == "skipped"
    wording(found.found)


# What ends the jobs of a self-test for a cause of the machine: each is named, with what to do about it


AS_NO_ONE = ("setpriv", "--reuid", "54322", "--regid", "54322", "--clear-groups")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
CAN_READ = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""Lets it read Python, wherever that is installed. A user who is root has no limit of processes."""
START = "from gpurun.launcher.errors import MachineError\nfrom types import SimpleNamespace\n"
OUTCOME = f"""{START}
import threading
from gpurun.launcher.selftest.self_test import outcome_of
print(outcome_of(lambda: threading.Thread(target=print).start()))
"""
HISTORIES = f"""{START}
from gpurun.launcher.inspect import snapshot
snapshot.ask_history = lambda control, state: state
print(snapshot.ask_histories(None, {{0: "a", 1: "b"}}))
"""
REFUSED = f"""{START}
from gpurun.launcher.machine.resource_limits import check_limits
try:
    check_limits(2)
except MachineError as error:
    print(error)
"""
NO_LOOPBACK = f"""{START}
from gpurun.launcher.machine.network import check_loopback
try:
    check_loopback()
except MachineError as error:
    print(error)
"""


def output(code: str, *prefix: str) -> str:
    """What a program prints under these limits."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    argv = [*prefix, sys.executable, "-P", "-c", code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def as_user(limit: str) -> tuple[str, ...]:
    return (*AS_NO_ONE, *CAN_READ, "bash", "-c", f'{limit}; exec "$@"', "bash")


@needs_root
def test_at_the_limit_of_processes_ranks_are_asked_one_after_the_other() -> None:
    """What the watch over a hang does: a thread per rank can't be started."""
    assert output(HISTORIES, *as_user("ulimit -u 1")) == "{0: 'a', 1: 'b'}\n"


@pytest.mark.slow
@needs_root
def test_at_the_limit_of_processes_a_job_is_a_failed_check() -> None:
    found = output(OUTCOME, *as_user("ulimit -u 1"))
    assert "problem=\"gpurun can't continue: can't start new thread\"" in found
    assert "`ulimit -u` is 1" in found


@needs_root
def test_a_limit_of_processes_that_ranks_would_exceed_is_refused_before_the_start(wording: Wording) -> None:
    wording(output(REFUSED, *as_user("ulimit -u 30")))
    assert output(REFUSED, *as_user("ulimit -u 4096")) == ""
    assert (
        output(REFUSED, "bash", "-c", 'ulimit -u 30; exec "$@"', "bash") == ""
    )  # Linux doesn't count root's


@needs_root
def test_without_a_loopback_interface_no_rank_is_started(wording: Wording) -> None:
    wording(output(NO_LOOPBACK, "unshare", "--net"))
    assert output(NO_LOOPBACK) == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (OSError(24, "Too many open files"), "ulimit -n"),
    ],
)
def test_an_exhausted_limit_of_the_command_itself_ends_in_a_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == MachineError.exit_code
    assert words in capsys.readouterr().err


def test_errors_that_no_limit_causes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> NoReturn:
        raise RuntimeError("a bug")

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(RuntimeError):
        command.main()
    with pytest.raises(RuntimeError):
        outcome_of(lambda: fail())


def test_what_was_found_before_an_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(title: str, number: int, count: int) -> NoReturn:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        run_selftest(NO_POOLS, "cpu:1", tmp_path / "run", lambda found: None, begin)
    assert read_json(tmp_path / "run" / SELFTEST, Result).checks


# The remedy is that of the cause


def failure(message: str, error: str | None = "RuntimeError", **changes: Any) -> Failure:
    found = Failure(1, None, "exception", f"raised {error}", message, "", None, (), False, error)
    return replace(found, **changes)


SEMAPHORE = """\
  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__
    sl = self._semlock = _multiprocessing.SemLock(
                         ^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 28] No space left on device
"""
READ_ONLY = SEMAPHORE.replace("[Errno 28] No space left on device", "[Errno 30] Read-only file system")
ABORTED = """\
terminate called without an active exception
Fatal Python error: Aborted

Current thread 0x00007ff7bc031b80 (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper
"""
"""Of gloo, where it could start only one of its two threads."""
FAILING = evidence().jobs[FAULTS].variants
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
CAUSES: dict[str, tuple[Failure, str, str]] = {
    "open files": (failure("[Errno 24] Too many open files", "OSError"), "", "`ulimit -n` is"),
    "processes": (failure("Resource temporarily unavailable"), "", "`ulimit -u` is"),
    "memory of threads": (failure("Resource temporarily unavailable"), "", "`ulimit -v` is 4000 KiB: raise"),
    "an abort": (
        failure("Aborted", kind="signal", error=None),
        "Fatal Python error: Aborted",
        "`ulimit -v` is 4000 KiB",
    ),
    "processes of gloo": (failure("Aborted", kind="signal", error=None), ABORTED, "`ulimit -u` is"),
    "shared memory": (
        failure("[Errno 28] No space left on device", "OSError", traceback=SEMAPHORE),
        "",
        "/dev/shm is full",
    ),
    "unwritable shared memory": (
        failure("[Errno 30] Read-only file system", "OSError", traceback=READ_ONLY),
        "",
        "mount it writable",
    ),
    "size of files": (failure("[Errno 27] File too large", "OSError"), "", "`ulimit -f` is 4000 KiB"),
    "memory": (failure(NO_MEMORY), "", "`ulimit -v` is 4000 KiB"),
    "killed for memory": (failure(oom_killed(), error=None, kind="oom"), "", "for lack of memory"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("part", [MEASURING, TRAINING, FAULTS, LINKS])
def test_the_remedy_is_that_of_the_cause_in_every_part(
    cause: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, log, words = CAUSES[cause]
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    run = RunDir(tmp_path)
    write_json(run.root_cause("01-ddp-2"), replace(found, hint=what_to_do(found, log)))
    hint = hint_of(run, "launches/01-ddp-2/log/rank1.log")
    assert hint is not None
    assert words in hint
    lost = variant(status="failed", reason=found.reason, split=(9, 9, 9))
    job = RanJob((lost,) if part == TRAINING else (), problem=found.reason, remedies={found.reason: hint})
    seen = with_job(part, job)
    assert hint in [each.remedy for each in judged(seen, (part,)).values() if each.status == "failed"]
    assert bool(blocking(seen)) == (part != LINKS)


def with_job(part: str, job: RanJob) -> Evidence:
    without = {"facts": ()} if part in (MEASURING, LINKS) else {}
    return replace(evidence(), jobs={**evidence().jobs, part: job}, **without)  # type: ignore[arg-type]


OF_CAUSE = "end other programs"


@pytest.mark.parametrize("fault", ["late", "oom", "killed", "asleep"])
def test_the_oom_killer_beats_each_checks_own_remedy_and_ends_what_follows(fault: str) -> None:
    reason = f"rank 2 was killed by SIGKILL: {oom_killed()}"
    changed = [faulty(fault, "oom", reason) if is_same(each, fault) else each for each in FAILING]
    hangs = () if fault == "asleep" else evidence().jobs[FAULTS].hangs
    job = RanJob(tuple(changed), problem=reason, remedies={reason: OF_CAUSE}, hangs=hangs)
    found = judged(with_job(FAULTS, job))
    wrong = {each.name: each.remedy for each in found.values() if each.status == "failed"}
    assert set(wrong.values()) == {OF_CAUSE}
    assert found["loader workers"].found == f"not run, because of: {next(iter(wrong))}"


def test_a_server_that_the_oom_killer_ends_is_named_with_what_to_do() -> None:
    job = not_run(MachineError(why_server_ended(["a warning"], was_oom_killed=True)))
    assert "OOM killer ended the server that starts the ranks" in str(job.problem)
    assert "end other programs" in job.remedies[str(job.problem)]
    assert "a warning" not in job.remedies[str(job.problem)]
    assert "(out of memory? see the kernel's log)" in why_server_ended([])


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_loader_worker_is_blamed_on_memory_where_the_kernel_counted_one(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpurun.launcher.machine.resource_limits.oom_kills", lambda: kills)
    words = "DataLoader worker (pid 4194305) is killed by signal: Killed. "
    hint = what_to_do(failure(words), "")
    assert bool(hint) == bool(kills)


def test_that_a_rank_runs_out_of_memory_as_it_should_ends_nothing() -> None:
    """Under a large `ulimit -v`, its words have a remedy."""
    reason = str(faulty_of("oom").reason)
    job = replace(evidence().jobs[FAULTS], remedies={reason: "raise `ulimit -v`"})
    assert not blocking(with_job(FAULTS, job))


def is_same(found: VariantResult, fault: str) -> bool:
    return found.split == faulty(fault, "ok", None).split


def faulty_of(fault: str) -> VariantResult:
    return next(each for each in FAILING if is_same(each, fault))


def test_a_file_that_ulimit_forbids_names_it_and_no_other_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = unwritable(tmp_path, OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
    assert "--out" in str(elsewhere(error))  # the file system's own limit
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    limited = elsewhere(error)
    assert str(limited).endswith("`ulimit -f` is 4000 KiB: raise it (ulimit -f unlimited)")
    found = judged(with_job(MEASURING, not_run(limited)))
    assert found["measuring"].remedy == "`ulimit -f` is 4000 KiB: raise it (ulimit -f unlimited)"
    run = RunDir(tmp_path)
    run.log("01", 0).parent.mkdir(parents=True)
    run.log("01", 0).write_text(str(error))
    of_rank = full_disk(run, "01", 0, None)
    assert str(of_rank).startswith(f"the workers can't write {tmp_path}: File too large;")
    assert "ulimit -f unlimited), then continue" in str(of_rank)
    assert "--resume" not in next(iter(not_run(of_rank).remedies.values()))


def test_no_memory_without_a_limit_is_no_exhausted_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    assert what_to_do(failure(NO_MEMORY), "") is None
    assert what_to_do(failure("Aborted", kind="signal", error=None), "Fatal Python error: Aborted") is None
    assert "ulimit -v" not in str(what_to_do(failure("Resource temporarily unavailable"), ""))


def test_a_hang_under_a_limit_of_memory_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen under `ulimit -v 700000`: gloo could start only some of its threads."""
    lost = variant(status="hung", reason="no step completed for 52 s")
    seen = with_job(MEASURING, RanJob((lost,), problem=lost.reason))
    assert "NCCL_P2P" in str(judged(seen)["measuring"].remedy)
    monkeypatch.setattr("resource.getrlimit", lambda _: (4_096_000, 4_096_000))
    assert "`ulimit -v` is 4000 KiB" in str(judged(seen)["measuring"].remedy)


ERRORS: dict[str, tuple[Callable[[], GpurunError], str]] = {
    "full disk": (lambda: full_disk(RunDir(Path("run")), "01-ddp-2", 0, None), "free some space, or name"),
    "open files": (lambda: MachineError("`ulimit -n` is 60\n    raise it"), "raise it"),
}


@pytest.mark.parametrize("cause", ERRORS)
def test_an_error_that_ends_a_job_says_what_to_do(cause: str) -> None:
    error, words = ERRORS[cause]
    found = judged(with_job(MEASURING, not_run(error())), (MEASURING,))["measuring"]
    assert found.status == "failed"
    assert words in (found.remedy or "")
    assert "--resume" not in (found.remedy or "")


# Every case that a judge names is in the table, with the figures that its sentence needs; none is unused


JUDGES = Path(__file__).resolve().parents[3] / "launcher/selftest"
TABLES: Mapping[str, Mapping[str, Case]] = {
    "ok": {name: Case(sentence) for name, sentence in OK.items()},
    "failed": FAILED,
    "skipped": {name: Case(sentence) for name, sentence in SKIPPED.items()},
}
SLOT = re.compile(r"\{(\w+)")


def needed(case: Case) -> set[str]:
    """The figures without which there is no sentence or no remedy."""
    return set(SLOT.findall(re.sub(r"\[[^]]*\]", "", f"{case.sentence} {case.remedy}")))


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """How a judge decides, the case that it names, and the call."""
    trees = (ast.parse(path.read_text()) for path in sorted(JUDGES.glob("*.py")))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TABLES:
            yield from ((ast.unparse(node.func), case, node) for case in named(node.args[0]))


def named(case: ast.expr) -> list[str]:
    """The names of an argument, which may depend on a condition."""
    match case:
        case ast.IfExp(body=then, orelse=other):
            return [*named(then), *named(other)]
        case ast.Constant(value=str(name)):
            return [name]
    return []


def test_a_case_has_the_figures_that_it_needs() -> None:
    found = list(calls())
    assert len(found) > sum(map(len, TABLES.values())) / 2
    for status, case, call in found:
        given = {keyword.arg for keyword in call.keywords}
        assert None in given or needed(TABLES[status][case]) <= given, case


@pytest.mark.parametrize("names", [*TABLES.values(), REMEDIES])
def test_every_case_and_every_remedy_is_named_somewhere(names: Collection[str]) -> None:
    sources = "".join(path.read_text() for path in JUDGES.glob("*.py"))
    assert not [name for name in names if f'"{name}"' not in sources]
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", name) for name in names)


def test_no_figure_of_a_case_has_the_name_of_something_else() -> None:
    taken = {*signature(finding_of).parameters, "where", "check", "case"}
    assert not {name for case in FAILED.values() for name in SLOT.findall(case.sentence)} & taken


# Faults are put into what healthy nodes measure together: each is named, with its node, and nothing else


def of_nodes(**changes: Any) -> Evidence:
    """Three nodes with a GPU each, and interfaces of 25 GB/s."""
    facts = tuple(
        replace(each, pairs=tuple(PairRate(each.rank, high, 20.0) for high in range(each.rank + 1, 3)))
        for each in evidence().facts
    )
    together: dict[str, Any] = {"nodes": (0, 1, 2), "hosts": ("a", "b", "c"), "network_gb_per_s": (25.0,) * 3}
    names = tuple(f"cuda:0@{node} ({host})" for node, host in enumerate("abc"))
    return replace(evidence(), devices=names, health=(), **({"facts": facts} | together | changes))


def with_pairs(seen: Evidence, change: Callable[[PairRate], PairRate]) -> Evidence:
    facts = tuple(replace(each, pairs=tuple(map(change, each.pairs))) for each in seen.facts)
    return replace(seen, facts=facts)


def slow_node(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=2.0) if pair.high == 2 else pair


def slow_pair(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=2.0) if pair.low == 1 else pair


def slow(pair: PairRate) -> PairRate:
    return replace(pair, gb_per_s=0.1)


TIMED_OUT = RanJob(problem="rank 1 raised RuntimeError: connect timeout")
OF_NODES: dict[str, tuple[Evidence, set[str]]] = {
    "none": (of_nodes(), set()),
    "a slow link": (with_pairs(of_nodes(), slow_pair), {"pairs of nodes"}),
    "a slow node": (with_pairs(of_nodes(), slow_node), {"pairs of nodes"}),
    "unknown interfaces": (
        with_pairs(of_nodes(network_gb_per_s=(25.0, None, None)), slow_node),
        {"pairs of nodes"},
    ),
    "all slow": (with_pairs(of_nodes(), slow), {"pairs of nodes"}),
    "a slow device": (of_rank(1, gflop_per_s=100.0)(of_nodes()), {"speed of nodes"}),
    "a wrong sum": (of_rank(1, wrong_sums=("1 of 9 elements on rank 1",))(of_nodes()), {"sums over nodes"}),
    "a firewall": (of_nodes(facts=(), jobs={LINKS: TIMED_OUT}), {"nodes together"}),
}


@pytest.mark.parametrize("fault", OF_NODES)
def test_a_fault_between_nodes_is_named_by_its_check_alone(fault: str, wording: Wording) -> None:
    seen, checks = OF_NODES[fault]
    found = list(findings(seen, (LINKS,)))
    assert [each.name for each in found] == [check.name for check in NODE_CHECKS]
    assert {each.name for each in found if each.status == "failed"} == checks
    wording("\n".join(f"{each.name}: {each.found}; {each.remedy}" for each in found))


def test_links_of_a_node_without_ranks_are_not_measured() -> None:
    found = list(without_links(["visible devices on node 1 (b)"]))
    assert {each.found for each in found} == {"not run, because of: visible devices on node 1 (b)"}
    assert {each.status for each in found} == {"skipped"}


# What a self-test begins with, devices and earlier rates, and what it ends with


# Earlier self-tests


def keep(directory: Path, name: str, gflop_per_s: float, hostname: str = "h", **changes: Any) -> None:
    rate = replace(DeviceRate("cuda:1", UUIDS[1], gflop_per_s, 4096, 0.0), **changes)
    day = name[:10] if len(name) >= 10 else "2026-01-01"
    write_json(directory / name / SELFTEST, Result((), 1, hostname, day, (rate,)))


def test_the_newest_are_looked_at_whatever_their_directories_are_called(tmp_path: Path) -> None:
    for number in range(MOST_EARLIER + 1):
        keep(tmp_path, f"{number:02d}", 50_000.0 + number)
        os.utime(tmp_path / f"{number:02d}" / SELFTEST, (1e9 - number, 1e9 - number))
    ((found,), _, _) = earlier_rates((tmp_path,))
    assert found.rate.gflop_per_s == 50_000.0 + MOST_EARLIER - 1


def since(directory: Path, seen: Evidence | None = None) -> CheckResult:
    """The speed of a machine next to what earlier self-tests have kept."""
    rates, busy, notes = earlier_rates((directory,))
    found = replace(seen or evidence(), earlier=rates, earlier_busy=busy, earlier_notes=notes)
    return earlier_speed(found)


FIRST = ("2026-01-01_10-00-00", 50_000.0, dict[str, Any]())
NEXT = "2026-01-02_10-00-00"
KEPT: dict[str, tuple[str, list[tuple[str, float, dict[str, Any]]]]] = {
    "faster before": (
        "failed",
        [("2026-01-01_10-00-00", 60_000.0, {}), ("2026-02-01_10-00-00", 50_200.0, {})],
    ),
    "an unknown device": ("ok", [FIRST, (NEXT, 50_000.0, {"device": "tpu:0"})]),
    "no device": ("ok", [FIRST, (NEXT, 50_000.0, {"device": ""})]),
    "an escape sequence as its day": ("ok", [FIRST, ("\x1b[31mred   ", 60_000.0, {})]),
    "no day": ("ok", [FIRST, ("2026-13-01", 60_000.0, {})]),
    "a rate that is too large": ("ok", [FIRST, ("2026-01-02", 1e300, {})]),
    "a rate below 0": ("ok", [FIRST, ("2026-01-02", -1.0, {})]),
    "other sizes and devices": (
        "ok",
        [
            FIRST,
            (NEXT, 90_000.0, {"matrix_rows": 512}),
            ("2026-01-03_10-00-00", 90_000.0, {"matrix_rows": 512, "identity": UUIDS[2]}),
        ],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_device_is_compared_with_what_it_did_before(name: str, tmp_path: Path, wording: Wording) -> None:
    """Results that are damaged are ignored and named."""
    status, kept = KEPT[name]
    for directory, gflop_per_s, changes in kept:
        keep(tmp_path, directory, gflop_per_s, **changes)
    found = since(tmp_path)
    assert found.status == status
    wording(found.found, hide="\x1b")


def test_no_escape_sequence_reaches_the_terminal() -> None:
    """A path, or the name of a device in a damaged file, may have one."""
    text = line(
        failed("gpu-unusable", problem="\x1b[31mred\x1b[0m \x07bell", advice="\x1b]0;title\x07do this").named(
            "a", ""
        ),
        80,
    )
    assert "red bell" in text
    assert "do this" in text
    assert "\x1b" not in text


def test_it_is_said_that_earlier_rates_are_left_out_because_of_busy_cores(
    tmp_path: Path, wording: Wording
) -> None:
    """Of CPU devices; GPUs compute without the host's cores."""
    host = on_cpu()
    identity = rates_of(host)[0].identity
    of_host: dict[str, Any] = {"device": "cpu:0", "identity": identity, "queue_share": 0.5}
    keep(tmp_path / "cpu", "2026-01-02_10-00-00", 60_000.0, **of_host)
    keep(tmp_path / "gpu", "2026-01-02_10-00-00", 50_000.0, queue_share=0.5)
    assert since(tmp_path / "none", host).found.startswith("no earlier self-test")
    wording(since(tmp_path / "cpu", host).found)
    wording(since(tmp_path / "gpu").found)


def on_cpu(machine_id: str = "b1", cores: tuple[int, ...] = (0, 1), **changes: Any) -> Evidence:
    """A machine with one CPU device."""
    facts = replace(evidence().facts[0], cores=cores)
    machine = replace(evidence().machine, gpus=(), cpu_cores=2, cpu_model="a CPU", hostname="h")
    seen = replace(evidence(), kind=CPU, devices=("cpu:0",), facts=(facts,), machine_id=machine_id)
    return replace(seen, machine=replace(machine, **changes))


OTHER_MACHINES = {
    "another host": on_cpu(hostname="other"),
    "another one of that name": on_cpu(machine_id="c2"),
    "another CPU": on_cpu(cpu_model="another"),
    "other cores": on_cpu(cores=(2, 3)),
    "more cores": on_cpu(cores=(0, 1, 2, 3), cpu_cores=4),
    "a quota": on_cpu(cpu_cores=1),
}


@pytest.mark.parametrize("other", OTHER_MACHINES)
def test_rates_of_a_cpu_are_compared_with_those_of_the_same_cores_alone(other: str, tmp_path: Path) -> None:
    (rate,) = rates_of(on_cpu())
    write_json(tmp_path / "earlier" / SELFTEST, Result((), 1, "h", "2026-01-01", (rate,)))
    assert since(tmp_path, on_cpu()).status == "ok"
    assert since(tmp_path, OTHER_MACHINES[other]).status == "skipped"


def test_a_gpu_is_the_same_whatever_its_host_is_called(tmp_path: Path) -> None:
    """A container's name is made up again each time. Of another GPU nothing is compared."""
    keep(tmp_path, "2026-01-01_10-00-00", 60_000.0, hostname="f3a9c1")
    assert since(tmp_path).status == "failed"
    others = tuple(replace(gpu, uuid=f"GPU-other-{gpu.index}") for gpu in evidence().machine.gpus)
    machine = replace(evidence().machine, hostname="f3a9c1", gpus=others)
    assert since(tmp_path, replace(evidence(), machine=machine)).status == "skipped"


def test_by_what_machines_of_one_name_differ_is_not_the_id_itself(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    assert machine_id(tmp_path) == ""
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    first = machine_id(tmp_path)
    (tmp_path / "etc/machine-id").write_text("f123456789abcdef0123456789abcdef\n")
    assert first not in ("", machine_id(tmp_path))
    assert "0123" not in first


def test_of_many_machines_results_each_has_its_own(tmp_path: Path) -> None:
    for number in range(MOST_EARLIER + 1):
        keep(tmp_path, f"{number:02d}", 90_000.0, identity=f"GPU-{number}")
        os.utime(tmp_path / f"{number:02d}" / SELFTEST, (1e9 + number, 1e9 + number))
    assert len(earlier_rates((tmp_path, tmp_path / "../" / tmp_path.name))[0]) == MOST_EARLIER + 1


def test_a_file_of_another_version_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "2026-01-03_10-00-00").mkdir()
    (tmp_path / "2026-01-03_10-00-00" / SELFTEST).write_text("{}")
    assert earlier_rates((tmp_path,)) == ((), frozenset(), ())


# What is said where all is well


@pytest.mark.parametrize(
    "found",
    [
        (ok("gpus-free"), ok("one-node"), skipped("needs-gpu")),
        (ok("gpus-free"), failed("no-gpu"), skipped("needs-gpu")),
    ],
)
def test_the_answer_counts_the_checks(found: tuple[CheckResult, ...], wording: Wording) -> None:
    wording(*(each.text for each in findings_of(found)))


def test_devices_without_counters_of_memory_errors_are_named(wording: Wording) -> None:
    def count(handle: int, *_: int) -> int:
        if handle != 1:
            raise NVMLError("Not Supported")
        return 0

    found = judged(replace(evidence(), health=health(nvmlDeviceGetTotalEccErrors=count)))["memory errors"]
    wording(found.found)


def test_one_rank_has_no_collectives_to_match() -> None:
    alone = first_variant(TRAINING, ranks=evidence().job(TRAINING).variants[0].ranks[:1])(evidence())
    only = in_job(TRAINING, variants=alone.job(TRAINING).variants[:1])(replace(alone, devices=DEVICES[:1]))
    assert traces(only).found == "work on every rank"


def test_without_a_measured_strategy_nothing_is_said_about_traces() -> None:
    lost = tuple(replace(each, status="failed") for each in evidence().job(TRAINING).variants)
    assert traces(in_job(TRAINING, variants=lost)(evidence())).status == "skipped"


def test_amd_gpus_are_named_also_where_cpu_devices_are_tested() -> None:
    note = "this machine has an AMD GPU"
    machine = replace(three_gpus(), gpus=(), driver=None, notes=(note,))
    seen = replace(evidence(), machine=machine, devices=())
    assert note in driver(seen).found
    assert visible_devices(replace(seen, kind=CPU, devices=("cpu:0",))).found.endswith(f"; {note}")


@pytest.mark.parametrize("changes", [{}, {"used_gib": {}}, {"kind": CPU}])
def test_memory_is_called_free_only_where_it_was_looked_at(changes: dict[str, Any], wording: Wording) -> None:
    wording(out_of_memory(replace(evidence(), **changes)).found)


def test_a_next_launch_that_failed_is_not_said_to_have_worked() -> None:
    lost = faulty("sound", "failed", "rank 0 ended with exit code 7")
    failing = evidence().jobs[FAULTS].variants
    variants = tuple(lost if each.split == lost.split else each for each in failing)
    found = judged(in_job(FAULTS, variants=variants)(evidence()))
    for name in ("out of memory", "a killed rank"):
        assert found[name].status == "failed"
        assert found[name].found == "the next launch failed: rank 0 ended with exit code 7"


# Wished devices


NO_GPU = replace(three_gpus(), gpus=(), cpu_cores=8)
OLD_DRIVER = unusable(CU130, "12.8")(evidence()).machine


@pytest.mark.parametrize(
    ("wish", "machine", "found"),
    [
        ("auto", three_gpus(), (CUDA, DEVICES)),
        ("cuda", three_gpus(), (CUDA, DEVICES)),
        ("cuda:1", three_gpus(), (CUDA, ("cuda:1",))),
        ("cuda:2, cuda:0", three_gpus(), (CUDA, ("cuda:2", "cuda:0"))),
        ("auto", NO_GPU, (CPU, ("cpu:0", "cpu:1"))),
        ("auto", replace(NO_GPU, nvml_error="Driver/library version mismatch"), (CUDA, ())),
        *((wish, NO_GPU, (CUDA, ())) for wish in ("cuda", "cuda:0", "cuda:0,cuda:1", "[cuda:0]", "GPU-1b2c")),
        ("cuda:1", OLD_DRIVER, (CUDA, ("cuda:1",))),
    ],
)
def test_devices_are_named_as_in_a_job_file_or_by_commas(
    wish: str, machine: Machine, found: tuple[Accelerator, tuple[str, ...]]
) -> None:
    """Without a driver every wish for GPUs gets the checks; so do GPUs that torch can't use."""
    assert wished_devices(wish, machine) == found


@pytest.mark.parametrize("wish", ["cpu:x", "cpu", "cuda:x", "gpu", "cpu:0,cuda:1", ""])
def test_what_an_error_advises_can_be_given(wish: str) -> None:
    with pytest.raises(SpecError) as caught:
        wished_devices(wish, three_gpus())
    advice = re.split("use|write|known kinds|for example|`", str(caught.value), maxsplit=1)[-1]
    for advised in re.findall(r"\[[^]]+\]|cpu:\d|cuda(?::\d)?", advice):
        assert wished_devices(advised, three_gpus())


@pytest.mark.parametrize("wish", ["cpu:x", "cpu:2,cpu:2"])
def test_no_error_about_the_option_shows_what_a_job_file_has(wish: str) -> None:
    with pytest.raises(SpecError) as caught:
        wished_devices(wish, three_gpus())
    assert not re.search(r"\[|`devices", str(caught.value))


def test_checks_that_were_not_run_for_one_reason_are_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    seen = replace(evidence(), machine=replace(evidence().machine, gpus=(), driver=None), devices=())
    lines = Lines(80, on_nodes=False)
    for each in findings(seen, PARTS):
        lines.show(each)
    lines.end()
    shown = capsys.readouterr().out
    assert shown.count("not run, because of: ") == 3
    assert re.search("^skipped  22 checks  ", shown, re.MULTILINE)
    assert all(check.name in " ".join(shown.split()) for check in CHECKS)


def test_a_mistyped_wish_removes_nothing(tmp_path: Path) -> None:
    for wish in ("tpu:3", "cpu:0,cuda:0"):
        with pytest.raises(SpecError):
            run_selftest(NO_POOLS, wish, tmp_path, lambda finding: None, lambda *part: None)
        assert tmp_path.is_dir()


def test_nothing_stays_of_a_directory_that_was_made_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(wish: str, directory: Path) -> None:
        assert directory.is_dir()
        raise MachineError("a device is not there")

    monkeypatch.setattr(self_test, "begin_evidence", fails)
    with pytest.raises(MachineError):
        run_selftest(NO_POOLS, "cpu:1", tmp_path / "a/b/c", lambda check: None, lambda *part: None)
    assert not list(tmp_path.iterdir())


# A full disk


def test_on_a_full_disk_no_rank_is_started_and_the_result_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    def full(path: Path, value: Any) -> None:
        raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(result_module, "write_json", full)
    shown: list[CheckResult] = []
    result, directory, not_kept = run_selftest(
        NO_POOLS, "cpu:1", tmp_path / "run", shown.append, lambda *part: pytest.fail("a job has begun")
    )
    assert {each.name for each in result.checks if each.status == "failed"} == {"run directory"}
    assert list(result.checks) == shown
    assert not directory.exists()
    assert not_kept is not None
    wording(not_kept)
    monkeypatch.setattr(
        "gpurun.launcher.cli.commands.selftest.run", lambda *args: (result, directory, not_kept)
    )
    printed = CliRunner().invoke(selftest, ["--json", "--out", str(tmp_path)])
    assert isinstance(printed.exception, MachineError)
    assert str(printed.exception) == f"1 of {len(CHECKS)} checks failed; {not_kept}"
    assert json.loads(printed.stdout)["checks"][0]["name"] == CHECKS[0].name


def test_what_jobs_wrote_before_the_disk_was_full_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    (tmp_path / "measuring").mkdir()
    (tmp_path / SELFTEST).mkdir()  # a file can't replace it
    wording(keep_result(Result(()), tmp_path, is_latest=False) or "")


# The page


def test_the_page_names_every_check() -> None:
    page = (Path(__file__).parents[3] / "docs/selftest.md").read_text()
    assert not [check.name for check in CHECKS if check.name not in page]
