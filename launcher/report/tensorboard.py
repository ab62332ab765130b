"""TensorBoard files of a run: a run per variant; charts, text and HParams columns in the root.

Written with TensorBoard's own protocol buffers; neither torch nor TensorFlow is needed to write or to show
them. Those of the HPARAMS tab are made by hand: TensorBoard's own helpers for them import TensorFlow. Every
rendering replaces the files of the one before.
"""

import io
import os
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import ListValue
from tensorboard.compat.proto.event_pb2 import Event as EventProto
from tensorboard.compat.proto.event_pb2 import SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from gpurun.launcher.compare.figures.ranks import BEFORE_COMMUNICATION
from gpurun.launcher.compare.figures.recorded import step_numbers
from gpurun.launcher.compare.figures.size_curves import BatchCurve, CurvePoint, ProbeResult
from gpurun.launcher.compare.label import split_label, value_text
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.errors import unwritable
from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.grouping import leaves
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.report.markdown import NEW_LINE, summary_markdown
from gpurun.launcher.report.metrics import measured_metrics, values_of
from gpurun.launcher.rundir.control import opened_in
from gpurun.launcher.rundir.files import RunDir, replacing
from gpurun.launcher.rundir.records import MEASURED, StepRecord

NS_PER_MS = 1e6


@dataclass(frozen=True)
class Times:
    """Times of events, in seconds since the epoch. Records carry durations only."""

    rounds: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """When each round of a launch began."""
    progress: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """How many steps had ended when, of each launch of a program."""

    @property
    def known(self) -> list[float]:
        """All of them."""
        return [*self.rounds.values(), *(time_s for points in self.progress.values() for _, time_s in points)]

    def began(self, records: Sequence[StepRecord]) -> list[float]:
        """When each step began: its round's start, plus the steps of the block before it.

        Of a program, whose records may be a sample, when the steps before it had ended.
        """
        times: list[float] = []
        ended = {launch: [num for num, _ in points] for launch, points in self.progress.items() if points}
        ended_s = {launch: [time_s for _, time_s in self.progress[launch]] for launch in ended}
        now_s, last = min(self.rounds.values(), default=0.0), None
        for record in records:
            if (record.launch, record.round) != last:
                last = (record.launch, record.round)
                now_s = self.rounds.get(last, now_s)
            if record.launch in ended:
                times.append(_between(ended[record.launch], ended_s[record.launch], record))
            else:
                times.append(now_s)
            now_s += record.step_ns / 1e9
        return times


def _between(ended: Sequence[int], times_s: Sequence[float], record: StepRecord) -> float:
    """When a step began that so many steps came before; before the first point, by its own length.

    Args:
        ended: how many steps had ended at some points, in rising order.
        times_s: when that was.
    """
    after = bisect_right(ended, record.step)
    if after == 0:
        return times_s[0] - (ended[0] - record.step) * record.step_ns / 1e9
    if after == len(ended):
        return times_s[-1]
    share = (record.step - ended[after - 1]) / (ended[after] - ended[after - 1])
    return times_s[after - 1] + share * (times_s[after] - times_s[after - 1])


def step_events(ranks: Mapping[int, Sequence[StepRecord]], times: Times) -> list[EventProto]:
    """An event per timed step, in ms: `step_ms/rank0`, `phases_ms/rank0/forward`.

    Steps count from 0 over all rounds and launches, those that a sample leaves out as well. A phase that is
    zero throughout has no tag.
    """
    phases = _used_phases(ranks)
    timed = {rank: _timed(records) for rank, records in ranks.items()}
    longest = max(timed.values(), key=len, default=[])
    return [
        _event(number, time_s, _scalars(_step_values(_at(timed, position), phases)))
        for position, (number, time_s) in enumerate(
            zip(step_numbers(longest), times.began(longest), strict=True)
        )
    ]


def round_events(ranks: Mapping[int, Sequence[StepRecord]], times: Times) -> list[EventProto]:
    """An event per round, from the means of its block of steps, in ms.

    `step_ms/round` is the maximum over ranks, `slowest_rank_ms/PHASE` what the slowest-computing rank does,
    and `ahead_ms/rankN` how much earlier than that one a rank is through with its forward pass: the time
    that it then waits.
    """
    phases = _used_phases(ranks)
    blocks = {rank: _blocks(records) for rank, records in ranks.items()}
    first = [block[0] for block in next(iter(blocks.values()), {}).values()]
    events = []
    for number, (record, time_s) in enumerate(zip(first, times.began(first), strict=True), start=1):
        key = (record.launch, record.round)
        block = {rank: found[key] for rank, found in blocks.items() if key in found}
        events.append(_event(number, time_s, _scalars(_round_values(block, phases))))
    return events


