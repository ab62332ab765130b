"""Micro-benchmarks: how they are planned, measured, analysed and shown, and what they refuse."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from gpurun.launcher.compare.figures.size_curves import (
    Curve,
    CurvePoint,
    ProbeResult,
    crossover,
    curve,
    fit,
    probe_result,
    probe_summary,
)
from gpurun.launcher.errors import MachineError, SpecError
from gpurun.launcher.jobfile.kinds import workload_kind
from gpurun.launcher.plan.build import build_plan
from gpurun.launcher.report.tensorboard import curve_events
from gpurun.launcher.report.terminal.table import curve_lines, curve_tables
from gpurun.launcher.rundir.files import RunDir
from gpurun.launcher.rundir.records import PointRecord, VariantConfig
from gpurun.launcher.units import size_text
from gpurun.launcher.worker.base.journal import Journal
from gpurun.launcher.worker.base.process_group import Peers
from gpurun.launcher.worker.meters.cpu_time import BlockNoise, NoiseMeter
from gpurun.launcher.worker.meters.gpu_load import LoadMeter
from gpurun.launcher.worker.micro_benchmark import ProbeRounds
from gpurun.workloads import micro_benchmarks
from gpurun.workloads.micro_benchmarks import (
    BenchmarkCase,
    Cases,
    Probe,
    Site,
    allreduce,
    copies_within,
    device_copies,
    h2d,
    matmul,
    powers,
)
from gpurun.workloads.micro_benchmarks import crossover as crossover_probe
from tests.known import known
from tests.launches import launch_config
from tests.unit.plan.machines import FakeMachine, spec_of
from tests.wording import Wording

T = TypeVar("T")
CPU = Site((torch.device("cpu"),), ("cpu:0",), 1, torch.float32)
LOAD = LoadMeter(CPU.device)


def test_a_probe_needs_no_batch_and_gives_each_device_one_share() -> None:
    plan = build_plan(
        spec_of("workload: allreduce\ndevices: cpu:4\ncompare: {device_count: [2, 4]}\n"), FakeMachine()
    )
    assert [(v.strategy, v.split) for v in plan.variants] == [("ddp", (1, 1)), ("ddp", (1, 1, 1, 1))]
    assert [len(launch.processes) for launch in plan.launches] == [2, 4]  # once each: nothing is compared
    assert spec_of("workload: matmul\n").strategy == "single"
    assert spec_of("workload: h2d\n").strategy == "dp"


def test_only_what_computes_in_it_has_a_precision() -> None:
    for name in ("matmul", "crossover"):
        assert spec_of(f"workload: {name}\nprecision: bf16\n").precision == "bf16"
    assert spec_of("workload: allreduce\nprecision: fp32\n").precision == "fp32"


def test_an_allreduce_on_one_device_is_refused_or_left_out(wording: Wording) -> None:
    for lines in ("devices: cpu:1", "devices: cpu:4\ndevice_count: 1"):
        with wording.raises(SpecError) as refused:
            build_plan(spec_of(f"workload: allreduce\n{lines}\n"), FakeMachine())
        assert refused.value.exit_code == 2
    with wording.raises(MachineError):
        build_plan(spec_of("workload: allreduce\n"), FakeMachine(cpu_cores=1))
    both = spec_of("workload: allreduce\ndevices: cpu:4\ncompare: {device_count: [1, 2]}\n")
    plan = build_plan(both, FakeMachine())
    assert [len(variant.devices) for variant in plan.variants] == [2]
    wording(plan.left_out[0].reason)


@dataclass
class FakeWork:
    """Cases that move a clock of their own; the second takes 40 times as long as the first."""

    now_ns: int = 0
    ran: list[str] = field(default_factory=list)

    def run(self, name: str, ms: int) -> None:
        self.now_ns += ms * 1_000_000
        self.ran.append(name)

    def cases(self, site: Site) -> Cases:
        quick = BenchmarkCase("quick", 1, lambda: self.run("quick", 1), nbytes=1)
        slow = BenchmarkCase("slow", 2, lambda: self.run("slow", 40), flops=7)
        return Cases((quick, slow), ("skipped: something",))


def test_every_round_runs_each_case_for_a_block(tmp_path: Path) -> None:
    config = launch_config(VariantConfig("v", (1,), 1), launch="01", run_dir=str(tmp_path), rounds=3)
    work = FakeWork()
    journal, quiet = Journal(config, 0), NoiseMeter(dict, lambda: 0, lambda: False)
    ProbeRounds(Probe("bytes", work.cases), CPU, journal, Peers(), quiet, LOAD, lambda: work.now_ns).run()
    run = RunDir(tmp_path)
    records = list(run.read_lines(run.points("v"), PointRecord))
    assert [record.round for record in records] == [1, 1, 2, 2, 3, 3]
    assert {(r.series, r.time_ns, r.repetitions) for r in records} == {("quick", 1e6, 10), ("slow", 40e6, 1)}
    assert {(r.series, r.nbytes, r.flops) for r in records} == {("quick", 1, None), ("slow", None, 7)}
    assert work.ran.count("quick") == 2 + 3 * 10  # two to warm up
    assert journal.facts["v"].warnings == ("skipped: something",)
    assert run.read_events("01")[-1].round == 3


def record(series: str, size: int, time_us: float, **more: float) -> PointRecord:
    return PointRecord("l", 1, series, "bytes", size, time_us * 1e3, 1, **more)  # type: ignore[arg-type]


def test_latency_and_bandwidth_come_back_from_the_curve_that_they_make() -> None:
    points = [CurvePoint(size, 30 + size / 5_000, None) for size in powers(1024, 1 << 26, 4)]
    latency_us, gb_per_s = fit(points)
    assert latency_us == pytest.approx(30)
    assert gb_per_s == pytest.approx(5)
    assert fit(points[:2]) == (None, None)
    assert fit([CurvePoint(size, 7.0, None) for size in (1, 2, 3)]) == (pytest.approx(7.0), None)


def test_bus_bandwidth_counts_what_crosses_a_link() -> None:
    (point,) = curve("all-reduce", [record("", 4000, 2.0, nbytes=4000, bus_factor=1.5)], None).points
    assert point.gb_per_s == pytest.approx(2)
    assert point.bus_gb_per_s == pytest.approx(3)
    assert point.gflop_per_s is None


def test_operations_are_shares_of_the_best_and_of_the_peak(wording: Wording) -> None:
    records = [record("m", 64, 1.0, flops=1_000_000), record("m", 128, 2.0, flops=8_000_000)]
    result = known(probe_result(records, "matmul", "NVIDIA H200", "bf16"))
    first, second = result.curves[0].points
    assert (first.ceiling_percent, second.ceiling_percent) == (pytest.approx(25), pytest.approx(100))
    assert second.peak_percent == pytest.approx(100 * 4e12 / 989.4e12)
    assert probe_result([], "matmul", None, "fp32") is None
    wording(probe_summary("matmul", {"v": result}))
    unknown = known(probe_result(records, "matmul", None, "fp32"))
    assert unknown.curves[0].points[0].peak_percent is None


def line(series: str, times_us: dict[int, float]) -> Curve:
    return Curve(series, "rows", tuple(CurvePoint(size, us, None) for size, us in times_us.items()))


def test_the_gpu_pays_from_where_it_stays_ahead() -> None:
    cpu = line("CPU", {16: 1, 32: 5, 64: 20, 128: 90})
    assert crossover(cpu, line("GPU", {16: 10, 32: 10, 64: 11, 128: 12})) == 64
    assert crossover(cpu, line("GPU", {16: 0.5, 32: 10, 64: 11, 128: 12})) == 64  # one lucky size is not it
    assert crossover(cpu, line("GPU", {16: 10, 32: 10, 64: 21, 128: 91})) is None
    assert crossover(cpu, line("GPU", {16: 0.1, 32: 0.1, 64: 1, 128: 1})) == 16


def test_a_gpu_that_is_faster_in_between_is_not_slower_at_every_size(wording: Wording) -> None:
    cpu = line("CPU", {16: 1, 32: 5, 64: 20, 128: 90})
    between = ProbeResult((cpu, line("GPU", {16: 0.5, 32: 10, 64: 11, 128: 91})))
    never = ProbeResult((cpu, line("GPU", {16: 10, 32: 10, 64: 21, 128: 91})))
    begun = ProbeResult((cpu, line("GPU", {16: 10})))  # the run was stopped before the larger sizes
    wording(*(probe_summary("crossover", {"v": each}) for each in (between, never, begun)))


def test_the_summary_gives_one_number(wording: Wording) -> None:
    records = [record("CPU", 16, 1.0), record("GPU", 16, 9.0), record("CPU", 32, 9.0), record("GPU", 32, 2.0)]
    result = probe_result(records, "crossover", "NVIDIA H200", "fp32")
    wording(probe_summary("crossover", {"v": result}))
    assert probe_summary("h2d", {"v": None}) == "h2d has measured nothing."
    two_sizes = [record("all-reduce", 1024, 9.0, nbytes=1024), record("all-reduce", 4000, 2.0, nbytes=4000)]
    no_line = probe_result(two_sizes, "allreduce", None, "fp32")
    wording(probe_summary("allreduce", {"v": no_line}))
    events = curve_events(result, 1.0)
    assert {(event.step, *(value.tag for value in event.summary.value)) for event in events} == {
        (16, "curve/CPU/us"), (16, "curve/GPU/us"), (32, "curve/CPU/us"), (32, "curve/GPU/us")
    }  # fmt: skip


def swept(*times_us: float) -> ProbeResult | None:
    """An all-reduce that took these times, from 1 KiB on."""
    sizes = powers(1024, 1 << 30, 4)
    records = [record("all-reduce", size, us, nbytes=size) for size, us in zip(sizes, times_us, strict=False)]
    return probe_result(records, "allreduce", None, "fp32")


def test_each_fit_says_where_it_was_measured_in_units_that_can_be_read(wording: Wording) -> None:
    line = [9200 + size / 123 for size in powers(1024, 1 << 26, 4)]
    wording(probe_summary("allreduce", {"2 devices": swept(*line), "4 devices": swept(5, 5.1, 5.4)}))


def test_where_no_straight_line_fits_none_is_claimed(wording: Wording) -> None:
    line = [1 + size / 6000 for size in powers(1024, 1 << 22, 4)]
    result = swept(*line[:-1], 3 * line[-1])
    wording(probe_summary("allreduce", {"2 devices": result}))
    assert result is not None
    assert result.curves[0].fit_off_by == pytest.approx(2.3, abs=0.7)


def test_a_busy_machine_is_reported_next_to_the_curves(tmp_path: Path, wording: Wording) -> None:
    config = launch_config(VariantConfig("v", (1,), 1), launch="01", run_dir=str(tmp_path), rounds=3)
    work, journal = FakeWork(), Journal(config, 0)
    waited, others = itertools.count(0, 10**15), itertools.count(0, 10**15)
    meter = NoiseMeter(lambda: {"main": next(waited)}, lambda: next(others), lambda: False)
    ProbeRounds(Probe("bytes", work.cases), CPU, journal, Peers(), meter, LOAD, lambda: work.now_ns).run()
    skipped, busy = journal.facts["v"].warnings
    assert skipped == "skipped: something"
    wording(busy, hide="(?<=core in ).*(?= % of)")


class Two(Peers):
    """Two ranks on the same cores, which do the same."""

    def gather(self, value: T) -> list[T]:
        return [value, value]


@pytest.mark.parametrize(("others_ns", "most"), [(300, -0.05), (700, 0.35), (None, 0.5)])
def test_what_the_other_rank_computes_is_no_other_load(
    tmp_path: Path, others_ns: int | None, most: float
) -> None:
    ddp = {"strategy": "ddp", "backend": "gloo"}
    config = launch_config(VariantConfig("v", (1, 1), 2), run_dir=str(tmp_path), rounds=3, **ddp)
    rounds = ProbeRounds(Probe("bytes", FakeWork().cases), CPU, Journal(config, 0), Two(), NoiseMeter(), LOAD)
    noise = BlockNoise(queue_ns=500, others_ns=others_ns, cpu_ns=250, children_ns=50)
    assert rounds.waiting(noise, 1000).most == pytest.approx(most)


def test_sizes_are_read_easily() -> None:
    assert [size_text(size, "bytes") for size in (1000, 4096, 3 << 20, 1 << 40)] == [
        "1,000 B", "4 KiB", "3 MiB", "1,024 GiB"
    ]  # fmt: skip
    assert size_text(64, "rows") == "64 rows"
    assert powers(4, 100, 4) == (4, 16, 64, 100)


def test_what_a_cpu_cannot_measure_is_said(wording: Wording) -> None:
    copies = h2d(max_mib=1).cases(CPU)
    wording({case.series for case in copies.cases})
    wording(copies.notes[0])
    products = crossover_probe(max_size=32).cases(CPU)
    assert [(case.series, case.size) for case in products.cases] == [("CPU", 16), ("CPU", 32)]
    assert "no crossover" in products.notes[0]
    wording(allreduce().cases(CPU).notes)
    for case in (*copies.cases, *products.cases, *matmul(max_size=64).cases(CPU).cases):
        case.run()


def test_on_gpus_every_direction_is_copied() -> None:
    host = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2)]
    devices = {name: torch.zeros(1 << 20, dtype=torch.uint8, device="meta") for name in ("cuda:3", "cuda:1")}
    found = {case.series for case in device_copies(host[0], host[1], devices, (4096,))}
    ways = {f"{kind} to {name}" for kind in ("pinned", "pageable") for name in devices}
    back = {f"{name} to {kind}" for kind in ("pinned", "pageable") for name in devices}
    own = {f"within {name}" for name in devices}
    assert found == ways | back | own | {"cuda:3 to cuda:1", "cuda:1 to cuda:3"}


def test_copies_within_a_gpu_count_twice_and_miss_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_benchmarks, "UNCACHED_BYTES", 64 << 10)
    copied: list[int] = []

    def copy_next(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copied.append(int(next(pairs)[1].storage_offset()))

    monkeypatch.setattr(micro_benchmarks, "copy_next", copy_next)
    (case,) = copies_within("within cuda:0", torch.zeros(4 << 10, dtype=torch.uint8), (4 << 10,))
    assert (case.size, case.nbytes) == (4096, 8192)
    for _ in range(17):
        case.run()
    assert copied == [*range(0, 64 << 10, 4 << 10), 0]


def test_sizes_must_be_positive(wording: Wording) -> None:
    for make in (allreduce, h2d, matmul, crossover_probe):
        with wording.raises(ValueError):
            make(0)


def test_times_have_their_interval_and_several_curves_their_devices(wording: Wording) -> None:
    """Where ± would reach 0, or one side is much longer, the interval is written out."""
    points = (
        CurvePoint(1024, 1291.2, (385.4, 2745.9), gb_per_s=0.00079, bus_gb_per_s=0.00079),
        CurvePoint(1 << 24, 26_500.0, (24_000.0, 28_900.0), gb_per_s=0.63, bus_gb_per_s=0.95),
    )
    probe = ProbeResult((Curve("all-reduce", "bytes", points),))
    kind = workload_kind("allreduce")
    variant: Any = SimpleNamespace(
        strategy="ddp", devices=("cpu:0", "cpu:1"), varied={}, probe=probe, kind=kind
    )
    (alone,), (among,) = curve_tables(variant, is_alone=True), curve_tables(variant, is_alone=False)
    assert (alone.name, among.name) == ("all-reduce", "2 devices, all-reduce")
    assert alone.header == ("all-reduce", "time", "GB/s", "bus GB/s")
    wording([" | ".join(row) for row in alone.rows])


def test_the_head_of_curves_says_nothing_twice(wording: Wording) -> None:
    usual = SimpleNamespace(workload="matmul", devices=("cpu:0",), precision="bf16", status="ok", probe=None)
    usual.varied = {"workload": "matmul", "precision": "bf16", "params": {"max_size": 128}}
    (head,) = curve_lines(SimpleNamespace(variants=[usual]))  # type: ignore[arg-type]
    wording(head.plain)
