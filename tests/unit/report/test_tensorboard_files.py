"""The event files of a run, read back with TensorBoard's own reader."""

import re
from collections.abc import Iterable
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import markdown
import msgspec
import pytest
from msgspec.structs import replace as changed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event as EventProto
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from gpurun.launcher.compare.figures.ranks import ExposedComm
from gpurun.launcher.compare.model import StepTime
from gpurun.launcher.report.markdown import escape, summary_markdown
from gpurun.launcher.report.metrics import values_of
from gpurun.launcher.report.tensorboard import (
    Times,
    hyperparameters,
    round_events,
    step_events,
    write_tensorboard,
)
from gpurun.launcher.rundir.files import RunDir, append_lines
from gpurun.launcher.rundir.records import Event, Kind, StepRecord
from tests.sample import COMPARISON

LAUNCH = "01-ddp-2"
MS = 1_000_000
ROUND_NS = 10**9
EPOCH_NS = 1_700_000_000 * 10**9


def step(round_: int, forward_ms: int, step_ms: int = 50, kind: Kind = "timed") -> StepRecord:
    phases = {"data": 0, "forward": forward_ms * MS, "backward": (step_ms - forward_ms) * MS}
    return StepRecord(LAUNCH, round_, 0, 0, kind, step_ms * MS, phases, None)


def two_ranks() -> dict[int, list[StepRecord]]:
    """Three rounds of two steps. Rank 0 needs 20 ms until its backward pass, rank 1 half of it."""
    others = [step(0, 5, kind="warmup"), step(1, 5, kind="aa"), step(1, 5, kind="ablation")]
    slow = [step(n, 20, 50 + n) for n in (1, 1, 2, 2, 3, 3)]
    fast = [step(n, 10, 50) for n in (1, 1, 2, 2, 3, 3)]
    return {0: [*others, *slow], 1: [*others, *fast]}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two ranks' steps of one variant, the others have none; events for the times."""
    run = RunDir(tmp_path / "run")
    for rank, records in two_ranks().items():
        append_lines(run.steps("ddp-2-even", rank), records)
    events = [Event(EPOCH_NS + n * ROUND_NS, "round", None, n, 3) for n in (1, 2, 3)]
    append_lines(run.events(LAUNCH), events)
    return run


@pytest.fixture
def even(run: RunDir) -> EventAccumulator:
    """What TensorBoard sees of the variant that has steps."""
    write_tensorboard(COMPARISON, run)
    return read(run.variant("ddp-2-even"))