def curve_events(probe: ProbeResult | None, time_s: float) -> list[EventProto]:
    """An event per size of a micro-benchmark's curves, at the size in place of a step: `curve/SERIES/us`."""
    return [
        _event(point.size, time_s, _scalars(_finite(_curve_values(curve.series.replace(" ", "_"), point))))
        for curve in (probe.curves if probe else ())
        for point in curve.points
    ]


def _curve_values(series: str, point: CurvePoint) -> dict[str, float]:
    rates = {"GB_per_s": point.gb_per_s, "bus_GB_per_s": point.bus_gb_per_s, "GFLOP_per_s": point.gflop_per_s}
    known = {f"curve/{series}/{name}": rate for name, rate in rates.items() if rate is not None}
    return {f"curve/{series}/us": point.time_us, **known}


def _at(timed: Mapping[int, Sequence[StepRecord]], step: int) -> dict[int, StepRecord]:
    return {rank: records[step] for rank, records in timed.items() if step < len(records)}


def _step_values(records: Mapping[int, StepRecord], phases: Sequence[str]) -> dict[str, float]:
    values = {f"step_ms/rank{rank}": record.step_ns / NS_PER_MS for rank, record in records.items()}
    for rank, record in records.items():
        for phase in phases:
            values[f"phases_ms/rank{rank}/{phase}"] = record.phases_ns.get(phase, 0) / NS_PER_MS
    return _finite(values)


def _round_values(block: Mapping[int, Sequence[StepRecord]], phases: Sequence[str]) -> dict[str, float]:
    means = {rank: _mean_ms(records, phases) for rank, records in block.items()}
    early = {rank: sum(ms.get(phase, 0.0) for phase in BEFORE_COMMUNICATION) for rank, ms in means.items()}
    slowest = max(early, key=lambda rank: early[rank])
    values = {"step_ms/round": max(ms["step"] for ms in means.values())}
    values |= {f"slowest_rank_ms/{phase}": means[slowest][phase] for phase in phases}
    if len(means) > 1 and early[slowest] > 0:  # of a program's steps no phase is known
        values |= {f"ahead_ms/rank{rank}": early[slowest] - ms for rank, ms in early.items()}
    return _finite(values)


def _mean_ms(records: Sequence[StepRecord], phases: Sequence[str]) -> dict[str, float]:
    count = len(records) * NS_PER_MS
    means = {phase: sum(record.phases_ns.get(phase, 0) for record in records) / count for phase in phases}
    times_ns = (record.step_ns if record.block_ns is None else record.block_ns for record in records)
    return {"step": sum(times_ns) / count, **means}


def _blocks(records: Sequence[StepRecord]) -> dict[tuple[str, int], list[StepRecord]]:
    by_round = groupby(_timed(records), key=lambda record: (record.launch, record.round))
    return {key: list(block) for key, block in by_round}


def _timed(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.kind == "timed"]


