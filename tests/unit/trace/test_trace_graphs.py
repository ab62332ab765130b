"""Work that CUDA graphs replay: of the operators that were captured, if the trace shows the capture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.model import TABLES, TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import Event, kernel, rank_info, span, step, write

GRAPH_ID = 5 << 32
"""In the upper half of its nodes' numbers."""
MARK = "no capture in the trace is certain"


def call(name: str, start_us: float, correlation: int, **args: Any) -> Event:
    return span("cuda_runtime", name, start_us, 1, correlation=correlation, **args)


def op(name: str, start_us: float, length_us: float, side: int) -> Event:
    dims = [[side, side], [side, side]]
    args = {"Input Dims": dims, "Input type": ["float", "float"], "Concrete Inputs": []}
    return span("cpu_op", name, start_us, length_us, **args)


def capture(at_us: float, first: int, sides: Sequence[int], kernels: Sequence[str] = ()) -> list[Event]:
    """Products of these sides, each after a memset; with names of the kernels, as ROCm has them."""
    events = [
        call("cudaStreamBeginCapture", at_us, first),
        call("cudaStreamEndCapture", at_us + 90, first + 1),
    ]
    for i, side in enumerate(sides):
        start = at_us + 10 + 10 * i
        name = {"kernel": kernels[i]} if kernels else {}
        events += [
            op("aten::mm", start, 8, side),
            call("cudaMemsetAsync", start + 1, first + 2 + 2 * i),
            call("cudaLaunchKernel", start + 3, first + 3 + 2 * i, **name),
        ]
    return events


def replay(
    at_us: float, correlation: int, lengths: Sequence[float], numbered: bool = True, graph: int = GRAPH_ID
) -> list[Event]:
    """A memset and a kernel of each of these lengths, 1 ms after the launch; branches run the last first."""
    events = [span("cpu_op", "graphed", at_us, 4), call("cudaGraphLaunch", at_us + 1, correlation)]
    start = at_us + 1000
    for i, length in enumerate(lengths):
        begin = start + (100 * (len(lengths) - i) if numbered else 100 * i)
        nodes = [{"graph node id": graph + 2 * i + each} if numbered else {} for each in (0, 1)]
        memset = kernel("Memset (Device)", begin, 1, correlation, **nodes[0]) | {"cat": "gpu_memset"}
        events += [memset, kernel(f"gemm{i}", begin + 2, length, correlation, **nodes[1])]
    return events


def report_of(directory: Path, *parts: list[Event]) -> TraceReport:
    events = [event for part in parts for event in part]
    return analyse_paths([write(directory / "r0.json", events, **rank_info(0, 1))], None, frozenset(TABLES))


def marked(report: TraceReport) -> bool:
    return any(MARK in text for text in trace_notes(report))


@pytest.mark.parametrize("numbered", [True, False], ids=["CUDA", "ROCm"])
def test_replays_are_of_the_operators_that_were_captured(tmp_path: Path, numbered: bool) -> None:
    steps = [step(1, 0, 500), step(2, 1000, 500), step(3, 3000, 500)]
    eager = [op("aten::mm", 200, 8, 64), call("cudaLaunchKernel", 201, 90), kernel("gemm0", 300, 7, 90)]
    other = capture(600, 60, [8])  # another number of calls: not this graph's
    names = () if numbered else ("gemm0", "gemm1")
    launches = [replay(1010, 100, (10, 20), numbered), replay(3010, 101, (12, 24), numbered)]
    modules = [
        span("python_function", f"nn.Module: {name}", start_us, length_us)
        for name, start_us, length_us in (("Model_0", 18, 100), ("Block_0", 25, 60))
    ]
    report = report_of(tmp_path, steps, eager, modules, capture(20, 1, (64, 32), names), other, *launches)
    (rank,) = report.ranks
    assert not marked(report)
    assert {row.name: row.device_us for row in rank.ops} == {"aten::mm": 7 + 66 + 4, "graphed": 0}
    assert [each.compute_us for each in rank.steps] == [7, 30, 36]
    rows = {row.shapes: (row.count, row.device_us) for row in report.shapes or ()}
    assert rows == {"64×64, 64×64": (3, 7 + 11 + 13), "32×32, 32×32": (2, 21 + 25)}
    found = {(row.name, row.graph): (row.op, row.count) for row in report.kernels_by_shape or ()}
    assert found["gemm1", True] == ("aten::mm", 2)
    assert found["gemm0", False] == ("aten::mm", 1)
    tree = [(row.depth, row.name, row.count) for row in report.operators or ()]
    assert tree == [
        (0, "Model_0", 1),  # called once, to capture the graph
        (1, "Block_0", 2),  # captured, so it runs with each replay
        (2, "aten::mm", 4),
        (3, "32×32, 32×32 float", 2),
        (3, "64×64, 64×64 float", 2),
        (0, "aten::mm", 2),  # one of them in the other capture, of which no replay is known
        (1, "64×64, 64×64 float", 1),
    ]
    counts = {(row.depth, row.name): row.count for row in report.operators_in_steps or ()}
    assert counts[2, "aten::mm"] == 4
    assert (report.launches or ())[0].slow_launches == 0