def read(directory: Path) -> EventAccumulator:
    """What TensorBoard sees of one of its runs."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def scalars(found: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def hparams(found: EventAccumulator, tag: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(found.summary_metadata[tag].plugin_data.content)


def test_scalars_by_step_rank_and_round(even: EventAccumulator) -> None:
    assert scalars(even, "step_ms/rank1") == [(n, 50.0) for n in range(6)]
    assert scalars(even, "phases_ms/rank0/forward") == [(n, 20.0) for n in range(6)]
    assert scalars(even, "step_ms/round") == [(1, 51.0), (2, 52.0), (3, 53.0)]
    assert scalars(even, "slowest_rank_ms/backward") == [(1, 31.0), (2, 32.0), (3, 33.0)]
    assert scalars(even, "ahead_ms/rank1") == [(n, 10.0) for n in (1, 2, 3)]
    assert scalars(even, "ahead_ms/rank0") == [(n, 0.0) for n in (1, 2, 3)]
    assert "phases_ms/rank0/data" not in even.Tags()["scalars"], "zero throughout"


def test_results_are_scalars_of_the_variants_own_run(run: RunDir, even: EventAccumulator) -> None:
    assert scalars(even, "step_ms") == [(0, pytest.approx(42.1))]
    assert scalars(even, "samples_per_s") == [(0, pytest.approx(1520.2))]
    assert scalars(even, "exposed_comm_percent") == [(0, pytest.approx(100 * 1.9 / 42.1))]
    assert "exposed_comm_percent" not in read(run.variant("dp-2-even")).Tags()["scalars"], "unknown"
    assert read(run.variant("dp-2-48-16")).Tags()["scalars"] == [], "it ran out of memory"


def test_exposed_communication_is_a_share_of_the_traced_step(run: RunDir) -> None:
    plain = COMPARISON.variants[0]
    traced = replace(plain.ranks[0], span_ms=50.0, exposed_comm_ms=ExposedComm(trace=5.0))
    variant = replace(plain, ranks=(traced,), exposed_comm_ms=traced.exposed_comm_ms)
    write_tensorboard(replace(COMPARISON, variants=(variant,)), run)
    assert scalars(read(run.variant(plain.id)), "exposed_comm_percent") == [(0, pytest.approx(10.0))]


def test_times_are_those_of_the_rounds(even: EventAccumulator) -> None:
    times = [event.wall_time for event in even.Scalars("step_ms/rank0")]
    start_s = EPOCH_NS / 1e9
    assert times == pytest.approx([start_s + t for t in (1, 1.051, 2, 2.052, 3, 3.053)], abs=1e-3)


def test_steps_of_a_sampled_program_are_when_they_were(tmp_path: Path) -> None:
    """Steps of 50 ms; from the 4,000th on another 50 ms after each, which is no step's."""
    run = RunDir(tmp_path / "run")
    kept = [0, 2, 4_000, 30_000, 59_999]
    records = [changed(step(1 + number // 5, 20), step=number) for number in kept]
    append_lines(run.steps("ddp-2-even", 0), records)
    ended = [(2, 0.1), (4_000, 200), (8_000, 600), (60_000, 5_800)]
    append_lines(
        run.events(LAUNCH), [Event(EPOCH_NS + round(s * 1e9), "run", None, number) for number, s in ended]
    )
    write_tensorboard(COMPARISON, run)
    found = read(run.variant("ddp-2-even"))
    points = [(each.step, each.wall_time - EPOCH_NS / 1e9) for each in found.Scalars("step_ms/rank0")]
    assert [number for number, _ in points] == kept
    assert [s for _, s in points] == pytest.approx([0, 0.1, 200, 2_800, 5_799.9], abs=1e-3)
    rounds = [each.wall_time - EPOCH_NS / 1e9 for each in found.Scalars("step_ms/round")]
    assert rounds == pytest.approx([0, 200, 2_800, 5_799.9], abs=1e-3)


@pytest.mark.usefixtures("even")
def test_hparams_table_has_the_split_as_text(run: RunDir) -> None:
    experiment = hparams(read(run.path), "_hparams_/experiment").experiment
    assert {info.name for info in experiment.hparam_infos} >= {"split", "strategy", "device_count"}
    variant = read(run.variant("ddp-2-40-24"))
    start = hparams(variant, "_hparams_/session_start_info").session_start_info
    assert start.hparams["split"].string_value == "40/24"
    assert start.hparams["device_count"].number_value == 2
    failed = read(run.variant("dp-2-48-16"))
    assert hparams(failed, "_hparams_/session_end_info").session_end_info.status == 2, "STATUS_FAILURE"


def test_variants_of_different_runs_are_rows_of_their_own(tmp_path: Path) -> None:
    groups = set()
    for name in ("job/2026-11-21_10-00-00", "job/2026-11-21_11-00-00", "other/2026-11-21_10-00-00"):
        run = RunDir(tmp_path / name)
        write_tensorboard(replace(COMPARISON, variants=COMPARISON.variants[:1]), run)
        found = read(run.variant(COMPARISON.variants[0].id))
        groups.add(hparams(found, "_hparams_/session_start_info").session_start_info.group_name)
    assert len(groups) == 3, "of one group's sessions the table shows the mean"


def test_varied_keys_are_hyperparameters() -> None:
    varied = {"params": {"width": 256, "kind": "gpt"}, "seed": 3, "args": ["--a", "1"]}
    values = hyperparameters(replace(COMPARISON.variants[0], varied=varied))
    assert values["params.width"] == 256.0
    assert values["params.kind"] == "gpt"
    assert values["seed"] == 3.0
    assert values["args"] == "[--a, 1]"


PROGRAM = [msgspec.structs.replace(step(n, 0), phases_ns={}) for n in (1, 2)]
"""Of a program's steps no phase is known."""


@pytest.mark.parametrize(("records", "count"), [(two_ranks(), 3), ({0: PROGRAM, 1: PROGRAM}, 1)])
def test_custom_scalars_ask_questions_whose_tags_exist(
    tmp_path: Path, records: dict[int, list[StepRecord]], count: int
) -> None:
    run = RunDir(tmp_path / "run")
    for rank, found in records.items():
        append_lines(run.steps("ddp-2-even", rank), found)
    write_tensorboard(COMPARISON, run)
    (tensor,) = read(run.path).Tensors("custom_scalars__config__")
    layout = Layout.FromString(tensor.tensor_proto.string_val[0])
    tags = read(run.variant("ddp-2-even")).Tags()["scalars"]
    charts = [chart for category in layout.category for chart in category.chart]
    assert len(charts) == count
    for chart in charts:
        assert any(re.match(pattern, tag) for pattern in chart.multiline.tag for tag in tags), chart.title


def test_without_steps_custom_scalars_ask_nothing(tmp_path: Path) -> None:
    write_tensorboard(COMPARISON, RunDir(tmp_path / "run"))
    assert "custom_scalars__config__" not in read(tmp_path / "run").Tags()["tensors"]


@pytest.mark.usefixtures("even")
def test_text_page_holds_the_summary(run: RunDir) -> None:
    (tensor,) = read(run.path).Tensors("summary")
    markdown = tensor.tensor_proto.string_val[0].decode()
    assert markdown == summary_markdown(COMPARISON)


def test_markdown_is_not_broken_by_what_users_write() -> None:
    assert escape("a | b\n*c* <b>") == r"a \| b \*c\* &lt;b&gt;"
    assert "&lt;b&gt;boom&lt;/b&gt; &amp;lt;" in markdown.markdown(escape("<b>boom</b> &lt;"))


def event_files(directory: Path) -> set[Path]:
    return set(directory.rglob("events.out.tfevents*"))


def test_rendering_again_replaces_the_files_and_leaves_others(run: RunDir) -> None:
    write_tensorboard(COMPARISON, run)
    first = event_files(run.path)
    assert len(first) == 1 + len(COMPARISON.variants)
    foreign = run.variant("ddp-2-even") / "events.out.tfevents.1.host"
    foreign.write_bytes(b"")
    write_tensorboard(COMPARISON, run)
    second = event_files(run.path) - {foreign}
    assert foreign.exists()
    assert len(second) == len(first)
    assert not first & second, "a watching TensorBoard reads on only in a new file"
    assert scalars(read(run.variant("ddp-2-even")), "step_ms") == [(0, pytest.approx(42.1))]


def test_nothing_that_is_not_a_number_becomes_a_metric() -> None:
    broken = replace(COMPARISON.variants[0], step_ms=StepTime(nan, None), samples_per_s=inf)
    assert not {"step_ms", "samples_per_s", "exposed_comm_percent"} & values_of([broken])[broken.id].keys()


def tags_of(events: Iterable[EventProto]) -> list[list[str]]:
    return [[value.tag for value in event.summary.value] for event in events]


def test_one_rank_is_ahead_of_none() -> None:
    alone = {0: [step(1, 20), step(2, 20)]}
    tags = tags_of(round_events(alone, Times()))
    assert len(tags) == 2
    assert not any(tag.startswith("ahead_ms") for its in tags for tag in its)


def test_a_rank_that_died_early_costs_only_its_own_points() -> None:
    ranks = two_ranks()
    ranks[1] = ranks[1][:-3]
    assert len(step_events(ranks, Times())) == 6
    assert [len(tags) for tags in tags_of(round_events(ranks, Times()))] == [5, 5, 3]
    assert step_events({}, Times()) == round_events({0: []}, Times()) == []
