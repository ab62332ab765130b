"""Faults are put into what a self-test finds on a healthy machine: each is named, and nothing else."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from gpurun.launcher.findings.check_cases import NOT_REPORTED
from gpurun.launcher.machine.accelerators import CPU, CUDA, ROCM, TorchBuild, nvidia_problem
from gpurun.launcher.machine.gpus.gpu import Gpu
from gpurun.launcher.machine.gpus.nvml import GpuHealth
from gpurun.launcher.rundir.records import StepRecord
from gpurun.launcher.selftest.check_table import (
    CHECKS,
    blocking,
    finding,
    findings,
)
from gpurun.launcher.selftest.evidence import (
    FAULTS,
    GRADIENTS,
    MEASURING,
    PARTS,
    PROGRAMS,
    TRAINING,
    CheckResult,
    DeviceRate,
    EarlierRate,
    Evidence,
    RanJob,
)
from gpurun.launcher.selftest.run_checks import FAULTY
from tests.unit.machine.fake_driver import UUIDS, NVMLError
from tests.unit.selftest.healthy import DEVICES, SLEEPING, evidence, health, three_gpus, variant
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


FIRST_TIME = {"speed as before"}
"""There is no earlier self-test on the healthy machine."""


def test_on_a_healthy_machine_every_check_is_ok() -> None:
    found = not_ok(evidence())
    assert found.keys() == FIRST_TIME
    assert judged(evidence()).keys() == {check.name for check in CHECKS}


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


def no_numa(seen: Evidence) -> Evidence:
    return with_gpus(seen, lambda gpu: replace(gpu, numa_node=None))


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
        recorded[name][1] = change_steps(recorded[name][1])
        return in_job(PROGRAMS, steps=recorded)(seen)

    return change


def unrecorded(name: str) -> Change:
    return of_steps(name, lambda steps: ())


unskipped = of_steps("skipped-step", lambda steps: tuple(changed(step, kind="timed") for step in steps))
no_set_device = of_steps("no-set-device", lambda steps: tuple(changed(step, peak_bytes=0) for step in steps))


def busy(seen: Evidence) -> Evidence:
    return with_gpus(seen, lambda gpu: replace(gpu, used_gib=20.0) if gpu.index == 1 else gpu)


def two_slow(seen: Evidence) -> Evidence:
    return of_rank(2, gflop_per_s=25_000.0)(of_rank(1, gflop_per_s=25_000.0)(seen))


def all_slow(seen: Evidence) -> Evidence:
    return replace(seen, facts=tuple(replace(each, gflop_per_s=15_000.0) for each in seen.facts))


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
    "NUMA unknown": (no_numa, "NUMA nodes", "cuda:0, cuda:1, cuda:2 is not reported"),
    "full disk": (lambda seen: replace(seen, free_gib=0.1), "run directory", "0.10 GiB"),
    "profiler in use": (profiler_in_use, "traces", "another profiler is in use"),
    "busy GPU": (busy, "free GPUs", "cuda:1 is used by other processes: 20.0 of 140.0 GiB"),
    "PCIe lanes lost": (of_rank(1, pcie_link=(5, 1)), "PCIe links", "cuda:1 has generation 5 x1 at work"),
    "PCIe generation lost": (of_rank(1, pcie_link=(1, 16)), "PCIe links", "not generation 5 x16"),
    "clock limited": (of_rank(1, clock_mhz=900.0, power_w=300.0), "clock rates", "cuda:1 ran at 900 of"),
    "rate no number": (of_rank(1, gflop_per_s=NAN), "device speed", "cuda:1 does nan"),
    "clock no number": (of_rank(1, clock_off=NAN), "device clocks", "cuda:1 is off by nan"),
    "slower by a quarter": (of_rank(1, gflop_per_s=37_500.0), "device speed", "cuda:1 does 37"),
    "two of three slow": (two_slow, "device speed", "cuda:1 does 25"),
    "all far below the peak": (all_slow, "device speed", "at its peak"),
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
    "loader's steps missed": (unrecorded("loader-workers"), "loader workers", "0 steps of rank 1 recorded"),
    "skipped step missed": (unskipped, "a skipped step", "0 skipped steps of rank 1 seen"),
    "graph's steps missed": (unrecorded("graph"), "a captured graph", "0 steps of rank 1 recorded, not 32"),
}
"""Fault → how it is put in, the check that names it, and words of what it says."""
UNKNOWN = {"no energy counter", "NUMA unknown"}
"""Not failures: a figure is missing, and the check says which."""


def test_every_check_has_a_fault_of_its_own() -> None:
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hangs": ()}, "no hang was noticed"),
        ({"hangs": ("rank 2 is in `forward`; ranks 0, 1 wait",)}, "the collective is not named"),
    ],
)
def test_a_sleeping_rank_has_to_be_named_with_its_collective(changes: Any, words: str) -> None:
    found = not_ok(in_job(FAULTS, **changes)(evidence()))
    assert words in found["a sleeping rank"].found


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


@pytest.mark.parametrize(("power_w", "status"), [(690.0, "ok"), (None, "ok"), (300.0, "failed")])
def test_a_clock_that_the_power_limit_keeps_down_is_no_fault(power_w: float | None, status: str) -> None:
    seen = of_rank(0, clock_mhz=0.55 * 1980, power_w=power_w)(evidence())
    found = judged(seen)["clock rates"]
    assert found.status == status
    assert "cuda:0" in found.found


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


def test_a_device_is_compared_with_others_of_its_model_alone() -> None:
    other = of_rank(2, name="NVIDIA T4", gflop_per_s=8_000.0)
    assert not_ok(other(evidence())).keys() == FIRST_TIME


def test_after_a_check_on_which_ranks_depend_no_rank_is_started() -> None:
    assert blocking(mig(evidence()))
    assert not blocking(evidence())
    assert blocking(INJECTED["full disk"][0](evidence()))


def test_a_job_that_found_nothing_is_named_once(wording: Wording) -> None:
    seen = replace(evidence(), jobs={**evidence().jobs, FAULTS: RanJob(problem="no ranks could be started")})
    found = not_ok(seen)
    wording(found["a late rank"].found)
    assert found.keys() - FIRST_TIME == {"a late rank"}