REPLAY = replay(1010, 100, (10, 20))
UNCERTAIN: dict[str, list[list[Event]]] = {
    "no capture": [REPLAY],
    "of another number of calls": [capture(20, 1, (64,)), REPLAY],
    "two that differ": [capture(20, 1, (64, 32)), capture(200, 30, (8, 4)), REPLAY],
    "captured after it was launched": [capture(20_000, 1, (64, 32)), REPLAY],
    "cut off": [capture(20, 1, (64, 32))[:1], capture(20, 1, (64, 32))[2:], REPLAY],
    "a kernel of another name": [capture(20, 1, (64,), ["relu"]), replay(1010, 100, (10,), False)],
    "kernels without names or numbers": [capture(20, 1, (64,)), replay(1010, 100, (10,), False)],
    "one node again and again": [capture(20, 1, (64,)), REPLAY[:4], REPLAY[2:3]],
}


@pytest.mark.parametrize("events", UNCERTAIN.values(), ids=UNCERTAIN)
def test_without_a_capture_that_is_certain_that_is_said(tmp_path: Path, events: list[list[Event]]) -> None:
    report = report_of(tmp_path, *events)
    assert marked(report)
    (rank,) = report.ranks
    assert {row.name for row in rank.ops if row.device_us} == {"graphed"}


def test_as_many_graphs_as_captures_are_theirs_in_order(tmp_path: Path) -> None:
    graphs = [replay(5000, 101, (3, 4), graph=9 << 32), replay(1010, 100, (10, 20), graph=7 << 32)]
    report = report_of(tmp_path, capture(20, 1, (64, 32)), capture(200, 30, (8, 4)), *graphs)
    assert not marked(report)
    rows = {row.shapes.partition("×")[0]: row.device_us for row in report.shapes or ()}
    assert rows == {"64": 11, "32": 21, "8": 4, "4": 5}


def test_a_replayed_collective_has_the_group_of_its_capture(tmp_path: Path) -> None:
    facts = {"Collective name": "allreduce", "In msg nelems": 500, "Out msg nelems": 500, "dtype": "Float"}
    group = {"Process Group Name": "tp", "Process Group Ranks": "[0, 1]", "Group size": 2, "Seq": 3}
    for rank in (0, 1):
        events = [
            call("cudaStreamBeginCapture", 1, 1),
            span("cpu_op", "record_param_comms", 10, 9, **facts | group),
            call("cudaLaunchKernelExC", 12, 2),
            call("cudaStreamEndCapture", 30, 3),
        ]
        for number in range(2):
            start, late = 1000.0 * (1 + number), 10.0 * rank
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            events += [
                call("cudaGraphLaunch", start, 10 + number),
                kernel(name, start + 50 + late, 30 - late, 10 + number, **{"graph node id": GRAPH_ID}),
            ]
        write(tmp_path / f"r{rank}.json", events, **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    assert [(each.group, report.groups[each.group], each.bytes) for each in report.collectives] == [
        ("tp", (0, 1), 2000)
    ] * 2
    assert [rank.total.wait_us for rank in report.ranks] == [20, 0]
