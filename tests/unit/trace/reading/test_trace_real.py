"""Real traces of many GPUs, with answers that others computed (see `traces/README.md` next to them)."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import Breakdown, StepBreakdown, TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import REAL, load, write

pytestmark = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the directory of real traces next to the repository"
)

DLRM = {  # span, idle, compute, comm, comm ∩ compute, exposed comm, memcpy, wait
    0: (13009, 6419, 1034, 5798, 261, 5537, 19, 5581),
    1: (18749, 6428, 1246, 11336, 280, 11056, 19, 11119),
    2: (11350, 7046, 1068, 3492, 275, 3217, 19, 3275),
    3: (18853, 8145, 1240, 9774, 324, 9450, 28, 9557),
    4: (16589, 8887, 1126, 6587, 37, 6550, 26, 6370),
    5: (16392, 9121, 1041, 6251, 40, 6211, 19, 6034),
    6: (11410, 7051, 1051, 3558, 269, 3289, 19, 3341),
    7: (10967, 8308, 1059, 1746, 166, 1580, 20, 1529),
}


def figures(total: Breakdown) -> tuple[float, ...]:
    return (
        total.span_us,
        total.idle_us,
        total.compute_us,
        total.comm_us,
        total.comm_compute_overlap_us,
        total.exposed_comm_us,
        total.memcpy_us,
    )


def assert_bars_add_up(report: TraceReport) -> None:
    """In whole nanoseconds, for every stretch of every rank."""
    for each in (each for rank in report.ranks for each in (rank.total, *rank.steps)):
        parts = (
            each.compute_us,
            each.exposed_transfer_us,
            each.exposed_wait_us,
            each.exposed_memcpy_us,
            each.other_steps_us,
            each.idle_us,
        )
        assert sum(round(part * 1000) for part in parts) == round(each.span_us * 1000)
        assert round(sum(vars(each.idle_by_cause_us).values()) * 1000) == round(each.idle_us * 1000)
        assert round(sum(vars(each.host_while_idle_us).values()) * 1000) == round(each.idle_us * 1000)


def assert_is_dlrm(report: TraceReport) -> None:
    assert {rank.rank: (*figures(rank.total), rank.total.wait_us) for rank in report.ranks} == DLRM
    assert {rank.total.transfer_us for rank in report.ranks} == {217.0}
    assert {row.rank: row.last_arrivals for row in report.stragglers} == dict(
        enumerate([0, 0, 0, 0, 1, 2, 0, 5])
    )
    assert report.stragglers[0].rank == 7
    caused_us = sum(row.wait_caused_us for row in report.stragglers)
    assert caused_us == sum(rank.total.wait_us or 0 for rank in report.ranks)
    assert [len(each.ranks) for each in report.collectives] == [8] * 8
    assert_bars_add_up(report)


def test_dlrm_on_eight_gpus() -> None:
    report = analyse_paths([REAL / "dlrm_8xV100"])
    assert_is_dlrm(report)
    assert trace_notes(report) == ()
    assert all(abs(offset_us) <= 7 for offset_us in report.clock_offsets_us.values())
    kinds = [each.kind for each in report.collectives]
    assert (kinds.count("all_to_all"), kinds.count("all_reduce")) == (5, 3)
    assert {each.bytes for each in report.collectives if each.kind == "all_reduce"} == {1576964, 448, 907840}


def test_dlrm_with_the_clock_of_one_rank_ahead_and_new_kernel_names(tmp_path: Path) -> None:
    for path in sorted((REAL / "dlrm_8xV100").iterdir()):
        trace = load(path)
        ahead_us = 20_000 if trace["distributedInfo"]["rank"] == 3 else 0
        for event in trace["traceEvents"]:
            event["name"] = event["name"].replace("ncclKernel_", "ncclDevKernel_")
            event["ts"] += ahead_us
        write(tmp_path / path.name, trace.pop("traceEvents"), **trace)
    report = analyse_paths([tmp_path])
    assert_is_dlrm(report)
    assert report.clock_offsets_us["3"] == pytest.approx(20_000, abs=7)
    starts_us = [[part.start_us for part in each.ranks] for each in report.collectives]
    assert all(max(starts) - min(starts) < 10_000 for starts in starts_us)


def test_ddp_two_ranks_of_many() -> None:
    report = analyse_paths([REAL / "ddp_2of128"])
    assert [figures(rank.total) for rank in report.ranks] == [
        (1222847, 675191, 210320, 396199, 59216, 336983, 1325),
        (1231186, 651136, 271973, 379053, 75530, 303523, 16504),
    ]
    assert any("2 of 128 ranks" in warning for warning in trace_notes(report))
    # Five collectives end within 0.4 ms on both; the others are in only one of the sampled files.
    assert sum(each.last_rank is not None for each in report.collectives) == 5
    assert_bars_add_up(report)


def test_ddp_without_the_last_step_as_hta_has_it() -> None:
    report = analyse_paths([REAL / "ddp_2of128"], slice(551, 552))
    totals = [rank.total for rank in report.ranks]
    assert [(total.idle_us, total.compute_us, total.span_us) for total in totals] == [
        (321378, 106252, 600058),
        (328671, 135548, 600674),
    ]
    overlaps = [100 * total.comm_compute_overlap_us / total.comm_us for total in totals]
    assert [round(overlap, 2) for overlap in overlaps] == [11.81, 20.05]


def test_collective_arguments_on_a100() -> None:
    report = analyse_paths([REAL / "nccl_args_A100"])
    total = report.ranks[0].total
    nanoseconds = (660551005, 503050991, 115655847, 46876493, 7317025, 39559468, 2653498)
    assert tuple(round(each * 1000) for each in figures(total)) == nanoseconds
    assert len(report.collectives) == 21
    # One rank alone can't separate waiting from transfer.
    assert (total.wait_us, total.transfer_us, report.stragglers) == (None, None, ())
    assert total.exposed_transfer_us == total.exposed_comm_us
    first = report.collectives[0]
    assert (first.group, first.kind, first.bytes) == ("0", "broadcast", 53120 * 4)
    assert report.ranks[0].device == "NVIDIA A100-PG509-200"
    assert_bars_add_up(report)


def test_vit_on_h100() -> None:
    total = analyse_paths([REAL / "vit_H100"]).ranks[0].total
    nanoseconds = [
        round(us * 1000) for us in (total.compute_us, total.memcpy_us, total.idle_us, total.span_us)
    ]
    assert nanoseconds == [1220926, 4384, 6334534, 7559844]
    modules = {row.name: row for row in analyse_paths([REAL / "vit_H100"]).ranks[0].modules}
    assert modules["Linear_0"].device_us > 0


def test_resnet_steps_as_the_profilers_own_test_has_them() -> None:
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_0.pt.trace.json.gz"])
    steps = report.ranks[0].steps
    first, host = steps[0], steps[0].host_while_idle_us
    assert (first.step, first.span_us, first.compute_us) == (5, 187948, 98598)
    assert (first.memcpy_us - first.memset_us, first.memset_us) == (1941, 90)
    assert (host.runtime, host.data, host.op, host.other) == (2796, 69317, 14091, 1115)
    assert first.idle_by_cause_us.data == 69317
    assert_averages(steps, 177592, 33.37, 55.51)
    assert_bars_add_up(report)


def test_resnet_with_workers() -> None:
    report = analyse_paths([REAL / "resnet50_V100" / "num_workers_4.pt.trace.json.gz"])
    assert_averages(report.ranks[0].steps, 141068, 0.84, 70.27)


def assert_averages(
    steps: Sequence[StepBreakdown], span_us: float, data_percent: float, busy_percent: float
) -> None:
    total_us = sum(each.span_us for each in steps)
    assert round(total_us / len(steps)) == span_us
    assert round(100 * sum(each.idle_by_cause_us.data for each in steps) / total_us, 2) == data_percent
    # Its share of busy time is that of kernels, from the start of the first step to the end of the last.
    through_us = steps[-1].start_us + steps[-1].span_us - steps[0].start_us
    assert round(100 * sum(each.compute_us for each in steps) / through_us, 2) == busy_percent


def test_whatever_the_order_of_events(tmp_path: Path) -> None:
    path = next((REAL / "vit_H100").glob("*.json.gz"))
    trace = load(path)
    events = trace.pop("traceEvents")
    backwards = write(tmp_path / "backwards.json", copy.deepcopy(events)[::-1], **trace)
    one, other = analyse_paths([path]), analyse_paths([backwards])
    assert (one.ranks[0].total, one.ranks[0].steps) == (other.ranks[0].total, other.ranks[0].steps)
    assert one.base_time_ns == other.base_time_ns
