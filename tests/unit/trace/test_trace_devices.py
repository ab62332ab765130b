"""Several GPUs in one process: what one does while another doesn't is busy for one and idle for the other."""

from pathlib import Path

import pytest

from gpurun.launcher.compare.figures.ranks import quiet_steps
from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.explain import trace_causes
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.trace_files import Event, kernel, launch, step, write
from tests.wording import Wording


def on_device(device: int, start_us: float, length_us: float, correlation: int = 0) -> Event:
    made = kernel("k", start_us, length_us, correlation)
    return made | {"pid": device, "args": made["args"] | {"device": device}}


@pytest.fixture
def replicas(tmp_path: Path) -> TraceReport:
    """Two steps of 100 µs: device 0 works for 80 of each, device 1 for the first 30."""
    events = []
    for i in (0, 1):
        begin = 100 * i
        events += [step(i, begin, 100), launch(begin, 1, 2 * i + 1), launch(begin, 1, 2 * i + 2)]
        events += [on_device(0, begin + 20, 80, 2 * i + 1), on_device(1, begin + 20, 30, 2 * i + 2)]
    return analyse_paths([write(tmp_path / "rank0.json", events)])


def test_each_device_has_a_breakdown_of_its_own_over_the_same_steps(replicas: TraceReport) -> None:
    (rank,) = replicas.ranks
    assert [each.device for each in rank.devices] == ["0", "1"]
    found = [[(s.span_us, s.compute_us, s.idle_us) for s in each.steps] for each in rank.devices]
    assert found == [[(100, 80, 20)] * 2, [(100, 30, 70)] * 2]
    assert [each.total.compute_us for each in rank.devices] == [160, 60]
    assert rank.total == rank.devices[0].total
    assert rank.steps == rank.devices[0].steps
    assert any("several devices (0 and 1)" in text for text in trace_notes(replicas))


def test_the_table_has_both_and_the_sentence_is_about_the_busiest(replicas: TraceReport) -> None:
    text = render_trace(replicas, 100)
    rows = [line.split()[:4] for line in text.splitlines() if line.lstrip().startswith(("0:", "1  0:"))]
    assert ["0:0", "0.180", "0.160", "-"] in rows
    assert ["0:1", "0.180", "0.060", "-"] in rows
    assert trace_causes(replicas)[0].share == pytest.approx(20 / 100)


def test_the_replicas_of_a_run_have_their_own_figures(replicas: TraceReport) -> None:
    _, ranks = quiet_steps(replicas.ranks)
    assert {rank: (each.span_ns, each.compute_ns) for rank, each in ranks.items()} == {
        0: (100_000, 80_000),
        1: (100_000, 30_000),
    }


def test_a_touch_of_another_device_makes_no_second_one(tmp_path: Path, wording: Wording) -> None:
    events = [on_device(3, 0, 1000), on_device(0, 1000, 2), on_device(3, 1500, 500)]
    report = analyse_paths([write(tmp_path / "rank0.json", events)])
    (rank,) = report.ranks
    assert rank.devices == ()
    assert (rank.total.span_us, rank.total.compute_us) == (2000, 1500)
    wording(trace_notes(report))
