"""Data × tensor × pipeline parallelism: kinds of groups, waits and the bubble, known by construction."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpurun.launcher.report.terminal.trace import render_trace
from gpurun.launcher.tensorboard_plugin.timeline.answers import breakdown_answer, parallelism_sentences
from gpurun.launcher.tensorboard_plugin.timeline.format import INDEX_FILE, Header
from gpurun.launcher.tensorboard_plugin.timeline.index.build import build
from gpurun.launcher.trace.analysis.analyse import analyse_paths
from gpurun.launcher.trace.analysis.parallelism import kind_of_name
from gpurun.launcher.trace.explain import explained_stretches, last_rank, mean_stretch, whole_ranks
from gpurun.launcher.trace.model import TraceReport
from tests.said import trace_notes
from tests.unit.trace.several_ranks.generated_job import Job
from tests.unit.trace.several_ranks.pipelines import Schedule, one_forward_one_backward
from tests.unit.trace.trace_files import Event, rank_info, span, step, write
from tests.whole import first
from tests.wording import Wording

STAGES, REPLICAS, SHARDS = 2, 2, 2
STEP_US = 100_000
MICRO_BATCHES, FORWARD_US, BACKWARD_US, MESSAGE_US = 4, 5_000, 9_000, 40


def rank_of(stage: int, replica: int, shard: int) -> int:
    return (stage * REPLICAS + replica) * SHARDS + shard


@dataclass
class Mesh:
    """A 2 × 2 × 2 job of 1F1B steps, and what must be found in it, in µs per step."""

    job: Job
    bubble: dict[int, float] = field(default_factory=dict)
    """By stage."""
    waits: dict[str, dict[int, float]] = field(default_factory=dict)
    """Of tensor and data parallel groups, by rank."""
    messages: dict[int, list[float]] = field(default_factory=dict)
    """Of the receiving stage."""


def mesh(
    chance: random.Random,
    skews_us: list[float],
    names: dict[str, str],
    calls: bool,
    steps: int,
    drifts: list[float] | None = None,
) -> Mesh:
    found = Mesh(
        Job(8, skews_us, drifts), waits={kind: dict.fromkeys(range(8), 0.0) for kind in ("tensor", "data")}
    )
    schedule = one_forward_one_backward(STAGES, MICRO_BATCHES, FORWARD_US, BACKWARD_US, MESSAGE_US)
    for number in range(steps):
        begin = number * STEP_US + 1_000
        for rank in range(8):
            found.job.events[rank].append(step(number, found.job.at(rank, begin - 100), STEP_US - 200))
        for replica, shard in product(range(REPLICAS), range(SHARDS)):
            for stage, spans in schedule.compute.items():
                for start, end in spans:
                    found.job.kernel(
                        rank_of(stage, replica, shard), "gemm", begin + start, begin + end, False
                    )
            for each in schedule.messages:
                source, target = (rank_of(stage, replica, shard) for stage in (each.source, each.target))
                starts = (begin + each.send_us, begin + each.receive_us)
                ends = (begin + each.end_us, begin + each.end_us)
                found.job.message(source, target, starts, ends, names["pipeline"], calls)
        over = begin + max(end for spans in schedule.compute.values() for _, end in spans)
        for kind, at in (("tensor", over + 5_000), ("data", over + 12_000)):
            for group in groups(kind):
                late = [0.0, float(chance.randrange(1, 3_000))]
                chance.shuffle(late)
                starts_us = [at - each for each in late]
                found.job.all_reduce(names[kind], group, starts_us, at + 200, calls)
                for rank, late_us in zip(group, late, strict=True):
                    found.waits[kind][rank] += late_us / steps
    for stage in range(STAGES):
        received = [each for each in schedule.messages if each.target == stage]
        found.messages[stage] = [float(max(each.send_us - each.receive_us, 0)) for each in received]
        found.bubble[stage] = bubble_us(schedule, stage)
    return found


def bubble_us(schedule: Schedule, stage: int) -> float:
    """Microseconds in which the stage does nothing but wait for the other one, counted one by one."""
    computes, waits = np.zeros((2, STEP_US), dtype=bool)
    for start, end in schedule.compute[stage]:
        computes[start:end] = True
    for each in schedule.messages:
        came = max(each.send_us, each.receive_us)
        own = each.send_us if each.source == stage else each.receive_us
        waits[own:came] = True
    return float((waits & ~computes).sum())


def groups(kind: str) -> list[list[int]]:
    if kind == "tensor":
        return [[rank_of(s, r, shard) for shard in range(SHARDS)] for s, r in product(range(2), range(2))]
    return [[rank_of(s, r, shard) for r in range(REPLICAS)] for s, shard in product(range(2), range(2))]


def skews(chance: random.Random) -> list[float]:
    return [0.0, *(float(chance.randrange(-30_000_000, 30_000_000)) for _ in range(7))]


DESCRIBED = {"tensor": "mesh_tp", "data": "mesh_dp", "pipeline": "mesh_pp"}
SHARED = {"tensor": "1", "data": "2", "pipeline": "3"}


@pytest.mark.parametrize("calls", [False, True], ids=["NCCL", "RCCL"])
@pytest.mark.parametrize("names", [DESCRIBED, SHARED], ids=["described", "by structure"])
def test_kinds_and_bubble_of_a_mesh(tmp_path: Path, names: dict[str, str], calls: bool) -> None:
    chance = random.Random(5)
    known = mesh(chance, skews(chance), names, calls, steps=3)
    report = known.job.report(tmp_path)
    assert not trace_notes(report)
    kinds = {each.kind: each for each in report.parallelism}
    assert sorted(kinds) == ["data", "pipeline", "tensor"]
    for kind, waits in known.waits.items():
        assert {each.rank: each.exposed_wait_us for each in kinds[kind].ranks} == pytest.approx(waits)
        assert len(kinds[kind].groups) == 4
    for each in report.pipeline:
        assert each.ranks == tuple(range(4 * each.stage, 4 * each.stage + 4))
        assert each.bubble_us == pytest.approx(known.bubble[each.stage], abs=1)
        (received,) = (found.wait_us for found in each.messages if found.way == "from")
        assert received == pytest.approx(known.messages[each.stage], abs=1)


def test_what_a_truncated_file_lacks_changes_no_figure_of_the_others(tmp_path: Path) -> None:
    """Steps in which they wait for messages of unknown times don't count."""
    known = mesh(random.Random(5), [0.0] * 8, DESCRIBED, False, steps=4)
    known.job.report(tmp_path)
    text = (tmp_path / "rank5.json").read_text()
    (tmp_path / "rank5.json").write_text(text[: len(text) // 2])
    report = analyse_paths([tmp_path])
    assert any(
        text.startswith("means, bubbles and causes are without rank 5: ") for text in trace_notes(report)
    )
    assert [each.ranks for each in report.pipeline] == [(0, 1, 2, 3), (4, 6, 7)]
    assert {each.stage: each.bubble_us for each in report.pipeline} == pytest.approx(known.bubble, abs=1)
    assert {rank.rank for rank in whole_ranks(report.ranks)} == {0, 1, 2, 3, 4, 6, 7}
    compute_us = (FORWARD_US + BACKWARD_US) * MICRO_BATCHES
    assert mean_stretch(explained_stretches(report)).compute_us == pytest.approx(compute_us, abs=1)


def test_of_messages_that_are_asked_for_early_each_has_what_it_adds(tmp_path: Path) -> None:
    """All four are asked for at once; they are sent after 10, 15, 15 and 30 ms."""
    job = Job(2)
    for sent_us in (10_000, 15_000, 15_000, 30_000):
        job.message(0, 1, (sent_us, 0), (sent_us + 10, sent_us + 10))
    (_, stage) = job.report(tmp_path).pipeline
    (found,) = stage.messages
    assert stage.bubble_us == sum(found.wait_us)
    assert found.wait_us == pytest.approx((10_000, 5_000, 0, 15_000), abs=20)


@pytest.mark.parametrize("seed", first(1, range(2)))
def test_drifting_clocks_are_aligned_to_the_microsecond(tmp_path: Path, seed: int) -> None:
    """Stages are linked by messages alone; clocks are off by ±30 s and gain up to ±100 µs per second."""
    chance = random.Random(seed)
    drifts = [0.0, *(chance.uniform(-1e-4, 1e-4) for _ in range(7))]
    job = mesh(chance, skews(chance), SHARED, False, 12, drifts).job
    report = job.report(tmp_path)
    assert not trace_notes(report)
    expected = {str(rank): 1e6 * drift for rank, drift in enumerate(drifts)}
    assert report.clock_drift_ppm == pytest.approx(expected, abs=0.5)
    starts: dict[int, list[float]] = {rank: [] for rank in range(8)}
    for each in report.collectives:
        for part in each.ranks:
            starts[part.rank].append(part.start_us + report.base_time_ns / 1000)
    for rank, found in starts.items():
        assert sorted(found) == pytest.approx(sorted(job.starts_us[rank]), abs=1, rel=0)


@pytest.mark.parametrize(("drift_ppm", "noise_us"), [(60, 20), (-25, 5), (3, 400), (0, 50)])
def test_the_drift_of_gloo_is_within_its_bounds(tmp_path: Path, drift_ppm: float, noise_us: float) -> None:
    """Less than 1 ms in 10 s; threads see the end late by chance."""
    chance, events = random.Random(drift_ppm), dict[int, list[Event]]({0: [], 1: []})
    for turn in range(40):
        end = 250_000.0 * (1 + turn)
        for rank in (0, 1):
            came, left = end - chance.uniform(50, 90), end + chance.expovariate(1 / noise_us)
            begin, done = (us * (1 + rank * drift_ppm / 1e6) for us in (came, left))
            events[rank].append(span("user_annotation", "gloo:all_reduce", round(begin, 3), done - begin, 2))
    for rank, each in events.items():
        write(tmp_path / f"rank{rank}.json", [span("cpu_op", "aten::mm", 0, 9), *each], **rank_info(rank, 2))
    report = analyse_paths([tmp_path])
    found, bounds = report.clock_drift_ppm["1"], report.clock_drift_bounds_ppm["1"]
    assert found is not None
    assert bounds is not None
    assert bounds[0] <= drift_ppm <= bounds[1]
    assert bounds[0] <= found <= bounds[1]
    assert bounds[1] - bounds[0] < 2 * (180 + noise_us) / 7  # 180 µs of both ranks, over 7 to 10 s
    assert found == pytest.approx(drift_ppm, abs=5) or bounds[0] <= 0 <= bounds[1]


def test_few_collectives_say_nothing_about_drift(tmp_path: Path) -> None:
    job = Job(2, drifts=[0.0, 1e-4])
    for number in range(5):
        job.all_reduce("0", [0, 1], [1e5 * number, 1e5 * number], 1e5 * number + 10)
    assert job.report(tmp_path).clock_drift_ppm == {"0": 0.0, "1": None}


def test_the_tables_and_the_sentence(tmp_path: Path, snapshot: Callable[[str, str], None]) -> None:
    known = mesh(random.Random(1), [0.0] * 8, DESCRIBED, False, steps=2)
    snapshot("trace-parallelism.txt", render_trace(known.job.report(tmp_path), 80))


def kinds_of(report: TraceReport) -> dict[str, str]:
    return {each.group: each.parallelism for each in report.collectives}


def test_an_exchange_among_some_ranks_is_expert_parallel(tmp_path: Path) -> None:
    job = Job(4)
    for group in ([0, 1], [2, 3]):
        job.all_reduce("7", group, [10, 12], 30, args={"Collective name": "all_to_allv"})
    job.all_reduce("0", [0, 1, 2, 3], [50] * 4, 60)
    kinds = kinds_of(job.report(tmp_path))
    assert kinds == {"7 of ranks 0, 1": "expert", "7 of ranks 2, 3": "expert", "0": "other"}


def test_one_dimension_is_data_parallel_only_where_the_traces_show_it(tmp_path: Path) -> None:
    assert kinds_of(_one_dimension(tmp_path / "plain", None)) == {"0": "other"}
    assert kinds_of(_one_dimension(tmp_path / "ddp", "DistributedDataParallel.forward")) == {"0": "data"}


def _one_dimension(directory: Path, annotation: str | None) -> TraceReport:
    directory.mkdir()
    job = Job(2)
    job.all_reduce("0", [0, 1], [50, 52], 60)
    if annotation:
        for rank in (0, 1):
            job.events[rank].append(span("user_annotation", annotation, 0, 5))
    return job.report(directory)


def test_shards_of_replicas_are_not_called_tensor_parallel(tmp_path: Path) -> None:
    """An inner dimension that gathers and scatters may as well hold sharded parameters (HSDP)."""
    job = Job(4)
    for group in ([0, 1], [2, 3]):
        job.all_reduce("1", group, [10, 12], 30, args={"Collective name": "_allgather_base"})
    for group in ([0, 2], [1, 3]):
        job.all_reduce("2", group, [40, 42], 60)
    assert set(kinds_of(job.report(tmp_path)).values()) == {"other"}


def test_a_ring_of_messages_is_no_pipeline(tmp_path: Path) -> None:
    job = Job(4)
    for source in range(4):
        job.message(source, (source + 1) % 4, (10 + source, 10), (50 + source, 50 + source), name="0")
    report = job.report(tmp_path)
    assert report.pipeline == ()
    assert set(kinds_of(report).values()) == {"other"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mesh_dp_shard_cp", "data"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("EXPERT_TENSOR_PARALLEL_GROUP", "tensor"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", None),
        ("MODEL_PARALLEL_GROUP", None),
        ("mesh_cp", "context"),
        ("default_pg", None),
        ("undefined", None),
        ("", None),
    ],
)
def test_what_groups_are_called(text: str, kind: str | None) -> None:
    assert kind_of_name(text) == kind


def test_the_page_of_where_time_goes_says_the_same(tmp_path: Path, wording: Wording) -> None:
    """Also of the rank that came last: waits between stages are no rank's fault."""
    report = mesh(random.Random(1), [0.0] * 8, DESCRIBED, False, steps=2).job.report(tmp_path)
    index = tmp_path / "index"
    index.mkdir()
    build(sorted(tmp_path.glob("*.json")), tmp_path, index, lambda *_: None)
    header = msgspec.json.decode((index / INDEX_FILE).read_bytes(), type=Header)
    kinds, bubble = parallelism_sentences(header)
    wording(kinds)
    wording(bubble)
    assert header.straggler == last_rank(report)
    assert header.straggler not in report.stragglers
    said = breakdown_answer(header, ours=False)["sentence"]
    assert said.endswith(report.conclusion)
    wording(said)