def _used_phases(ranks: Mapping[int, Sequence[StepRecord]]) -> list[str]:
    """In the order in which they happen, as the workers write them."""
    found = {
        phase: None
        for records in ranks.values()
        for record in _timed(records)
        for phase, ns in record.phases_ns.items()
        if ns > 0
    }
    return list(found)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values without NaN and infinity, which break the axes of a chart."""
    return {tag: value for tag, value in values.items() if isfinite(value)}


SUFFIX = ".gpurun"
"""Ends the names of our files, so that only ours are replaced."""


def write_tensorboard(comparison: Comparison, run: RunDir) -> None:
    """Writes the event files of all variants and of the root, and removes those of earlier renderings.

    Raises:
        MachineError: a directory can't be written; the old files are kept.
    """
    values = values_of(comparison.variants)
    tags: set[str] = set()
    for variant in comparison.variants:
        events = _variant_events(variant, run, values[variant.id])
        _replace(run, run.variant(variant.id), events)
        tags.update(value.tag for event in events for value in event.summary.value)
    _replace(run, run.path, _root_events(comparison, tags))


def _root_events(comparison: Comparison, tags: Collection[str]) -> list[EventProto]:
    summary = Summary.Value(
        tag="summary",
        metadata=text.create_summary_metadata(display_name="summary", description=""),
        tensor=make_tensor_proto(summary_markdown(comparison).encode(), shape=[]),
    )
    values = [_experiment_value(comparison), *layout_values(tags), summary]
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
    values = [_start_value(variant, run_name(run), min(times_s)), *_scalars(metrics)]
    return [
        _event(0, min(times_s), values),
        *round_events(ranks, times),
        *step_events(ranks, times),
        *curve_events(variant.probe, min(times_s)),
        _event(0, max(times_s), [_end_value(variant, max(times_s))]),
    ]


def run_name(run: RunDir) -> str:
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


def _scalars(values: Mapping[str, float]) -> list[Summary.Value]:
    return [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def _event(step: int, wall_time_s: float, values: Sequence[Summary.Value]) -> EventProto:
    return EventProto(wall_time=wall_time_s, step=step, summary=Summary(value=values))


def _replace(run: RunDir, directory: Path, events: Sequence[EventProto]) -> None:
    """A new file under a new name, then the old ones go.

    A TensorBoard that is watching reads on in the next file of a run, but never reads one again from its
    start, so the same name would hide the new figures.
    """
    path, content = directory / f"events.out.tfevents.{time.time_ns()}{SUFFIX}", _encode(events)
    try:
        with opened_in(run, directory) as fd:
            old = [name for name in os.listdir(fd) if fnmatch(name, f"events.out.tfevents.*{SUFFIX}")]
            with replacing(path.name, fd) as file:
                file.write(content)
            for name in old:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
    except OSError as error:
        raise unwritable(path, error) from error


def _encode(events: Sequence[EventProto]) -> bytes:
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    source = SourceMetadata(writer="gpurun")
    head = EventProto(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source)
    for event in (head, *events):
        writer.write(event.SerializeToString())
    return buffer.getvalue()


QUESTIONS = {
    "Which variant is fastest? (step, ms)": r"^step_ms/round$",
    "Where does a step's time go? (slowest rank, ms)": r"^slowest_rank_ms/.+$",
    "Do ranks wait? (ms ahead of the slowest)": r"^ahead_ms/.+$",
}
"""Title of a chart → its tags, in every run."""


def layout_values(tags: Collection[str]) -> list[Summary.Value]:
    """The charts of these tags, none without any; belongs into any one run of a log directory."""
    charts = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[pattern]))
        for title, pattern in QUESTIONS.items()
        if any(re.match(pattern, tag) for tag in tags)
    ]
    if not charts:
        return []
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="gpurun", chart=charts)])
    value = Summary.Value(
        tag=custom_scalar.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar.create_summary_metadata(),
        tensor=make_tensor_proto(layout.SerializeToString(), shape=[]),
    )
    return [value]


def _experiment_value(comparison: Comparison) -> Summary.Value:
    """The columns of the table; belongs to the root run."""
    rows = [hyperparameters(variant) for variant in comparison.variants]
    names = dict.fromkeys(name for row in rows for name in row)
    experiment = api_pb2.Experiment(
        description=NEW_LINE.join(
            (
                *comparison.summary.splitlines(),
                *(f"! {text}." for text in screen_of(comparison.findings).dangers),
            )
        ),
        hparam_infos=[_column(name, [row[name] for row in rows if name in row]) for name in names],
        metric_infos=[
            api_pb2.MetricInfo(name=api_pb2.MetricName(tag=metric.key), display_name=metric.label)
            for metric in measured_metrics(comparison.variants)
        ],
    )
    return _value(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment))


def _start_value(variant: VariantResult, run_name: str, time_s: float) -> Summary.Value:
    """The variant's row; belongs to the variant's own run, where its metrics are.

    Args:
        variant: of the row.
        run_name: keeps rows of different runs apart: the table shows the mean of rows with one group name.
        time_s: when the variant began, in unix time.
    """
    info = SessionStartInfo(group_name=f"{run_name}/{variant.id}", start_time_secs=time_s)
    for name, value in hyperparameters(variant).items():
        if isinstance(value, str):
            info.hparams[name].string_value = value
        else:
            info.hparams[name].number_value = value
    return _value(metadata.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def _end_value(variant: VariantResult, time_s: float) -> Summary.Value:
    """How the variant ended."""
    status = api_pb2.Status.STATUS_SUCCESS if is_sound(variant) else api_pb2.Status.STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=time_s)
    return _value(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def is_sound(variant: VariantResult) -> bool:
    """Whether it ended as it should."""
    return variant.status in MEASURED


def hyperparameters(variant: VariantResult) -> dict[str, str | float]:
    """The settings of the variant, by column. `split` is text: a filter by value, not an axis of numbers."""
    own = {
        "split": split_label(variant) or str(variant.global_batch or "-"),
        "device_count": len(variant.devices),
    }
    fixed = {
        name: own[name] if name in own else getattr(variant, name)
        for name, setting in SETTINGS.items()
        if setting.has_column
    }
    return {
        name: _hparam(value)
        for name, value in (fixed | dict(leaves(variant.varied))).items()
        if value is not None
    }


def _hparam(value: Any) -> str | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return float(value) if is_number else value_text(value)


def _column(name: str, values: list[str | float]) -> api_pb2.HParamInfo:
    """The tab shows columns that differ first, and offers the listed values of text columns as filters."""
    differs = len(set(values)) > 1
    if all(isinstance(value, float) for value in values):
        return api_pb2.HParamInfo(name=name, type=api_pb2.DATA_TYPE_FLOAT64, differs=differs)
    domain = ListValue()
    domain.extend([str(value) for value in dict.fromkeys(values)])
    return api_pb2.HParamInfo(
        name=name, type=api_pb2.DATA_TYPE_STRING, domain_discrete=domain, differs=differs
    )


def _value(tag: str, data: HParamsPluginData) -> Summary.Value:
    return Summary.Value(
        tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR
    )
