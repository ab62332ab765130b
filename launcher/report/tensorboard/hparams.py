"""Variants as sessions of TensorBoard's HPARAMS tab: what was varied, and its figures.

The protocol buffers are made by hand: TensorBoard's own helpers for them import TensorFlow.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from google.protobuf.struct_pb2 import ListValue
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo

from gpurun.launcher.compare.label import split_label, value_text
from gpurun.launcher.compare.model import Comparison, VariantResult
from gpurun.launcher.findings.finding import screen_of
from gpurun.launcher.jobfile.settings import SETTINGS
from gpurun.launcher.report.markdown import NEW_LINE
from gpurun.launcher.report.metrics import METRICS, figures_of
from gpurun.launcher.rundir.records import MEASURED


def experiment_value(comparison: Comparison) -> Summary.Value:
    """The columns of the table; belongs to the root run."""
    rows = [hyperparameters(variant) for variant in comparison.variants]
    names = dict.fromkeys(name for row in rows for name in row)
    known = {metric.key for metric in figures_of(comparison.variants)}
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
            for metric in METRICS
            if metric.key in known
        ],
    )
    return _value(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment))


def start_value(variant: VariantResult, run_name: str, time_s: float) -> Summary.Value:
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


def end_value(variant: VariantResult, time_s: float) -> Summary.Value:
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
        name: _hparam(value) for name, value in (fixed | _flat(variant.varied)).items() if value is not None
    }


def _flat(varied: Mapping[str, Any]) -> dict[str, Any]:
    """A varied mapping (`params`) gets a column per key."""
    flat: dict[str, Any] = {}
    for key, value in varied.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat


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
