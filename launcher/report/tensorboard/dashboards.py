"""TensorBoard's Custom Scalars charts, one per question, and its Text page."""

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.util.tensor_util import make_tensor_proto

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
