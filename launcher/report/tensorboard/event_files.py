"""TensorBoard files of a run: a run per variant; charts, text and HParams columns in the root.

Written with TensorBoard's own protocol buffers; neither torch nor TensorFlow is needed to write or to show
them. Every rendering replaces the files of the one before.
"""

import io
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as EventProto
from tensorboard.compat.proto.event_pb2 import SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.compare.size_curves import BatchCurve
from gpurun.launcher.report.markdown import summary_markdown
from gpurun.launcher.report.metrics import values_of
from gpurun.launcher.report.tensorboard import hparams
from gpurun.launcher.report.tensorboard.series import (
    Point,
    Times,
    curve_points,
    round_points,
    step_points,
)
from gpurun.launcher.rundir.files import RunDir, write_bytes

SUFFIX = ".gpurun"
"""Ends the names of our files, so that only ours are replaced."""


def write_tensorboard(comparison: Comparison, run: RunDir) -> None:
    """Writes the event files of all variants and of the root, and removes those of earlier renderings.

    Raises:
        MachineError: a directory can't be written; the old files are kept.
    """
    values = values_of(comparison.variants)
    for variant in comparison.variants:
        _replace(run.variant(variant.id), _variant_events(variant, run, values[variant.id]))
    _replace(run.path, _root_events(comparison))


def _root_events(comparison: Comparison) -> list[EventProto]:
    values = [
        hparams.experiment_value(comparison),
        layout_value(),
        text_value("summary", summary_markdown(comparison)),
    ]
    return [_event(0, time.time(), values), *_batch_events(comparison.batch_curves)]


def _batch_events(curves: Sequence[BatchCurve]) -> list[EventProto]:
    """Throughput with the global batch in the place of the step: the chart's axis."""
    return [
        _event(point.global_batch, time.time(), _scalars({_over_batch(curve): point.samples_per_s}))
        for curve in curves
        for point in curve.points
    ]


def _over_batch(curve: BatchCurve) -> str:
    return f"samples_per_s_over_batch/{curve.label.replace(' ', '_')}"


def _variant_events(variant: VariantResult, run: RunDir, metrics: Mapping[str, float]) -> list[EventProto]:
    ranks = run.read_steps(variant.id)
    times = _times(run, {record.launch for records in ranks.values() for record in records})
    times_s = times.known or [time.time()]
    values = [hparams.start_value(variant, _run_name(run), min(times_s)), *_scalars(metrics)]
    return [
        _event(0, min(times_s), values),
        *map(_point_event, round_points(ranks, times)),
        *map(_point_event, step_points(ranks, times)),
        *map(_point_event, curve_points(variant.probe, min(times_s))),
        _event(0, max(times_s), [hparams.end_value(variant, max(times_s))]),
    ]


def _run_name(run: RunDir) -> str:
    """`NAME/TIMESTAMP`, as the directories are called."""
    return "/".join(run.path.resolve().parts[-2:])


def _times(run: RunDir, launches: Iterable[str]) -> Times:
    rounds: dict[tuple[str, int], float] = {}
    progress: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for launch in sorted(launches):
        for event in run.read_events(launch):
            if event.stage == "round":
                rounds.setdefault((launch, event.round), event.time_ns / 1e9)
            elif event.stage == "run":
                progress[launch].append((event.round, event.time_ns / 1e9))
    return Times(rounds, progress)


def _point_event(point: Point) -> EventProto:
    return _event(point.step, point.wall_time_s, _scalars(point.values))


def _scalars(values: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _event(step: int, wall_time_s: float, values: Sequence[Summary.Value]) -> EventProto:
    return EventProto(wall_time=wall_time_s, step=step, summary=Summary(value=values))


def _replace(directory: Path, events: Sequence[EventProto]) -> None:
    """A new file under a new name, then the old ones go.

    A TensorBoard that is watching reads on in the next file of a run, but never reads one again from its
    start, so the same name would hide the new figures.
    """
    old = list(directory.glob(f"events.out.tfevents.*{SUFFIX}"))
    write_bytes(directory / f"events.out.tfevents.{time.time_ns()}{SUFFIX}", _encode(events))
    for file in old:
        file.unlink(missing_ok=True)


def _encode(events: Sequence[EventProto]) -> bytes:
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    source = SourceMetadata(writer="gpurun")
    head = EventProto(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    for event in (head, *events):
        writer.write(event.SerializeToString())
    return buffer.getvalue()


QUESTIONS = {
    "Which split is fastest? (step, ms)": r"^step_ms/round$",
    "Where does a step's time go? (slowest rank, ms)": r"^slowest_rank_ms/.+$",
    "Do ranks wait? (ms ahead of the slowest)": r"^ahead_ms/.+$",
}
"""Title of a chart → its tags, in every run."""


def layout_value() -> Summary.Value:
    """The charts; belongs into any one run of a log directory."""
    charts = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[tags]))
        for title, tags in QUESTIONS.items()
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="gpurun", chart=charts)])
    return Summary.Value(
        tag=custom_scalar.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar.create_summary_metadata(),
        tensor=make_tensor_proto(layout.SerializeToString(), shape=[]),
    )


def text_value(tag: str, markdown: str) -> Summary.Value:
    """A page of Markdown."""
    return Summary.Value(
        tag=tag,
        metadata=text.create_summary_metadata(display_name=tag, description=""),
        tensor=make_tensor_proto(markdown.encode(), shape=[]),
    )
